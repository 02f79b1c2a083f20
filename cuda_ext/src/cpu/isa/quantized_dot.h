// Products of bytes, as the instruction set has them: quads of weights by quads of inputs.
//
// A vector of weights holds a quad of kWidth outputs, one of inputs the same quad in each lane.
// Sums are exact: where an instruction adds in 16 bits, it is used for as many products as fit.
#pragma once

#include "quantized_layout.h"
#include "vec.h"

namespace {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_NEON)
constexpr bool kSumsWords = true;  // no step in 16 bits that could overflow
#else
constexpr bool kSumsWords = false;
#endif

// Weights of so many bits are multiplied like those of dot_bits(bits).
constexpr int dot_bits(int bits) {
  if (kSumsWords) return 8;
  return bits == 5 ? 6 : bits;
}

// How quads are multiplied: sums of lanes start as begin(start), take kRun quads at a time by add,
// and are whole after end. `start` makes good for the weights' offset. kTakesOffset: bytes have
// their offset taken off here, so there is nothing to make good for.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_NEON)

// sum + the products of each lane's bytes, unsigned by signed (on Arm: signed by signed).
inline vint add_products(vint sum, vuint weights, vuint inputs) {
#if defined(__AVX512VNNI__)
  return (vint)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)inputs);
#elif defined(__AVXVNNI__)
  return (vint)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)inputs);
#elif defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, (int8x16_t)weights, (int8x16_t)inputs);
#else
  const int8x16_t w = (int8x16_t)weights, x = (int8x16_t)inputs;
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
  return vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(w, x)));
#endif
}

template <int kBits>
struct Dot {
  using Weights = vuint;
  static constexpr int kRun = 1;
  static constexpr bool kTakesOffset = false;
  static Weights prepare(vuint w) { return w; }
  static vint begin(vint start) { return start; }
  static vint add(vint sum, const Weights* w, const vuint* x) {
    return add_products(sum, w[0], x[0]);
  }
  static vint end(vint sum, vint) { return sum; }
};

#else

// Sums of two neighbouring products in 16 bits: weights unsigned, inputs signed.
inline vint pair_products(vuint weights, vuint inputs) {
#if defined(__AVX512F__)
  return (vint)_mm512_maddubs_epi16((__m512i)weights, (__m512i)inputs);
#elif defined(__AVX2__)
  return (vint)_mm256_maddubs_epi16((__m256i)weights, (__m256i)inputs);
#else
  return (vint)_mm_maddubs_epi16((__m128i)weights, (__m128i)inputs);
#endif
}

inline vint add_pairs(vint a, vint b) {
  typedef int16_t vshort __attribute__((vector_size(sizeof(vint))));
  return (vint)((vshort)a + (vshort)b);
}

// Of a lane's two numbers of 16 bits, the sum.
inline vint join_pairs(vint pairs) {
  const vint ones = (vint)broadcast_word(0x00010001u);
#if defined(__AVX512F__)
  return (vint)_mm512_madd_epi16((__m512i)pairs, (__m512i)ones);
#elif defined(__AVX2__)
  return (vint)_mm256_madd_epi16((__m256i)pairs, (__m256i)ones);
#else
  return (vint)_mm_madd_epi16((__m128i)pairs, (__m128i)ones);
#endif
}

template <int kBits>
struct Dot;

// 15 * 127 * 16: the products of a whole group fit.
template <>
struct Dot<4> {
  using Weights = vuint;
  static constexpr int kRun = 1;
  static constexpr bool kTakesOffset = false;
  static Weights prepare(vuint w) { return w; }
  static vint begin(vint) { return vint{}; }
  static vint add(vint sum, const Weights* w, const vuint* x) {
    return add_pairs(sum, pair_products(w[0], x[0]));
  }
  static vint end(vint sum, vint start) { return join_pairs(sum) + start; }
};

// 63 * 127 * 4: those of two quads do.
template <>
struct Dot<6> {
  using Weights = vuint;
  static constexpr int kRun = 2;
  static constexpr bool kTakesOffset = false;
  static Weights prepare(vuint w) { return w; }
  static vint begin(vint start) { return start; }
  static vint add(vint sum, const Weights* w, const vuint* x) {
    return sum + join_pairs(add_pairs(pair_products(w[0], x[0]), pair_products(w[1], x[1])));
  }
  static vint end(vint sum, vint) { return sum; }
};

// 128 * 127 * 2 of signed numbers do, 255 * 127 * 2 wouldn't: the weights' signs go to the inputs.
template <>
struct Dot<8> {
  struct Weights {
    vuint magnitudes;
#if defined(__AVX512F__)
    __mmask64 is_negative;
#else
    vuint signed_values;
#endif
  };
  static constexpr int kRun = 1;
  static constexpr bool kTakesOffset = true;
  static Weights prepare(vuint w) {
    const vuint x = w ^ 0x80808080u;
#if defined(__AVX512F__)
    return {(vuint)_mm512_abs_epi8((__m512i)x), _mm512_movepi8_mask((__m512i)x)};
#elif defined(__AVX2__)
    return {(vuint)_mm256_abs_epi8((__m256i)x), x};
#else
    return {(vuint)_mm_abs_epi8((__m128i)x), x};
#endif
  }
  static vint begin(vint) { return vint{}; }
  static vint add(vint sum, const Weights* w, const vuint* x) {
#if defined(__AVX512F__)
    const __m512i signed_x = _mm512_mask_sub_epi8((__m512i)x[0], w[0].is_negative,
                                                  _mm512_setzero_si512(), (__m512i)x[0]);
#elif defined(__AVX2__)
    const __m256i signed_x = _mm256_sign_epi8((__m256i)x[0], (__m256i)w[0].signed_values);
#else
    const __m128i signed_x = _mm_sign_epi8((__m128i)x[0], (__m128i)w[0].signed_values);
#endif
    return sum + join_pairs(pair_products(w[0].magnitudes, (vuint)signed_x));
  }
  static vint end(vint sum, vint) { return sum; }
};

#endif

}  // namespace
