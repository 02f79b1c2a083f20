#include "streamkv/kv_cache.h"

#include <limits>
#include <new>
#include <stdexcept>
#include <string>

namespace streamkv {
namespace {

// Of one token and head: keys, or values.
int64_t token_bytes(Dtype dtype, int64_t head_dim) {
  switch (dtype) {
    case Dtype::kInt8: return head_dim + static_cast<int64_t>(sizeof(float));  // and their scale
    case Dtype::kBFloat16: return head_dim * 2;
    default: return head_dim * 4;
  }
}

void check(bool is_right, const char* name, const char* expected, int64_t got) {
  if (!is_right)
    throw std::invalid_argument(std::string("KvCache: ") + name + " must be " + expected +
                                ", got " + std::to_string(got));
}

}  // namespace

KvCache KvCache::allocate(Dtype dtype, int64_t num_blocks, int64_t num_layers,
                          int64_t num_kv_heads, int64_t block_size, int64_t head_dim,
                          int64_t num_host_slots) {
  if (dtype != Dtype::kFloat32 && dtype != Dtype::kBFloat16 && dtype != Dtype::kInt8)
    throw std::invalid_argument("KvCache: dtype must be float32, bfloat16 or int8");
  constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();  // slots are int32
  check(num_layers >= 1 && num_layers <= 4096, "num_layers", "1 to 4096", num_layers);
  check(num_kv_heads >= 1 && num_kv_heads <= 4096, "num_kv_heads", "1 to 4096", num_kv_heads);
  check(block_size >= 1 && block_size <= 1024, "block_size", "1 to 1024", block_size);
  check(head_dim >= 16 && head_dim <= kMaxHeadDim && head_dim % 16 == 0, "head_dim",
        "a multiple of 16 up to 256", head_dim);
  check(num_blocks >= 1 && num_blocks <= kMaxTokens / block_size, "num_blocks",
        "at least 1, and num_blocks * block_size below 2**31", num_blocks);
  check(num_host_slots >= 0 && num_host_slots <= kMaxTokens, "num_host_slots",
        "0 to 2**31 - 1", num_host_slots);
  KvCache cache{{},         {},           dtype,      num_blocks, num_host_slots,
                num_layers, num_kv_heads, block_size, head_dim};
  if (num_blocks + num_host_slots > std::numeric_limits<int64_t>::max() / cache.block_bytes())
    throw std::bad_alloc();
  // Blocks lie far apart and each is read from end to end: with small pages, finding them takes
  // longer than the arithmetic.
  cache.memory = Memory(num_blocks * cache.block_bytes(), true);
  cache.host = Memory(num_host_slots * cache.block_bytes(), true);
  return cache;
}

int64_t KvCache::part_bytes() const { return block_size * token_bytes(dtype, head_dim); }

int64_t KvCache::block_bytes() const { return num_layers * 2 * num_kv_heads * part_bytes(); }

KvLayer KvCache::layer(int64_t index) const {
  char* data = static_cast<char*>(memory.data()) + index * (block_bytes() / num_layers);
  return {data, dtype, block_bytes(), num_blocks, block_size, num_kv_heads, head_dim};
}

char* KvCache::block(int64_t id) const {
  return static_cast<char*>(memory.data()) + id * block_bytes();
}

char* KvCache::host_slot(int64_t id) const {
  return static_cast<char*>(host.data()) + id * block_bytes();
}

}  // namespace streamkv
