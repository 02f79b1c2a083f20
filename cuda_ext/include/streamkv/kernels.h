// The kernels that depend on the instruction set, the arguments they take, and the table of them.
//
// Plain data only: this header is seen by files compiled for different instruction sets, so it
// holds no inline function that the linker could take from the wrong one. Kernels check nothing
// (whoever built a program did), allocate nothing and know no threads.
//
// A kernel cuts its work into items. `num_items` says into how many, for so many threads; `run`
// does one. Items are independent, may run at once and in any order, and no bit of a result depends
// on how the work was cut: each output has one accumulator, filled in a fixed order.
//
// Activations are float32, but for the left sides of matrix products ("inputs"), which have the
// type that the product takes: for float weights float32 where they are widened in flight and
// bfloat16 where there is an instruction for products of bfloat16; for quantized weights groups of
// int8 (quantized.h).
#pragma once

#include <stdint.h>

#include "streamkv/batch.h"
#include "streamkv/quantized.h"

namespace streamkv {

// float16: sources only. int8: inputs, rows of InputGroups; and KV, with a scale a token and head.
enum class Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3 };

// Raised with each change after which the same model computes other bits of keys and values, or lays
// them out otherwise: what was kept on disk before is then not used any more.
constexpr int64_t kKernelRevision = 1;

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxHeads = int64_t{1} << 20;  // so that no row's size overflows
constexpr int64_t kPartition = 64;  // tokens of context whose softmax is computed on its own
constexpr int64_t kScratchBytes = 1 << 20;  // each thread's, 64-byte aligned, contents undefined

// A matrix [num_outputs, depth] as products read it: panels of `Kernels::panel` outputs, the last
// one filled up with zeros; in a panel depth runs slowest, in pairs for bfloat16. `is_paired`: the
// first half of the outputs are gates, the second half what they gate, and panels alternate between
// them, so that a gate and its partner are computed by one item.
struct PackedWeight {
  const void* data;     // 64-byte aligned
  Dtype dtype;          // kFloat32 or kBFloat16
  int64_t num_outputs;  // N
  int64_t depth;        // K, even
  bool is_paired;
};

struct PackArgs {
  PackedWeight weight;   // where to; `data` is written
  const void* source;    // [num_rows, depth], dense
  Dtype source_dtype;    // any
  int64_t first_output;  // of the matrix, gates first if paired
  int64_t num_rows;
};

struct EmbeddingArgs {
  const int32_t* token_ids;  // [num_tokens]
  PackedWeight weight;       // [vocab, hidden], packed for products: a tied head needs no copy
  float* out;                // [num_tokens, hidden]
  int64_t num_tokens;
};

struct RmsNormArgs {
  const float* x;       // [num_rows, hidden]
  const float* weight;  // [hidden]
  void* out;            // [num_rows, hidden] inputs
  Dtype out_dtype;      // any of inputs
  int64_t num_rows;
  int64_t hidden;
  float eps;
};

// out = x @ weight.T + bias + residual, or silu(gate) * up of that.
struct MatmulArgs {
  const void* x;          // [num_rows, depth] inputs
  PackedWeight weight;
  const float* bias;      // [num_outputs] or null
  const float* residual;  // [num_rows, num_outputs] or null; may be `out`
  void* out;              // float [num_rows, num_outputs]; paired: inputs [num_rows, num_outputs / 2]
  Dtype out_dtype;        // kFloat32; paired: or kBFloat16
  int64_t num_rows;
};

// The same for quantized weights.
struct QuantizedMatmulArgs {
  const InputGroup* x;    // [num_rows, divide_up(depth, kInputGroup)]
  QuantizedWeight weight;
  const float* bias;      // [num_outputs] or null
  const float* residual;  // [num_rows, num_outputs] or null; may be `out`
  void* out;              // float [num_rows, num_outputs]; paired: inputs [num_rows, num_outputs / 2]
  Dtype out_dtype;        // kFloat32; paired: any of inputs
  int64_t num_rows;
  int64_t num_threads = 1;  // that take the items by turns: set by BoundKernel, decides the cut
};

// Float rows to rows of InputGroups, where the op that made them couldn't.
struct QuantizeArgs {
  const float* x;   // [num_rows, width]
  InputGroup* out;  // [num_rows, divide_up(width, kInputGroup)]
  int64_t num_rows;
  int64_t width;
};

// rms_norm of each Q head and each K head.
struct HeadRmsNormArgs {
  const float* qkv;       // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
  const float* q_weight;  // [head_dim]
  const float* k_weight;  // [head_dim]
  float* out;             // as qkv; may be qkv
  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  float eps;
};

struct RotaryArgs {
  const float* qkv;          // [num_tokens, (num_rotated + num_copied) * head_dim]
  const int32_t* positions;  // [num_tokens]
  const float* cos_sin;      // [max_positions, head_dim]: head_dim / 2 cosines, then sines
  float* out;                // as qkv; may be qkv
  int64_t num_tokens;
  int64_t num_rotated;  // Q and K heads
  int64_t num_copied;   // V heads
  int64_t head_dim;
};

// One layer of the KV cache. A block holds all layers: [layer, 2, num_kv_heads] parts, a head's keys
// or values of block_size tokens, with their scales; how a part is laid out is up to store_kv and
// attention (isa/store_kv.h).
struct KvLayer {
  void* data;   // this layer's part of block 0
  Dtype dtype;  // kFloat32, kBFloat16 or kInt8
  int64_t block_stride_bytes;
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_kv_heads;
  int64_t head_dim;  // a multiple of 16 up to kMaxHeadDim
};

struct StoreKvArgs {
  const float* qkv;      // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
  const int32_t* slots;  // [num_tokens]
  KvLayer cache;
  int64_t num_tokens;
  int64_t num_heads;
};

struct AttentionPlan;  // attention_plan.h: the items of a step, the same for each of its layers

struct AttentionArgs {
  const float* qkv;  // as above; only Q is read, K and V were stored
  KvLayer cache;
  const Batch* batch;
  const AttentionPlan* plan;
  void* out;  // [num_tokens, num_heads * head_dim] inputs
  Dtype out_dtype;  // any of inputs; kInt8 if head_dim is a multiple of kInputGroup
  int64_t num_heads;
  float scale;
};

struct SelectRowsArgs {
  const float* x;       // [?, width]
  const int32_t* rows;  // [num_rows]
  float* out;           // [num_rows, width]
  int64_t num_rows;
  int64_t width;
};

template <class Args>
struct Kernel {
  int64_t (*num_items)(const Args& args, int num_threads);
  void (*run)(const Args& args, int64_t item, void* scratch);
};

// Loops over the vocabulary that sampling is made of (sampler.cpp decides, these compute).
// n is any length; pointers are 4-byte aligned.
struct SamplingKernels {
  // The first index of the greatest value; a NaN or +infinity anywhere gives -1, as do only -inf.
  int64_t (*argmax)(const float* x, int64_t n);
  // Sum over i of exp((x[i] - shift) * factor), in the order that the width gives. factor > 0,
  // x[i] <= shift.
  double (*sum_exp)(const float* x, int64_t n, float shift, float factor);
  // How many are >= threshold.
  int64_t (*count_at_least)(const float* x, int64_t n, float threshold);
  // Indices (ascending) and values of those >= threshold, at most `capacity`; returns how many.
  int64_t (*collect_at_least)(const float* x, int64_t n, float threshold, int32_t* indices,
                              float* values, int64_t capacity);
  // Those in [low, high), in their order; returns how many. `values` has room for n, is not x.
  int64_t (*collect_between)(const float* x, int64_t n, float low, float high, float* values);
  // Cuts x, which has no NaN, into groups of at most `size` each and gives the greatest of each,
  // -infinity for an empty one; returns how many. `maxima` has room for n / size + 32.
  int64_t (*group_maxima)(const float* x, int64_t n, int64_t size, float* maxima);
  // out[i] is x[i] where bit i % 32 of bits[i / 32] is set, else -infinity. `out` may be x.
  void (*mask)(const float* x, const int32_t* bits, int64_t n, float* out);
};

// Loops that do the most a thread can, for benchmarks. `out` has room for a vector (64 bytes), and
// out[0] holds 1.
struct PeakKernels {
  // Multiply-adds of float32 on registers; returns how many operations it did.
  int64_t (*fma)(int64_t num_rounds, float* out);
  // The same of bfloat16 dot products; null where there is no instruction.
  int64_t (*bf16_dot)(int64_t num_rounds, float* out);
  // The same of products of bytes summed in 32 bits, by the instructions that the kernels use.
  int64_t (*int8_dot)(int64_t num_rounds, float* out);
  // Reads 64-byte aligned data, a multiple of 512 bytes, prefetching so far ahead (0: not at all).
  void (*read)(const void* data, int64_t num_bytes, int64_t ahead_bytes, float* out);
};

struct QuantizedKernels {
  int64_t (*packed_bytes)(WeightFormat format, int64_t num_outputs, int64_t depth);
  void (*pack)(const QuantizedPackArgs& args);
  // Rows [first_output, + num_rows) as float32 [num_rows, depth]: just the file's values.
  void (*unpack)(const QuantizedWeight& weight, int64_t first_output, int64_t num_rows,
                 float* out);
  Kernel<QuantizedEmbeddingArgs> embedding;
  Kernel<QuantizedMatmulArgs> matmul;
  Kernel<QuantizeArgs> quantize;
};

struct Kernels {
  // "baseline", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "neon", "neon_dotprod"
  const char* isa;
  int64_t panel;        // outputs in a panel of a packed weight
  Dtype bf16_inputs;    // what the left side of a product with bfloat16 weights is
  int64_t (*packed_bytes)(const PackedWeight& weight);  // of `data`
  void (*pack)(const PackArgs& args);
  // Rows [first_output, + num_rows) as float32 [num_rows, depth]; the inverse of pack.
  void (*unpack)(const PackedWeight& weight, int64_t first_output, int64_t num_rows, float* out);

  Kernel<EmbeddingArgs> embedding;
  Kernel<RmsNormArgs> rms_norm;
  Kernel<MatmulArgs> matmul;
  Kernel<HeadRmsNormArgs> head_rms_norm;
  Kernel<RotaryArgs> rotary;
  Kernel<StoreKvArgs> store_kv;
  Kernel<AttentionArgs> attention;
  Kernel<SelectRowsArgs> select_rows;
  QuantizedKernels quantized;
  SamplingKernels sampling;
  PeakKernels peaks;
};

// How products are cut into items and how far ahead weights are fetched: who computes what and when,
// never a bit of it. What is best depends on a machine's caches, memory and threads.
struct ProductTuning {
  int64_t item_kib;     // of weights that an item reads for few rows; for more rows it takes fewer
  int64_t item_tiles;   // the most tiles of rows in an item
  int64_t ahead_bytes;  // from the weights that are read to those that are fetched meanwhile, where
                        // a tile has no others to share that with
};
struct Tuning {
  ProductTuning quantized, floats;  // by the weights
};
constexpr Tuning kDefaultTuning = {{64, 10, 8192}, {128, 10, 4096}};

// The one in use. Kernels read it whenever they cut, so it changes only while none runs; what may
// be in it is checked where it is bound (bind/tuning.cpp).
extern Tuning tuning;
void set_tuning(const Tuning& wanted);

// The table in use, and the choice of another by name; see dispatch.cpp. Weights and caches belong
// to the table that packed them: choose before loading.
const Kernels& kernels();
void set_isa(const char* name);
int num_available_isas();
const char* available_isa(int index);  // best first

}  // namespace streamkv
