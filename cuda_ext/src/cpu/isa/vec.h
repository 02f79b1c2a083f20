// Vectors of the instruction set this file is compiled for: the place for intrinsics. (Besides,
// sampling.h has two helpers of its own that need them, and peaks.h measures one instruction.)
//
// Included by this folder's files alone. Everything is in an anonymous namespace and nothing is a
// static vector, so no code compiled here can end up in a function that runs on an older CPU.
// Multiply-add is explicit (`fma`): the build turns contraction off, so each expression has one
// rounding wherever the compiler puts it, which batch invariance rests on. bf16 is widened and
// rounded by integer arithmetic, not by AVX512_BF16, whose conversion flushes denormals; a word is
// a pair of bf16, the even element in its low half.
#pragma once

#include <stdint.h>
#include <string.h>

#include <utility>

#if defined(__SSE4_1__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float vfloat __attribute__((vector_size(4 * kWidth)));
typedef int32_t vint __attribute__((vector_size(4 * kWidth)));
typedef uint32_t vuint __attribute__((vector_size(4 * kWidth)));
typedef uint16_t vushort __attribute__((vector_size(2 * kWidth)));

template <int kValue>
struct Number {
  static constexpr int value = kValue;
  constexpr operator int() const { return kValue; }
};

// action(Number<0>{}), ... Loops over registers are written so: unrolled by the compiler alone, the
// registers would take a way over the stack.
template <class Action, int... kIndex>
__attribute__((always_inline)) inline void repeat(Action action,
                                                  std::integer_sequence<int, kIndex...>) {
  (action(Number<kIndex>{}), ...);
}

template <int kCount, class Action>
__attribute__((always_inline)) inline void repeat(Action action) {
  repeat(action, std::make_integer_sequence<int, kCount>{});
}

// The same with a loop that is unrolled early enough for what it indexes to stay in registers: a
// fraction of the time to compile, for actions that need no constant.
template <int kCount, class Action>
__attribute__((always_inline)) inline void each(Action action) {
#pragma GCC unroll 32
  for (int i = 0; i < kCount; ++i) action(i);
}

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

// Halves are combined until one lane is left: the order is fixed by the width alone.
#if defined(__AVX512F__)
template <class Wide, class Narrow>
inline float reduce(vfloat x, Wide wide, Narrow narrow) {
  const __m256 low = _mm512_maskz_extractf32x8_ps(0xff, x, 0);  // GCC 12 warns of unmasked ones
  const __m256 eight = wide(low, _mm512_maskz_extractf32x8_ps(0xff, x, 1));
  const __m128 four = narrow(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = narrow(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(narrow(two, _mm_movehdup_ps(two)));
}

inline float sum(vfloat x) {
  return reduce(
      x, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); },
      [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}

inline float max(vfloat x) {
  return reduce(
      x, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); },
      [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}
#else
template <class Combine>
inline float reduce(vfloat x, Combine combine) {
  float lanes[kWidth];
  memcpy(lanes, &x, sizeof(x));
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = combine(lanes[i], lanes[i + half]);
  return lanes[0];
}

inline float sum(vfloat x) {
  return reduce(x, [](float a, float b) { return a + b; });
}

inline float max(vfloat x) {
  return reduce(x, [](float a, float b) { return a > b ? a : b; });
}
#endif

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

inline vuint load_words(const void* p) {
  vuint x;
  memcpy(&x, p, sizeof(x));
  return x;
}

inline void store_words(void* p, vuint x) { memcpy(p, &x, sizeof(x)); }

inline vfloat even_of(vuint words) { return (vfloat)(words << 16); }
inline vfloat odd_of(vuint words) { return (vfloat)(words & 0xffff0000u); }

// Two to bf16 at once, as to_bf16 rounds.
inline vuint to_words(vfloat even, vfloat odd) {
  const vuint low = (vuint)even, high = (vuint)odd;
  const vuint even_bits = even == even ? low + 0x7fffu + ((low >> 16) & 1u) : low | 0x400000u;
  const vuint odd_bits = odd == odd ? high + 0x7fffu + ((high >> 16) & 1u) : high | 0x400000u;
  return (even_bits >> 16) | (odd_bits & 0xffff0000u);
}

// float16 in the low half of each lane: exact. Its exponent is 112 less than float32's; denormals
// are whole numbers of 2^-24.
inline vfloat half_to_float(vuint x) {
  const vuint magnitude = x & 0x7fffu, exponent = x & 0x7c00u;
  const vfloat tiny = __builtin_convertvector((vint)magnitude, vfloat) * 0x1p-24f;
  const vuint normal = (magnitude << 13) + (112u << 23);
  const vuint special = (magnitude << 13) | 0x7f800000u;  // infinities and NaNs
  const vuint finite = exponent == 0u ? (vuint)tiny : normal;
  return (vfloat)(((x & 0x8000u) << 16) | (exponent == 0x7c00u ? special : finite));
}

inline vuint broadcast_word(uint32_t x) {
#if defined(__AVX512F__)
  return (vuint)_mm512_set1_epi32((int)x);
#elif defined(__AVX2__)
  return (vuint)_mm256_set1_epi32((int)x);
#else
  return vuint{x, x, x, x};
#endif
}

#if defined(__AVX512BF16__)
// c + both products of each lane's pairs; the instruction flushes denormals.
inline vfloat dot_words(vuint a, vuint b, vfloat c) {
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
#endif

struct half {
  uint16_t bits;
};

inline vfloat load(const half* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__ARM_NEON)
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#else
  vushort x;
  memcpy(&x, p, sizeof(x));
  return half_to_float(widen(x));
#endif
}

// Bytes with a sign, as whole numbers.
inline vint load(const int8_t* p) {
#if defined(__AVX512F__)
  return (vint)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (vint)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(__SSE4_1__)
  int32_t word;
  memcpy(&word, p, sizeof(word));
  return (vint)_mm_cvtepi8_epi32(_mm_cvtsi32_si128(word));
#else
  return vint{p[0], p[1], p[2], p[3]};
#endif
}

inline vfloat to_float(vint x) { return __builtin_convertvector(x, vfloat); }

// Hints that the line at p will be read soon; any address is allowed.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

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

// e^x of N vectors, step by step beside one another: a vector alone waits for each of its steps.
// For x <= 0, within 2 units in the last place; 0 below -87.3; NaN for NaN. Range reduction to
// |r| <= ln(2)/2 and the polynomial of Cephes' expf (Moshier). exp(0) is exactly 1.
template <int N>
__attribute__((always_inline)) inline void exp_nonpositive(vfloat (&x)[N]) {
  const vfloat lowest = broadcast(-87.3f);
  const vfloat round_to_int = broadcast(12582912.0f);  // 1.5 * 2^23
  vfloat r[N], p[N], shifted[N];
  const auto each = [](auto step) { repeat<N>([&](auto i) { step(i.value); }); };
  each([&](int i) { r[i] = max(lowest, x[i]); });  // the second one, if it is a NaN
  each([&](int i) { shifted[i] = fma(r[i], broadcast(1.44269504f), round_to_int); });
  each([&](int i) { p[i] = shifted[i] - round_to_int; });
  each([&](int i) { r[i] = fma(p[i], broadcast(-0.693359375f), r[i]); });
  each([&](int i) { r[i] = fma(p[i], broadcast(2.12194440e-4f), r[i]); });
  const auto horner = [&](float next) {
    each([&](int i) { p[i] = fma(p[i], r[i], broadcast(next)); });
  };
  each([&](int i) { p[i] = broadcast(1.9875691500e-4f); });
  horner(1.3981999507e-3f);
  horner(8.3334519073e-3f);
  horner(4.1665795894e-2f);
  horner(1.6666665459e-1f);
  horner(5.0000001201e-1f);
  each([&](int i) { p[i] = fma(p[i], r[i] * r[i], r[i] + 1.0f); });
  each([&](int i) {
    const vint exponent = ((vint)shifted[i] - (vint)round_to_int + 127) << 23;
    x[i] = x[i] < lowest ? vfloat{} : p[i] * (vfloat)exponent;
  });
}

inline vfloat exp_nonpositive(vfloat x) {
  vfloat one[1] = {x};
  exp_nonpositive(one);
  return one[0];
}

}  // namespace
