// Groups of a quantized weight, spread out: a byte for each value, a float32 for each scale.
//
// What a tile multiplies, the same for every format. Values of 8 bits stay where they lie.
#pragma once

#include "quantized_layout.h"
#include "vec.h"

namespace {

// Bytes shifted to the left, or to the right if kBits is negative. Bits of the byte beside come in:
// to be masked.
template <int kBits>
inline vuint shift_bytes(vuint x) {
  typedef uint16_t vpairs __attribute__((vector_size(sizeof(vuint))));
  if constexpr (kBits >= 0) return (vuint)((vpairs)x << kBits);
  else return (vuint)((vpairs)x >> -kBits);
}

inline vuint or_masked(vuint a, vuint b, uint32_t mask) {
#if defined(__AVX512F__)
  return (vuint)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)broadcast_word(mask),
                                          0xf8);
#else
  return a | (b & mask);
#endif
}

// The low four bits of a quad with those above them, whose planes are `high`.
template <int kBits, int kQuad>
inline vuint add_high(vuint low, const vuint high[2]) {
  if constexpr (kBits == 5)
    return or_masked(low, shift_bytes<4 - kQuad>(high[0]), 0x10101010u);
  else if constexpr (kBits == 6)
    return or_masked(low, shift_bytes<4 - 2 * (kQuad % 4)>(high[kQuad / 4]), 0x30303030u);
  else
    return low;
}

// A group's values of 4 to 6 bits.
template <WeightFormat kFormat>
inline void spread_values(const uint8_t* from, uint8_t* to) {
  constexpr int kBits = value_bits(kFormat);
  const uint8_t* planes = from + 4 * kQuadBytes;
#pragma GCC unroll 2
  for (int64_t at = 0; at < kQuadBytes; at += sizeof(vuint)) {
    vuint high[2] = {};
    if constexpr (kBits > 4) high[0] = load_words(planes + at);
    if constexpr (kBits > 5) high[1] = load_words(planes + kQuadBytes + at);
    repeat<4>([&](auto pair) {
      constexpr int kQuad = 2 * pair.value;
      const vuint x = load_words(from + pair.value * kQuadBytes + at);
      const vuint even = x & 0x0f0f0f0fu, odd = shift_bytes<-4>(x) & 0x0f0f0f0fu;
      store_words(to + kQuad * kQuadBytes + at, add_high<kBits, kQuad>(even, high));
      store_words(to + (kQuad + 1) * kQuadBytes + at, add_high<kBits, kQuad + 1>(odd, high));
    });
  }
}

// Scales or minima of the panel's outputs.
inline void spread_halves(const uint8_t* from, float* to) {
  for (int64_t i = 0; i < kQuantizedPanel; i += kWidth) store(to + i, load((const half*)from + i));
}

// The same from bytes and their super-block's float16 factors.
template <bool kNegative>
inline void spread_bytes(const uint8_t* from, const uint8_t* factors, float* to) {
  for (int64_t i = 0; i < kQuantizedPanel; i += kWidth) {
    const vfloat x = load((const half*)factors + i) * to_float(load((const int8_t*)from + i));
    store(to + i, kNegative ? -x : x);
  }
}

// Group `index` of those spread out: `at` is its begin, `super` its super-block's.
template <WeightFormat kFormat>
inline void spread_scales(const uint8_t* at, const uint8_t* super, int64_t index,
                          SpreadBuffer& to) {
  float* scales = to.scales + index * kQuantizedPanel;
  float* minima = to.minima + index * kQuantizedPanel;
  if constexpr (scaling_of(kFormat) == Scaling::kHalfGroup) {
    scales += index * kQuantizedPanel;
    spread_bytes<false>(at, super, scales);
    spread_bytes<false>(at + kQuantizedPanel, super, scales + kQuantizedPanel);
  } else if constexpr (is_super(kFormat)) {
    spread_bytes<false>(at, super, scales);
    spread_bytes<true>(at + kQuantizedPanel, super + kHalfBytes, minima);
  } else if constexpr (kFormat != WeightFormat::kInt8) {
    spread_halves(at + value_bytes(kFormat), scales);
    if constexpr (has_minima(kFormat))
      spread_halves(at + value_bytes(kFormat) + kHalfBytes, minima);
  }
}

// Groups [first_group, + count) of a panel: at most kSuperGroups, all in one super-block.
template <WeightFormat kFormat>
SpreadGroups spread(const QuantizedPart& part, int64_t depth, int64_t panel, int64_t first_group,
                    int64_t count, SpreadBuffer& to) {
  constexpr bool kStays = value_bits(kFormat) == 8;
  const uint8_t* begin = panel_data(part, depth, panel);
  const uint8_t* super = begin + super_start(kFormat, first_group / kSuperGroups);
  const uint8_t* from = begin + group_start(kFormat, first_group);
  const uint8_t* values = from + values_start(kFormat);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t offset = i * group_bytes(kFormat);
    spread_scales<kFormat>(from + offset, super, i, to);
    if constexpr (!kStays) spread_values<kFormat>(values + offset, to.values + i * kGroupBytes);
  }
  return {kStays ? values : to.values, kStays ? group_bytes(kFormat) : kGroupBytes,
          kFormat == WeightFormat::kInt8 ? nullptr : to.scales,
          has_minima(kFormat) ? to.minima : nullptr};
}

// The same where values of 4 bits stay in the weight, and scales too unless they are bytes.
template <WeightFormat kFormat>
SpreadGroups spread_packed(const QuantizedPart& part, int64_t depth, int64_t panel,
                           int64_t first_group, int64_t count, SpreadBuffer& to) {
  const uint8_t* begin = panel_data(part, depth, panel);
  const uint8_t* super = begin + super_start(kFormat, first_group / kSuperGroups);
  const uint8_t* from = begin + group_start(kFormat, first_group);
  for (int64_t i = 0; is_super(kFormat) && i < count; ++i)
    spread_scales<kFormat>(from + i * group_bytes(kFormat), super, i, to);
  return {from + values_start(kFormat), group_bytes(kFormat), to.scales, to.minima};
}

}  // namespace
