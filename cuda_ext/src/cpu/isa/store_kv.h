// How K and V lie in a block, and putting them there.
//
// Of one KV head in one block: values are [block_size, head_dim]. Keys are transposed, so that the
// scores of neighbouring tokens are the lanes of a vector: [words, block_size] words of 32 bits, a
// word being one float32, two bfloat16 or four int8 dims, the first one lowest. int8 keys have
// kByteOffset added; behind keys and values follow [block_size] float32 scales of each.
// (kv_cache.cpp reads them back.)
#pragma once

#include "quantized_layout.h"
#include "quantized_rows.h"
#include "streamkv/kernels.h"
#include "vec.h"

namespace {

using streamkv::KvLayer;
using streamkv::StoreKvArgs;

constexpr int kColumn = 16;  // tokens that attention reads together, if they are of one block

// Items are of so many tokens, or more where neighbours are of one column, as those of a prompt
// are: a line of keys should be one thread's.
inline int64_t tokens_per_item(const StoreKvArgs& args) { return args.num_tokens < 256 ? 4 : 16; }

// Elements in a word.
template <class E>
constexpr int64_t kPerWord = 4 / (int64_t)sizeof(E);

template <class E>
constexpr bool kHasScales = sizeof(E) == 1;

// A head's keys, or its values, in a block of so many tokens, with their scales.
template <class E>
constexpr int64_t part_bytes(int64_t block_size, int64_t head_dim) {
  return block_size * (head_dim * (int64_t)sizeof(E) + (kHasScales<E> ? 4 : 0));
}

template <class E>
inline E* keys_of(const KvLayer& cache, int64_t block, int64_t kv_head) {
  return (E*)((char*)cache.data + block * cache.block_stride_bytes +
              kv_head * part_bytes<E>(cache.block_size, cache.head_dim));
}

template <class E>
inline E* values_of(const KvLayer& cache, int64_t block, int64_t kv_head) {
  return keys_of<E>(cache, block, cache.num_kv_heads + kv_head);
}

// Of the keys or values that begin there.
template <class E>
inline float* scales_of(E* part, int64_t block_size, int64_t head_dim) {
  return (float*)(part + block_size * head_dim);
}

// x to the nearest whole numbers, which fit into a byte, ties to even.
inline void store_rounded(int8_t* p, vfloat x) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, _mm512_cvtps_epi32(x));
  memcpy(p, &bytes, sizeof(bytes));
#elif defined(__AVX2__)
  const __m256i whole = _mm256_cvtps_epi32(x);
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
#elif defined(__SSE4_1__)
  const __m128i words = _mm_packs_epi32(_mm_cvtps_epi32(x), _mm_setzero_si128());
  const int32_t bytes = _mm_cvtsi128_si32(_mm_packs_epi16(words, words));
  memcpy(p, &bytes, sizeof(bytes));
#else
  const int16x4_t words = vqmovn_s32(vcvtnq_s32_f32(x));
  const int8x8_t bytes = vqmovn_s16(vcombine_s16(words, words));
  memcpy(p, &bytes, 4);
#endif
}

// A head's numbers as the cache has them. Returns the scale, where there is one.
inline float convert_head(const float* x, int64_t head_dim, float* to) {
  for (int64_t dim = 0; dim < head_dim; dim += kWidth) store(to + dim, load(x + dim));
  return 1.0f;
}

inline float convert_head(const float* x, int64_t head_dim, bf16* to) {
  for (int64_t dim = 0; dim < head_dim; dim += kWidth) store(to + dim, load(x + dim));
  return 1.0f;
}

// As a group of inputs is made (quantized_rows.h), but of any length.
inline float convert_head(const float* x, int64_t head_dim, int8_t* to) {
  vuint magnitudes = {};
  for (int64_t dim = 0; dim < head_dim; dim += kWidth)
    magnitudes = max(magnitudes, (vuint)load(x + dim) & 0x7fffffffu);
  const uint32_t bits = reduce_max(magnitudes);
  float greatest;
  memcpy(&greatest, &bits, sizeof(greatest));
  const bool is_zero = greatest < 0x1p-119f, is_finite = bits < 0x7f800000u;
  const vfloat inverse = broadcast(is_zero || !is_finite ? 0.0f : 127.0f / greatest);
  for (int64_t dim = 0; dim < head_dim; dim += kWidth)
    store_rounded(to + dim, load(x + dim) * inverse);
  if (!is_finite) return __builtin_nanf("");
  return is_zero ? 0.0f : greatest / 127.0f;
}

// What a word of keys is stored with.
template <class E>
constexpr uint32_t kKeyBits = kHasScales<E> ? kByteOffset * 0x01010101u : 0;

template <class E>
inline void store_key(const float* key, int64_t head_dim, int64_t block_size, E* to,
                      float* scale) {
  alignas(64) E row[streamkv::kMaxHeadDim];
  const float its_scale = convert_head(key, head_dim, row);
  if constexpr (kHasScales<E>) *scale = its_scale;
  for (int64_t dim = 0; dim < head_dim; dim += kPerWord<E>) {
    uint32_t word;
    memcpy(&word, row + dim, sizeof(word));
    word ^= kKeyBits<E>;
    memcpy(to + dim * block_size, &word, sizeof(word));
  }
}

// Those of kWidth tokens that are neighbours in the block too; `stride` floats from key to key.
template <class E>
inline void store_keys(const float* keys, int64_t stride, int64_t head_dim, int64_t block_size,
                       E* to, float* scales) {
  alignas(64) E rows[kWidth * streamkv::kMaxHeadDim];
  const char* from[kWidth];
  for (int64_t i = 0; i < kWidth; ++i, keys += stride) {
    from[i] = (const char*)keys;
    if constexpr (sizeof(E) < sizeof(float)) {
      E* row = rows + i * head_dim;
      const float scale = convert_head(keys, head_dim, row);
      if constexpr (kHasScales<E>) scales[i] = scale;
      from[i] = (const char*)row;
    }
  }
  for (int64_t dim = 0; dim < head_dim; dim += 4 * kPerWord<E>) {
    vuint words[4];
    transpose_words(from, dim * (int64_t)sizeof(E), words);
    for (int w = 0; w < 4; ++w)
      store_words(to + (dim + w * kPerWord<E>) * block_size, words[w] ^ kKeyBits<E>);
  }
}

// Lines that `count` tokens from a slot on go to, few of which are in the caches: so that they
// aren't waited for one by one.
template <class E>
inline void fetch_slots(const KvLayer& cache, int64_t slot, int64_t count) {
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  const auto fetch = [](const void* p) { __builtin_prefetch(p, 1, 3); };
  const int64_t line = 4 * cache.block_size, lines = cache.head_dim / kPerWord<E>;
  const int64_t row_bytes = cache.head_dim * (int64_t)sizeof(E);
  for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
    E* keys = keys_of<E>(cache, block, head);
    E* values = values_of<E>(cache, block, head);
    for (int64_t i = 0; i < lines; ++i) fetch((char*)keys + i * line + 4 * offset);
    for (int64_t at = 0; at < count * row_bytes; at += 64)
      fetch((char*)values + offset * row_bytes + at);
    if constexpr (kHasScales<E>) {
      fetch(scales_of(keys, cache.block_size, cache.head_dim) + offset);
      fetch(scales_of(values, cache.block_size, cache.head_dim) + offset);
    }
  }
}

// Of one head, for tokens [first, first + count), which are neighbours in their block too.
template <class E>
inline void store_head(const StoreKvArgs& args, int64_t first, int64_t count, int64_t head) {
  const KvLayer& cache = args.cache;
  const int64_t head_dim = cache.head_dim, block_size = cache.block_size;
  const int64_t width = (args.num_heads + 2 * cache.num_kv_heads) * head_dim;
  const int64_t block = args.slots[first] / block_size, offset = args.slots[first] % block_size;
  const float* key = args.qkv + first * width + (args.num_heads + head) * head_dim;
  const float* value = key + cache.num_kv_heads * head_dim;
  E* keys = keys_of<E>(cache, block, head);
  E* values = values_of<E>(cache, block, head);
  float* key_scales = scales_of(keys, block_size, head_dim) + offset;
  float* value_scales = scales_of(values, block_size, head_dim) + offset;
  keys += offset * kPerWord<E>;
  values += offset * head_dim;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth)
    store_keys(key + i * width, width, head_dim, block_size, keys + i * kPerWord<E>,
               key_scales + i);
  for (; i < count; ++i)
    store_key(key + i * width, head_dim, block_size, keys + i * kPerWord<E>, key_scales + i);
  for (i = 0; i < count; ++i) {
    const float scale = convert_head(value + i * width, head_dim, values + i * head_dim);
    if constexpr (kHasScales<E>) value_scales[i] = scale;
  }
}

// Whether a token isn't of one column with the one before.
inline bool begins_column(const StoreKvArgs& args, int64_t token) {
  const int32_t slot = args.slots[token];
  return slot % args.cache.block_size % kColumn == 0 || slot != args.slots[token - 1] + 1;
}

// The first token at or after this one that begins a column.
inline int64_t next_column(const StoreKvArgs& args, int64_t token) {
  if (token == 0) return 0;
  while (token < args.num_tokens && !begins_column(args, token)) ++token;
  return token < args.num_tokens ? token : args.num_tokens;
}

inline int64_t store_kv_num_items(const StoreKvArgs& args, int) {
  return divide_up(args.num_tokens, tokens_per_item(args));
}

template <class E>
void store_tokens(const StoreKvArgs& args, int64_t first, int64_t end) {
  int64_t next = first < end ? next_column(args, first + 1) : end;
  if (first < end) fetch_slots<E>(args.cache, args.slots[first], next - first);
  while (first < end) {
    const int64_t count = next - first, begin = first;
    first = next;
    if (first < end) {
      next = next_column(args, first + 1);
      fetch_slots<E>(args.cache, args.slots[first], next - first);
    }
    for (int64_t head = 0; head < args.cache.num_kv_heads; ++head)
      store_head<E>(args, begin, count, head);
  }
}

inline void store_kv_run(const StoreKvArgs& args, int64_t item, void*) {
  const int64_t tokens = tokens_per_item(args);
  const int64_t first = next_column(args, item * tokens);
  const int64_t end = next_column(args, at_most((item + 1) * tokens, args.num_tokens));
  switch (args.cache.dtype) {
    case streamkv::Dtype::kInt8: return store_tokens<int8_t>(args, first, end);
    case streamkv::Dtype::kBFloat16: return store_tokens<bf16>(args, first, end);
    default: return store_tokens<float>(args, first, end);
  }
}

}  // namespace
