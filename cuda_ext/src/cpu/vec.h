// Vectors of the instruction set this file is compiled for: the one place with intrinsics.
//
// Included by kernels.cpp alone. Everything is in an anonymous namespace and nothing is a static
// vector, so no code compiled here can end up in a function that runs on an older CPU. Multiply-add
// is explicit (`fma`): the build turns contraction off, so each expression has one rounding
// wherever the compiler puts it, which batch invariance rests on. bf16 is widened and rounded by
// integer arithmetic, not by AVX512_BF16, whose conversion flushes denormals.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__SSE4_1__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
constexpr int kTileRows = 6, kTileCols = 4;  // registers of a matrix tile, of 32
#elif defined(__AVX2__)
constexpr int kWidth = 8;
constexpr int kTileRows = 6, kTileCols = 2;  // of 16
#elif defined(__SSE4_1__)
constexpr int kWidth = 4;
constexpr int kTileRows = 4, kTileCols = 2;  // of 16, and products need one
#else
constexpr int kWidth = 4;
constexpr int kTileRows = 4, kTileCols = 4;
#endif

typedef float vfloat __attribute__((vector_size(4 * kWidth)));
typedef int32_t vint __attribute__((vector_size(4 * kWidth)));
typedef uint32_t vuint __attribute__((vector_size(4 * kWidth)));
typedef uint16_t vushort __attribute__((vector_size(2 * kWidth)));

struct bf16 {
  uint16_t bits;
};

inline vfloat broadcast(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#else
  return vfloat{x, x, x, x};
#endif
}

inline vfloat fma(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;  // two roundings, here and in every other place
#endif
}

inline vfloat max(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__SSE4_1__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// The order is fixed by the width alone.
template <class Combine>
inline float reduce(vfloat x, Combine combine) {
  float lanes[kWidth];
  memcpy(lanes, &x, sizeof(x));
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = combine(lanes[i], lanes[i + half]);
  return lanes[0];
}

inline float sum(vfloat x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(x);
#else
  return reduce(x, [](float a, float b) { return a + b; });
#endif
}

inline float max(vfloat x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x);
#else
  return reduce(x, [](float a, float b) { return a > b ? a : b; });
#endif
}

inline vint lane_index() {
  vint index = {};
  for (int i = 0; i < kWidth; ++i) index[i] = i;
  return index;
}

inline vushort narrow(vuint x) {  // the low half of each lane
#if defined(__AVX512F__)
  return (vushort)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
  __m256i low = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0xffff));
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
  return (vushort)_mm256_castsi256_si128(packed);
#else
  return __builtin_convertvector(x, vushort);
#endif
}

inline vuint widen(vushort x) {
#if defined(__AVX512F__)
  return (vuint)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
  return (vuint)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, vuint);
#endif
}

inline vfloat to_float(vfloat x) { return x; }
inline vfloat to_float(vushort x) { return (vfloat)(widen(x) << 16); }

inline vushort to_bf16(vfloat x) {  // to nearest, ties to even; a NaN stays one
  vuint bits = (vuint)x;
  vuint rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  vuint quiet = bits | 0x400000u;
  return narrow((x == x ? rounded : quiet) >> 16);
}

inline vfloat load(const float* p) {
  vfloat x;
  memcpy(&x, p, sizeof(x));
  return x;
}

inline vfloat load(const bf16* p) {
  vushort x;
  memcpy(&x, p, sizeof(x));
  return to_float(x);
}

inline void store(float* p, vfloat x) { memcpy(p, &x, sizeof(x)); }

inline void store(bf16* p, vfloat x) {
  vushort rounded = to_bf16(x);
  memcpy(p, &rounded, sizeof(rounded));
}

// The first n < kWidth lanes; the others are zero.
template <class E>
inline vfloat load_some(const E* p, int64_t n) {
  E lanes[kWidth] = {};
  memcpy(lanes, p, n * sizeof(E));
  return load(lanes);
}

template <class E>
inline void store_some(E* p, vfloat x, int64_t n) {
  E lanes[kWidth];
  store(lanes, x);
  memcpy(p, lanes, n * sizeof(E));
}

#if defined(__SSE4_1__)
// 16 bytes of kWidth/4 rows, one to each 128-bit part: rows[0], rows[4], rows[8], rows[12].
inline vfloat load_parts(const char* const* rows, int64_t offset) {
  const auto part = [&](int i) { return _mm_loadu_ps((const float*)(rows[i] + offset)); };
#if defined(__AVX512F__)
  __m512 x = _mm512_castps128_ps512(part(0));
  x = _mm512_insertf32x4(x, part(4), 1);
  x = _mm512_insertf32x4(x, part(8), 2);
  return _mm512_insertf32x4(x, part(12), 3);
#elif defined(__AVX2__)
  return _mm256_insertf128_ps(_mm256_castps128_ps256(part(0)), part(4), 1);
#else
  return part(0);
#endif
}

#if defined(__AVX512F__)
#define STREAMKV_UNPACK(half, a, b) _mm512_unpack##half##_ps(a, b)
#define STREAMKV_UNPACK_PAIRS(half, a, b) \
  (vfloat) _mm512_unpack##half##_pd((__m512d)(a), (__m512d)(b))
#elif defined(__AVX2__)
#define STREAMKV_UNPACK(half, a, b) _mm256_unpack##half##_ps(a, b)
#define STREAMKV_UNPACK_PAIRS(half, a, b) \
  (vfloat) _mm256_unpack##half##_pd((__m256d)(a), (__m256d)(b))
#else
#define STREAMKV_UNPACK(half, a, b) _mm_unpack##half##_ps(a, b)
#define STREAMKV_UNPACK_PAIRS(half, a, b) (vfloat) _mm_unpack##half##_pd((__m128d)(a), (__m128d)(b))
#endif
#endif

// 4 words of kWidth rows, transposed: out[w] holds word w of row 0, 1, ... of the 16 bytes at
// `offset` in each.
inline void transpose_words(const char* const* rows, int64_t offset, vuint out[4]) {
#if defined(__SSE4_1__)
  vfloat a = load_parts(rows + 0, offset), b = load_parts(rows + 1, offset);
  vfloat c = load_parts(rows + 2, offset), d = load_parts(rows + 3, offset);
  vfloat ab_low = STREAMKV_UNPACK(lo, a, b), ab_high = STREAMKV_UNPACK(hi, a, b);
  vfloat cd_low = STREAMKV_UNPACK(lo, c, d), cd_high = STREAMKV_UNPACK(hi, c, d);
  out[0] = (vuint)STREAMKV_UNPACK_PAIRS(lo, ab_low, cd_low);
  out[1] = (vuint)STREAMKV_UNPACK_PAIRS(hi, ab_low, cd_low);
  out[2] = (vuint)STREAMKV_UNPACK_PAIRS(lo, ab_high, cd_high);
  out[3] = (vuint)STREAMKV_UNPACK_PAIRS(hi, ab_high, cd_high);
#else
  for (int w = 0; w < 4; ++w) out[w] = vuint{};
  for (int i = 0; i < kWidth; ++i) {
    uint32_t words[4];
    memcpy(words, rows[i] + offset, sizeof(words));
    for (int w = 0; w < 4; ++w) out[w][i] = words[w];
  }
#endif
}

// e^x for x <= 0, within 2 units in the last place; 0 below -87.3; NaN for NaN. Range reduction to
// |r| <= ln(2)/2 and the polynomial of Cephes' expf (Moshier). exp(0) is exactly 1.
inline vfloat exp_nonpositive(vfloat x) {
  const vfloat lowest = broadcast(-87.3f);
  const vfloat round_to_int = broadcast(12582912.0f);  // 1.5 * 2^23
  vfloat clamped = x < lowest ? lowest : x;
  vfloat shifted = fma(clamped, broadcast(1.44269504f), round_to_int);
  vfloat n = shifted - round_to_int;
  vfloat r = fma(n, broadcast(-0.693359375f), clamped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  vfloat p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
  vint exponent = ((vint)shifted - (vint)round_to_int + 127) << 23;
  vfloat result = p * (vfloat)exponent;
  return x < lowest ? vfloat{} : result;
}

}  // namespace
