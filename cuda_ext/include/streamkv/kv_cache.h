// The KV cache of one model: its memory, where each block lies, and slots of host memory that hold
// blocks as they are, while nobody computes with them.
#pragma once

#include <stdint.h>

#include "streamkv/kernels.h"
#include "streamkv/memory.h"

namespace streamkv {

struct KvCache {
  Memory memory;  // [num_blocks, num_layers, 2, num_kv_heads] parts
  Memory host;    // [num_host_slots] blocks
  Dtype dtype;    // kFloat32, kBFloat16 or kInt8
  int64_t num_blocks;
  int64_t num_host_slots;
  int64_t num_layers;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t head_dim;

  // Throws std::invalid_argument for sizes that the kernels can't serve, std::bad_alloc.
  static KvCache allocate(Dtype dtype, int64_t num_blocks, int64_t num_layers,
                          int64_t num_kv_heads, int64_t block_size, int64_t head_dim,
                          int64_t num_host_slots = 0);

  int64_t part_bytes() const;  // the keys or values of one head, with their scales
  int64_t block_bytes() const;
  KvLayer layer(int64_t index) const;
  char* block(int64_t id) const;  // all layers; ids are in range
  char* host_slot(int64_t id) const;
};

}  // namespace streamkv
