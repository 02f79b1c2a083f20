// streamkv._cpu.KvCache.
#include "streamkv/kv_cache.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <bit>
#include <string>

#include "arguments.h"

namespace streamkv {
namespace {

// What a byte of int8 keys is stored with (isa/quantized_layout.h).
#if defined(__ARM_NEON)
constexpr uint8_t kKeyBits = 0;
#else
constexpr uint8_t kKeyBits = 0x80;
#endif

template <class T>
T read_at(const char* data, int64_t index) {
  T value;
  memcpy(&value, data + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// Where a key's element lies in its head's part of a block (isa/store_kv.h).
int64_t key_index(const KvLayer& layer, int64_t offset, int64_t dim) {
  const int64_t in_word = layer.dtype == Dtype::kInt8 ? 4 : layer.dtype == Dtype::kBFloat16 ? 2 : 1;
  return (dim / in_word * layer.block_size + offset) * in_word + dim % in_word;
}

// One number of a head's part of a block; `offset` is the token's.
float number(const KvLayer& layer, const char* part, bool is_key, int64_t offset, int64_t dim) {
  const int64_t index =
      is_key ? key_index(layer, offset, dim) : offset * layer.head_dim + dim;
  if (layer.dtype == Dtype::kFloat32) return read_at<float>(part, index);
  if (layer.dtype == Dtype::kBFloat16)
    return std::bit_cast<float>(uint32_t{read_at<uint16_t>(part, index)} << 16);
  const float scale = read_at<float>(part + layer.block_size * layer.head_dim, offset);
  const uint8_t byte = read_at<uint8_t>(part, index);
  return static_cast<float>(static_cast<int8_t>(is_key ? byte ^ kKeyBits : byte)) * scale;
}

nb::object read_heads(const KvCache& cache, int64_t block, int64_t layer, bool is_key) {
  const KvLayer view = cache.layer(layer);
  auto* out = new float[view.num_kv_heads * view.block_size * view.head_dim];
  nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  const char* part = static_cast<const char*>(view.data) + block * view.block_stride_bytes +
                     (is_key ? 0 : view.num_kv_heads * cache.part_bytes());
  float* to = out;
  for (int64_t head = 0; head < view.num_kv_heads; ++head, part += cache.part_bytes())
    for (int64_t offset = 0; offset < view.block_size; ++offset)
      for (int64_t dim = 0; dim < view.head_dim; ++dim)
        *to++ = number(view, part, is_key, offset, dim);
  const size_t shape[3] = {static_cast<size_t>(view.num_kv_heads),
                           static_cast<size_t>(view.block_size),
                           static_cast<size_t>(view.head_dim)};
  return nb::cast(nb::ndarray<nb::numpy, float>(out, 3, shape, owner));
}

void check_index(const char* op, const char* name, int64_t index, int64_t limit) {
  if (index < 0 || index >= limit)
    refuse(op, name, "0 to " + std::to_string(limit - 1), std::to_string(index));
}

nb::tuple read(const KvCache& cache, int64_t block, int64_t layer) {
  check_index("KvCache.read", "block", block, cache.num_blocks);
  check_index("KvCache.read", "layer", layer, cache.num_layers);
  return nb::make_tuple(read_heads(cache, block, layer, true),
                        read_heads(cache, block, layer, false));
}

void copy_block(KvCache& cache, int64_t source, int64_t target) {
  check_index("KvCache.copy_block", "source", source, cache.num_blocks);
  check_index("KvCache.copy_block", "target", target, cache.num_blocks);
  memmove(cache.block(target), cache.block(source), cache.block_bytes());
}

nb::object host_slots(nb::handle self) {
  const auto& cache = nb::cast<const KvCache&>(self);
  const size_t shape[2] = {static_cast<size_t>(cache.num_host_slots),
                           static_cast<size_t>(cache.block_bytes())};
  return nb::cast(nb::ndarray<nb::numpy, uint8_t>(cache.host.data(), 2, shape, self));
}

void init(KvCache* self, const std::string& dtype, int64_t num_blocks, int64_t num_layers,
          int64_t num_kv_heads, int64_t block_size, int64_t head_dim, int64_t num_host_slots) {
  new (self) KvCache(KvCache::allocate(parse_any_dtype("KvCache", "dtype", dtype), num_blocks,
                                       num_layers, num_kv_heads, block_size, head_dim,
                                       num_host_slots));
}

}  // namespace

void bind_kv_cache(nb::module_& m) {
  nb::class_<KvCache>(m, "KvCache", "The keys and values of one model, in blocks of all layers.")
      .def("__init__", &init, nb::arg("dtype"), nb::arg("num_blocks"), nb::arg("num_layers"),
           nb::arg("num_kv_heads"), nb::arg("block_size"), nb::arg("head_dim"),
           nb::arg("num_host_slots") = 0)
      .def_prop_ro("dtype", [](const KvCache& cache) { return dtype_name(cache.dtype); })
      .def_ro("num_blocks", &KvCache::num_blocks)
      .def_ro("num_layers", &KvCache::num_layers)
      .def_ro("num_kv_heads", &KvCache::num_kv_heads)
      .def_ro("block_size", &KvCache::block_size)
      .def_ro("head_dim", &KvCache::head_dim)
      .def_prop_ro("num_bytes", [](const KvCache& cache) { return cache.memory.num_bytes(); })
      .def_prop_ro("block_bytes", &KvCache::block_bytes)
      .def("copy_block", &copy_block, nb::arg("source"), nb::arg("target"))
      .def_ro("num_host_slots", &KvCache::num_host_slots)
      .def("host_slots", &host_slots,
           "The host memory itself, uint8 [num_host_slots, block_bytes]: other threads may use the "
           "slots that no copy of a step names.")
      .def("read", &read, nb::arg("block"), nb::arg("layer"),
           "K and V of one block and layer, float32 [num_kv_heads, block_size, head_dim] each.");
}

}  // namespace streamkv
