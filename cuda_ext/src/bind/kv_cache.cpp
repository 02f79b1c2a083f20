// streamkv._cpu.KvCache.
#include "streamkv/kv_cache.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <string>

#include "arguments.h"

namespace streamkv {
namespace {

float element(const void* data, Dtype dtype, int64_t index) {
  float value;
  if (dtype == Dtype::kFloat32) {
    memcpy(&value, static_cast<const float*>(data) + index, sizeof(value));
  } else {
    const uint32_t bits = uint32_t{static_cast<const uint16_t*>(data)[index]} << 16;
    memcpy(&value, &bits, sizeof(value));
  }
  return value;
}

// Where a key's element lies in its head's part of a block (isa/store_kv.h).
int64_t key_index(const KvLayer& layer, int64_t offset, int64_t dim) {
  if (layer.dtype == Dtype::kFloat32) return dim * layer.block_size + offset;
  return (dim / 2 * layer.block_size + offset) * 2 + dim % 2;
}

nb::object read_heads(const KvLayer& layer, int64_t block, int64_t first_head, bool is_key) {
  const int64_t elements = layer.block_size * layer.head_dim;
  auto* out = new float[layer.num_kv_heads * elements];
  nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  const void* data = static_cast<const char*>(layer.data) + block * layer.block_stride_bytes;
  float* to = out;
  for (int64_t head = first_head; head < first_head + layer.num_kv_heads; ++head)
    for (int64_t offset = 0; offset < layer.block_size; ++offset)
      for (int64_t dim = 0; dim < layer.head_dim; ++dim)
        *to++ = element(data, layer.dtype,
                        head * elements + (is_key ? key_index(layer, offset, dim)
                                                  : offset * layer.head_dim + dim));
  const size_t shape[3] = {static_cast<size_t>(layer.num_kv_heads),
                           static_cast<size_t>(layer.block_size),
                           static_cast<size_t>(layer.head_dim)};
  return nb::cast(nb::ndarray<nb::numpy, float>(out, 3, shape, owner));
}

void check_index(const char* op, const char* name, int64_t index, int64_t limit) {
  if (index < 0 || index >= limit)
    refuse(op, name, "0 to " + std::to_string(limit - 1), std::to_string(index));
}

nb::tuple read(const KvCache& cache, int64_t block, int64_t layer) {
  check_index("KvCache.read", "block", block, cache.num_blocks);
  check_index("KvCache.read", "layer", layer, cache.num_layers);
  const KvLayer view = cache.layer(layer);
  return nb::make_tuple(read_heads(view, block, 0, true),
                        read_heads(view, block, view.num_kv_heads, false));
}

void copy_block(KvCache& cache, int64_t source, int64_t target) {
  check_index("KvCache.copy_block", "source", source, cache.num_blocks);
  check_index("KvCache.copy_block", "target", target, cache.num_blocks);
  cache.copy_block(source, target);
}

void init(KvCache* self, const std::string& dtype, int64_t num_blocks, int64_t num_layers,
          int64_t num_kv_heads, int64_t block_size, int64_t head_dim) {
  new (self) KvCache(KvCache::allocate(parse_dtype("KvCache", "dtype", dtype), num_blocks,
                                       num_layers, num_kv_heads, block_size, head_dim));
}

}  // namespace

void bind_kv_cache(nb::module_& m) {
  nb::class_<KvCache>(m, "KvCache", "The keys and values of one model, in blocks of all layers.")
      .def("__init__", &init, nb::arg("dtype"), nb::arg("num_blocks"), nb::arg("num_layers"),
           nb::arg("num_kv_heads"), nb::arg("block_size"), nb::arg("head_dim"))
      .def_prop_ro("dtype", [](const KvCache& cache) { return dtype_name(cache.dtype); })
      .def_ro("num_blocks", &KvCache::num_blocks)
      .def_ro("num_layers", &KvCache::num_layers)
      .def_ro("num_kv_heads", &KvCache::num_kv_heads)
      .def_ro("block_size", &KvCache::block_size)
      .def_ro("head_dim", &KvCache::head_dim)
      .def_prop_ro("num_bytes", [](const KvCache& cache) { return cache.memory.num_bytes(); })
      .def_prop_ro("block_bytes", &KvCache::block_bytes)
      .def("copy_block", &copy_block, nb::arg("source"), nb::arg("target"))
      .def("read", &read, nb::arg("block"), nb::arg("layer"),
           "K and V of one block and layer, float32 [num_kv_heads, block_size, head_dim] each.");
}

}  // namespace streamkv
