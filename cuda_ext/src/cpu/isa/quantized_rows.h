// Rows of inputs for products with quantized weights: groups of int8 (quantized.h) made of floats.
//
// `quantize_group` is the one place where they are made, so that their bits don't depend on which
// kernel did it.
#pragma once

#include "cut.h"
#include "streamkv/kernels.h"
#include "vec.h"

namespace {

using streamkv::InputGroup;
using streamkv::kInputGroup;
using streamkv::QuantizeArgs;

constexpr int kGroupVectors = kInputGroup / kWidth;

// The greatest of all lanes.
inline uint32_t reduce_max(vuint x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32((__m512i)x);
#elif defined(__SSE4_1__)
#if defined(__AVX2__)
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128((__m256i)x),
                               _mm256_extracti128_si256((__m256i)x, 1));
#else
  __m128i four = (__m128i)x;
#endif
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1)));
#else
  return vmaxvq_u32(x);
#endif
}

inline int32_t reduce_sum(vint x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#elif defined(__SSE4_1__)
#if defined(__AVX2__)
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128((__m256i)x),
                               _mm256_extracti128_si256((__m256i)x, 1));
#else
  __m128i four = (__m128i)x;
#endif
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#else
  return vaddvq_s32(x);
#endif
}

inline vuint max(vuint a, vuint b) {
#if defined(__AVX512F__)
  return (vuint)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vuint)_mm256_max_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE4_1__)
  return (vuint)_mm_max_epu32((__m128i)a, (__m128i)b);
#else
  return vmaxq_u32(a, b);
#endif
}

// Whole numbers from -128 to 127 as bytes.
inline void store_bytes(int8_t* to, const vint x[kGroupVectors]) {
#if defined(__AVX512F__)
  repeat<kGroupVectors>([&](auto i) {
    _mm_storeu_si128((__m128i*)to + i.value, _mm512_cvtepi32_epi8((__m512i)x[i.value]));
  });
#elif defined(__AVX2__)
  const __m256i a = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]);
  const __m256i b = _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order);
  _mm256_storeu_si256((__m256i*)to, bytes);
#elif defined(__SSE4_1__)
  repeat<kGroupVectors / 4>([&](auto i) {
    const __m128i a = _mm_packs_epi32((__m128i)x[4 * i.value], (__m128i)x[4 * i.value + 1]);
    const __m128i b = _mm_packs_epi32((__m128i)x[4 * i.value + 2], (__m128i)x[4 * i.value + 3]);
    _mm_storeu_si128((__m128i*)to + i.value, _mm_packs_epi16(a, b));
  });
#else
  repeat<kGroupVectors / 2>([&](auto i) {
    const int16x4_t a = vmovn_s32(x[2 * i.value]), b = vmovn_s32(x[2 * i.value + 1]);
    vst1_s8(to + 8 * i.value, vmovn_s16(vcombine_s16(a, b)));
  });
#endif
}

// A group whose row is to fail: its scale makes every sum that it is part of a NaN.
inline void spoil(InputGroup* out) {
  memset(out, 0, sizeof(*out));
  out->scale = out->scaled_sum = __builtin_nanf("");
}

// 32 floats. Magnitudes are compared as whole numbers, by which infinity is above what is finite
// and NaN above infinity. What is so small that its inverse overflows counts as zero.
__attribute__((always_inline)) inline void quantize_group(const vfloat x[kGroupVectors],
                                                          InputGroup* out) {
  vuint magnitudes = (vuint)x[0] & 0x7fffffffu;
  repeat<kGroupVectors - 1>(
      [&](auto i) { magnitudes = max(magnitudes, (vuint)x[i.value + 1] & 0x7fffffffu); });
  const uint32_t bits = reduce_max(magnitudes);
  if (__builtin_expect(bits >= 0x7f800000u, 0)) return spoil(out);
  float greatest;
  memcpy(&greatest, &bits, sizeof(greatest));
  const bool is_zero = greatest < 0x1p-119f;
  const vfloat inverse = broadcast(is_zero ? 0.0f : 127.0f / greatest);
  // Adding 1.5 * 2^23 rounds to whole numbers, ties to even.
  const vfloat round = broadcast(12582912.0f);
  vint values[kGroupVectors], total = {};
  repeat<kGroupVectors>([&](auto i) {
    values[i.value] = (vint)(x[i.value] * inverse + round) - (vint)round;
    total += values[i.value];
  });
  store_bytes(out->values, values);
  const int32_t sum = reduce_sum(total);
  out->scale = is_zero ? 0.0f : greatest / 127.0f;
  out->negative_sum = -sum;
  out->scaled_sum = out->scale * (float)sum;
}

inline void quantize_group(const float* x, InputGroup* out) {
  vfloat values[kGroupVectors];
  repeat<kGroupVectors>([&](auto i) { values[i.value] = load(x + i.value * kWidth); });
  quantize_group(values, out);
}

// A row of `width`, of which value(offset) are kWidth and some(offset, count) are fewer.
template <class Value, class Some>
inline void quantize_row(int64_t width, InputGroup* out, Value value, Some some) {
  vfloat x[kGroupVectors];
  int64_t at = 0;
  for (; at + kInputGroup <= width; at += kInputGroup) {
    repeat<kGroupVectors>([&](auto i) { x[i.value] = value(at + i.value * kWidth); });
    quantize_group(x, out++);
  }
  if (at == width) return;
  vfloat rest[kGroupVectors] = {};
  for (int i = 0; at < width; ++i, at += kWidth)
    rest[i] = at + kWidth <= width ? value(at) : some(at, width - at);
  quantize_group(rest, out);
}

inline int64_t row_groups(int64_t width) { return divide_up(width, kInputGroup); }

}  // namespace
