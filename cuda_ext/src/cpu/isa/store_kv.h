// How K and V lie in a block, and putting them there. Included by kernels.cpp alone.
//
// Of one KV head in one block: values are [block_size, head_dim]. Keys are transposed, so that the
// scores of neighbouring tokens are the lanes of a vector: float32 [head_dim, block_size], bfloat16
// [head_dim / 2, block_size, 2], the even dim first. (kv_cache.cpp reads them back.)
#pragma once

#include "streamkv/kernels.h"
#include "vec.h"

namespace {

using streamkv::KvLayer;
using streamkv::StoreKvArgs;

// Neighbours of a prompt are often in one block, and should be one thread's; those of rows that
// decode never are.
inline int64_t tokens_per_item(const StoreKvArgs& args) { return args.num_tokens < 256 ? 4 : 16; }

template <class E>
inline E* keys_of(const KvLayer& cache, int64_t block, int64_t kv_head) {
  return (E*)((char*)cache.data + block * cache.block_stride_bytes) +
         kv_head * cache.block_size * cache.head_dim;
}

template <class E>
inline E* values_of(const KvLayer& cache, int64_t block, int64_t kv_head) {
  return keys_of<E>(cache, block, cache.num_kv_heads + kv_head);
}

inline void store_key(const float* key, int64_t head_dim, int64_t block_size, float* to) {
  for (int64_t dim = 0; dim < head_dim; ++dim) to[dim * block_size] = key[dim];
}

inline void store_key(const float* key, int64_t head_dim, int64_t block_size, bf16* to) {
  alignas(64) bf16 rounded[streamkv::kMaxHeadDim];
  for (int64_t dim = 0; dim < head_dim; dim += kWidth) store(rounded + dim, load(key + dim));
  for (int64_t dim = 0; dim < head_dim; dim += 2)
    memcpy(to + dim * block_size, rounded + dim, 2 * sizeof(bf16));
}

template <class E>
inline E* key_slot(const StoreKvArgs& args, int64_t token, int64_t kv_head) {
  const int64_t slot = args.slots[token], block_size = args.cache.block_size;
  return keys_of<E>(args.cache, slot / block_size, kv_head) +
         slot % block_size * (4 / (int64_t)sizeof(E));
}

// A key's dims go to a line each, few of which are in the caches: so that they aren't waited for
// one by one. (A token's lines are also its neighbour's.)
template <class E>
inline void prefetch_keys(const StoreKvArgs& args, int64_t token) {
  const int64_t step = 4 / (int64_t)sizeof(E) * args.cache.block_size;
  for (int64_t head = 0; head < args.cache.num_kv_heads; ++head) {
    const E* to = key_slot<E>(args, token, head);
    const E* end = to + args.cache.head_dim * args.cache.block_size;
    for (; to < end; to += step) __builtin_prefetch(to, 1, 3);
  }
}

template <class E>
void store_token(const StoreKvArgs& args, int64_t token) {
  const KvLayer& cache = args.cache;
  const int64_t head_dim = cache.head_dim, heads = cache.num_kv_heads;
  const int64_t block = args.slots[token] / cache.block_size;
  const int64_t offset = args.slots[token] % cache.block_size;
  const float* keys = args.qkv + (token * (args.num_heads + 2 * heads) + args.num_heads) * head_dim;
  const float* values = keys + heads * head_dim;
  for (int64_t head = 0; head < heads; ++head) {
    store_key(keys + head * head_dim, head_dim, cache.block_size,
              key_slot<E>(args, token, head));
    E* to = values_of<E>(cache, block, head) + offset * head_dim;
    for (int64_t dim = 0; dim < head_dim; dim += kWidth)
      store(to + dim, load(values + head * head_dim + dim));
  }
}

int64_t store_kv_num_items(const StoreKvArgs& args, int) {
  return (args.num_tokens + tokens_per_item(args) - 1) / tokens_per_item(args);
}

template <class E>
void store_tokens(const StoreKvArgs& args, int64_t first, int64_t end) {
  prefetch_keys<E>(args, first);
  for (int64_t token = first; token < end; ++token) {
    if (token + 1 < end && args.slots[token + 1] != args.slots[token] + 1)
      prefetch_keys<E>(args, token + 1);
    store_token<E>(args, token);
  }
}

void store_kv_run(const StoreKvArgs& args, int64_t item, void*) {
  const int64_t tokens = tokens_per_item(args), first = item * tokens;
  const int64_t left = args.num_tokens - first;
  const int64_t end = first + (left < tokens ? left : tokens);
  if (args.cache.dtype == streamkv::Dtype::kBFloat16)
    store_tokens<bf16>(args, first, end);
  else
    store_tokens<float>(args, first, end);
}

}  // namespace
