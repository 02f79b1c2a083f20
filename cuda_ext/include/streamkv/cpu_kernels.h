// The table of CPU kernels that depend on the instruction set, and the arguments they take.
//
// Plain data only: this header is seen by files compiled for different instruction sets, so it
// holds no inline function that the linker could take from the wrong one. Kernels check nothing;
// launch.cpp did. They allocate nothing and know no threads: who calls which item is the
// launcher's business, and no bit of the result depends on it.
#pragma once

#include <stdint.h>

namespace streamkv {

enum class Dtype : int { kFloat32 = 0, kBFloat16 = 1 };

// What a thread needs to run attention_tile, in floats: at most kMaxTileRows query rows of
// kMaxHeadDim, one partition of the context, and the softmax state.
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxTileRows = 128;
constexpr int64_t kPartition = 64;  // tokens of context whose softmax is computed on its own
constexpr int64_t kStateRows = kMaxTileRows + 16;  // read and written by whole vectors
constexpr int64_t kScratchFloats = 3 * kMaxTileRows * kMaxHeadDim + kMaxTileRows * kPartition +
                                   2 * kPartition * kMaxHeadDim + 6 * kStateRows;

struct RmsNormArgs {
  Dtype dtype;
  const void* x;         // [rows, hidden]
  const void* residual;  // [rows, hidden] or null: plain norm
  const void* weight;    // [hidden]
  void* normed;          // [rows, hidden]
  void* new_residual;    // [rows, hidden], null where residual is
  int64_t hidden;
  float eps;
};

struct RotaryArgs {
  Dtype dtype;
  const void* qkv;           // [tokens, (num_rotated + num_copied) * head_dim]
  const int32_t* positions;  // [tokens]
  const float* cos_sin;      // [max_positions, head_dim]: cosines, then sines
  void* out;                 // as qkv
  int64_t num_rotated;       // Q and K heads
  int64_t num_copied;        // V heads
  int64_t head_dim;
};

struct SiluMulArgs {
  Dtype dtype;
  const void* gate_up;  // [rows, 2 * inner]
  void* out;            // [rows, inner]
  int64_t inner;
};

struct AttentionArgs {
  Dtype dtype;
  const void* qkv;              // [tokens, qkv_width]
  const void* layer_cache;      // this layer's K of block 0: [2, num_kv_heads, block_size, head_dim]
  void* out;                    // [tokens, num_heads * head_dim]
  const int32_t* query_start;   // [rows + 1]
  const int32_t* context_lens;  // [rows]
  const int32_t* block_tables;  // [rows, max_blocks]
  int64_t max_blocks;
  int64_t num_blocks;
  int64_t block_stride;  // elements from one block to the next: all layers
  int64_t block_size;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t qkv_width;
  int64_t tile_queries;  // queries of a row that share a tile; times group size <= kMaxTileRows
  float scale;
};

struct CpuKernels {
  const char* isa;
  // Rows [begin, end); each row's bits depend on that row alone.
  void (*rms_norm)(const RmsNormArgs& args, int64_t begin, int64_t end);
  void (*rotary)(const RotaryArgs& args, int64_t begin, int64_t end);
  void (*silu_mul)(const SiluMulArgs& args, int64_t begin, int64_t end);
  // One tile of one row's queries, all query heads of one KV head. `scratch` is kScratchFloats
  // long and 64-byte aligned. False, with nothing written, if a block id is out of range.
  bool (*attention_tile)(const AttentionArgs& args, int64_t row, int64_t tile, int64_t kv_head,
                         float* scratch);
};

// The table in use, and the choice of another by name; see dispatch.cpp.
const CpuKernels& cpu_kernels();
void set_cpu_isa(const char* name);
int num_available_isas();
const char* available_isa(int index);  // best first

}  // namespace streamkv
