// streamkv._cpu: the CPU ops for Python. Arrays come as addresses (Tensor.data_ptr()).
//
// Addresses, because nanobind's ndarray takes 2.6 us to import one torch tensor and an op of a
// small step takes less. streamkv/ops/native.py is the only caller: it checks types and shapes.
// Every op releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "streamkv/launch.h"
#include "streamkv/thread_pool.h"

namespace nb = nanobind;

namespace {

using namespace streamkv;

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Dtype dtype_of(bool is_bf16) { return is_bf16 ? Dtype::kBFloat16 : Dtype::kFloat32; }

// Where `layer` begins in a block, and what one block takes, in elements.
struct CacheStrides {
  int64_t layer, block;
  CacheStrides(int64_t num_layers, int64_t layer_index, int64_t num_kv_heads, int64_t block_size,
               int64_t head_dim) {
    const int64_t layer_elements = 2 * num_kv_heads * block_size * head_dim;
    layer = layer_index * layer_elements;
    block = num_layers * layer_elements;
  }
};

void embedding(uintptr_t weight, uintptr_t token_ids, uintptr_t out, int64_t num_tokens,
               int64_t vocab_size, int64_t row_bytes) {
  launch_gather_rows("embedding", "token_ids", pointer<void>(weight), pointer<int32_t>(token_ids),
                     pointer<void>(out), num_tokens, vocab_size, row_bytes);
}

void select_rows(uintptr_t x, uintptr_t rows, uintptr_t out, int64_t num_selected,
                 int64_t num_rows, int64_t row_bytes) {
  launch_gather_rows("select_rows", "rows", pointer<void>(x), pointer<int32_t>(rows),
                     pointer<void>(out), num_selected, num_rows, row_bytes);
}

void rms_norm(bool is_bf16, uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t normed,
              uintptr_t new_residual, int64_t num_rows, int64_t hidden, float eps) {
  launch_rms_norm({dtype_of(is_bf16), pointer<void>(x), pointer<void>(residual),
                   pointer<void>(weight), pointer<void>(normed), pointer<void>(new_residual),
                   hidden, eps},
                  num_rows);
}

void rotary(bool is_bf16, uintptr_t qkv, uintptr_t positions, uintptr_t cos_sin, uintptr_t out,
            int64_t num_tokens, int64_t num_rotated, int64_t num_copied, int64_t head_dim,
            int64_t max_positions) {
  launch_rotary({dtype_of(is_bf16), pointer<void>(qkv), pointer<int32_t>(positions),
                 pointer<float>(cos_sin), pointer<void>(out), num_rotated, num_copied, head_dim},
                num_tokens, max_positions);
}

void silu_mul(bool is_bf16, uintptr_t gate_up, uintptr_t out, int64_t num_rows, int64_t inner) {
  launch_silu_mul({dtype_of(is_bf16), pointer<void>(gate_up), pointer<void>(out), inner},
                  num_rows);
}

void store_kv(bool is_bf16, uintptr_t qkv, uintptr_t kv_cache, uintptr_t slots, int64_t num_tokens,
              int64_t num_blocks, int64_t num_layers, int64_t block_size, int64_t layer,
              int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
  const int64_t element_bytes = is_bf16 ? 2 : 4, head_bytes = head_dim * element_bytes;
  const CacheStrides strides(num_layers, layer, num_kv_heads, block_size, head_dim);
  StoreKvArgs args;
  args.qkv = pointer<void>(qkv);
  args.layer_cache = pointer<char>(kv_cache) + strides.layer * element_bytes;
  args.slots = pointer<int32_t>(slots);
  args.num_blocks = num_blocks;
  args.block_bytes = strides.block * element_bytes;
  args.block_size = block_size;
  args.num_kv_heads = num_kv_heads;
  args.head_bytes = head_bytes;
  args.qkv_bytes = (num_heads + 2 * num_kv_heads) * head_bytes;
  args.q_bytes = num_heads * head_bytes;
  launch_store_kv(args, num_tokens);
}

void paged_attention(bool is_bf16, uintptr_t qkv, uintptr_t kv_cache, uintptr_t out,
                     uintptr_t query_start, uintptr_t context_lens, uintptr_t block_tables,
                     int64_t num_tokens, int64_t num_rows, int64_t max_blocks, int64_t num_blocks,
                     int64_t num_layers, int64_t block_size, int64_t layer, int64_t num_heads,
                     int64_t num_kv_heads, int64_t head_dim, float scale) {
  const CacheStrides strides(num_layers, layer, num_kv_heads, block_size, head_dim);
  AttentionArgs args;
  args.dtype = dtype_of(is_bf16);
  args.qkv = pointer<void>(qkv);
  args.layer_cache = pointer<char>(kv_cache) + strides.layer * (is_bf16 ? 2 : 4);
  args.out = pointer<void>(out);
  args.query_start = pointer<int32_t>(query_start);
  args.context_lens = pointer<int32_t>(context_lens);
  args.block_tables = pointer<int32_t>(block_tables);
  args.max_blocks = max_blocks;
  args.num_blocks = num_blocks;
  args.block_stride = strides.block;
  args.block_size = block_size;
  args.num_heads = num_heads;
  args.num_kv_heads = num_kv_heads;
  args.head_dim = head_dim;
  args.qkv_width = (num_heads + 2 * num_kv_heads) * head_dim;
  args.scale = scale;
  launch_paged_attention(args, num_rows, num_tokens);
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (int i = 0, count = num_available_isas(); i < count; ++i) names.push_back(available_isa(i));
  return names;
}

void set_threads(int count) {
  if (count < 1)
    throw std::invalid_argument("set_num_threads: expected at least 1, got " +
                                std::to_string(count));
  set_num_threads(count);
}

}  // namespace

NB_MODULE(_cpu, m) {
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  m.def("embedding", &embedding, no_gil);
  m.def("select_rows", &select_rows, no_gil);
  m.def("rms_norm", &rms_norm, no_gil);
  m.def("rotary", &rotary, no_gil);
  m.def("silu_mul", &silu_mul, no_gil);
  m.def("store_kv", &store_kv, no_gil);
  m.def("paged_attention", &paged_attention, no_gil);

  m.def("isa", [] { return std::string(cpu_kernels().isa); });
  m.def("available_isas", &available_isas, "Instruction sets this CPU runs, best first.");
  m.def("set_isa", [](const std::string& name) { set_cpu_isa(name.c_str()); }, nb::arg("name"),
        "Chooses the kernels; ValueError for an unknown name or one this CPU can't run.");
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_threads, nb::arg("count"), no_gil);
  m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
  m.attr("MAX_GROUP_SIZE") = kMaxTileRows;
}
