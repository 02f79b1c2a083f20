// The KV cache of one model: its memory and where each block lies.
#pragma once

#include <stdint.h>

#include "streamkv/kernels.h"
#include "streamkv/memory.h"

namespace streamkv {

struct KvCache {
  Memory memory;  // [num_blocks, num_layers, 2, num_kv_heads] parts
  Dtype dtype;    // kFloat32, kBFloat16 or kInt8
  int64_t num_blocks;
  int64_t num_layers;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t head_dim;

  // Throws std::invalid_argument for sizes that the kernels can't serve, std::bad_alloc.
  static KvCache allocate(Dtype dtype, int64_t num_blocks, int64_t num_layers,
                          int64_t num_kv_heads, int64_t block_size, int64_t head_dim);

  int64_t part_bytes() const;  // the keys or values of one head, with their scales
  int64_t block_bytes() const;
  KvLayer layer(int64_t index) const;
  void copy_block(int64_t source, int64_t target);  // all layers; ids are in range
};

}  // namespace streamkv
