// Loops over the vocabulary that sampling is made of; what they compute stands in kernels.h.
//
// Included by kernels.cpp alone. Each goes through a row once, at the speed of the cache it lies in.
#pragma once

#include <stdint.h>
#include <string.h>

#include "streamkv/kernels.h"
#include "vec.h"

namespace {

constexpr float kBelowAll = -__builtin_inff();
constexpr int64_t kStretch = 32 * kWidth;  // what argmax looks through again, sum_exp adds as float

// The first n < kWidth numbers, then -infinity.
inline vfloat load_last(const float* x, int64_t n) {
  float lanes[kWidth];
  for (int i = 0; i < kWidth; ++i) lanes[i] = kBelowAll;
  memcpy(lanes, x, n * sizeof(float));
  return load(lanes);
}

// Bit i: lane i is >= threshold.
inline uint32_t lanes_at_least(vfloat x, vfloat threshold) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(x, threshold, _CMP_GE_OQ);
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps(x, threshold, _CMP_GE_OQ));
#elif defined(__SSE4_1__)
  return _mm_movemask_ps(_mm_cmpge_ps(x, threshold));
#elif defined(__aarch64__)
  const uint32x4_t bits = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(vcgeq_f32((float32x4_t)x, (float32x4_t)threshold), bits));
#else
  uint32_t mask = 0;
  for (int i = 0; i < kWidth; ++i) mask |= (uint32_t)(x[i] >= threshold[i]) << i;
  return mask;
#endif
}

// The greatest number of at most kStretch; -infinity if there is none, +infinity for a NaN too.
inline float stretch_max(const float* x, int64_t n) {
  const vint magnitude_bits = vint{} + 0x7fffffff;
  vfloat top[2] = {broadcast(kBelowAll), broadcast(kBelowAll)};
  vint magnitude[2] = {};  // the bits of a NaN are above those of an infinity
  const auto take = [&](int which, vfloat v) {
    const vint bits = (vint)v & magnitude_bits;
    top[which] = v > top[which] ? v : top[which];
    magnitude[which] = bits > magnitude[which] ? bits : magnitude[which];
  };
  int64_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    take(0, load(x + i));
    take(1, load(x + i + kWidth));
  }
  for (; i + kWidth <= n; i += kWidth) take(0, load(x + i));
  if (i < n) take(0, load_last(x + i, n - i));
  const vfloat both = top[0] > top[1] ? top[0] : top[1];
  const vint either = magnitude[0] > magnitude[1] ? magnitude[0] : magnitude[1];
  float best = kBelowAll;
  for (int lane = 0; lane < kWidth; ++lane) {
    if (either[lane] > 0x7f800000) return __builtin_inff();
    best = both[lane] > best ? both[lane] : best;
  }
  return best;
}

inline int64_t argmax(const float* x, int64_t n) {
  float best = kBelowAll;
  int64_t at = -1;  // where the stretch begins that holds the first of the greatest
  for (int64_t start = 0; start < n; start += kStretch) {
    const float top = stretch_max(x + start, n - start < kStretch ? n - start : kStretch);
    if (top > best) {
      best = top;
      at = start;
    }
  }
  if (at < 0 || best == __builtin_inff()) return -1;
  while (x[at] != best) ++at;
  return at;
}

inline double sum_exp(const float* x, int64_t n, float shift, float factor) {
  const vfloat shifts = broadcast(shift), factors = broadcast(factor);
  const auto weight = [&](vfloat v) { return exp_nonpositive((v - shifts) * factors); };
  double total = 0.0;
  for (int64_t start = 0; start < n; start += kStretch) {
    const int64_t end = n - start < kStretch ? n : start + kStretch;
    vfloat sums[4] = {};
    int64_t i = start;
    for (; i + 4 * kWidth <= end; i += 4 * kWidth)
      for (int part = 0; part < 4; ++part) sums[part] += weight(load(x + i + part * kWidth));
    for (; i + kWidth <= end; i += kWidth) sums[0] += weight(load(x + i));
    if (i < end) sums[1] += weight(load_last(x + i, end - i));
    total += (double)sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
  return total;
}

inline int64_t count_at_least(const float* x, int64_t n, float threshold) {
  const vfloat thresholds = broadcast(threshold);
  int64_t count = 0, i = 0;
  for (; i + kWidth <= n; i += kWidth)
    count += __builtin_popcount(lanes_at_least(load(x + i), thresholds));
  for (; i < n; ++i) count += x[i] >= threshold;
  return count;
}

#if !defined(__AVX512F__)
// For each mask of kWidth lanes the bytes that move the lanes it names to the front: of 4-byte lanes
// as _mm_shuffle_epi8 takes them, or of 8 lanes by their numbers.
struct FrontTable {
  uint8_t moves[1 << kWidth][kWidth == 8 ? 8 : 16];
};

constexpr FrontTable make_front_table() {
  FrontTable table = {};
  for (int mask = 0; mask < 1 << kWidth; ++mask) {
    int place = 0;
    for (int lane = 0; lane < kWidth; ++lane) {
      if (((mask >> lane) & 1) == 0) continue;
      if (kWidth == 8) table.moves[mask][place] = (uint8_t)lane;
      for (int byte = 0; kWidth == 4 && byte < 4; ++byte)
        table.moves[mask][4 * place + byte] = (uint8_t)(4 * lane + byte);
      ++place;
    }
  }
  return table;
}

constexpr FrontTable kFrontTable = make_front_table();
#endif

// The lanes that `mask` names, in their order, then anything. (AVX-512 could store them at once,
// which takes AMD's Zen 4 a hundred cycles.)
inline vfloat to_front(vfloat x, uint32_t mask) {
#if defined(__AVX512F__)
  return _mm512_maskz_compress_ps((__mmask16)mask, x);
#elif defined(__AVX2__)
  const __m128i moves = _mm_loadl_epi64((const __m128i*)kFrontTable.moves[mask]);
  return _mm256_permutevar8x32_ps(x, _mm256_cvtepu8_epi32(moves));
#elif defined(__SSE4_1__)
  const __m128i moves = _mm_loadu_si128((const __m128i*)kFrontTable.moves[mask]);
  return (vfloat)_mm_shuffle_epi8((__m128i)x, moves);
#elif defined(__aarch64__)
  return (vfloat)vqtbl1q_u8((uint8x16_t)x, vld1q_u8(kFrontTable.moves[mask]));
#else
  float lanes[kWidth] = {};
  for (int lane = 0, place = 0; lane < kWidth; ++lane)
    if ((mask >> lane) & 1) lanes[place++] = x[lane];
  return load(lanes);
#endif
}

inline int64_t collect_at_least(const float* x, int64_t n, float threshold, int32_t* indices,
                                float* values, int64_t capacity) {
  const vfloat thresholds = broadcast(threshold);
  const vint lanes = lane_index();
  int64_t count = 0, i = 0;
  for (; i + kWidth <= n && count + kWidth <= capacity; i += kWidth) {
    const vfloat v = load(x + i);
    const uint32_t mask = lanes_at_least(v, thresholds);
    if (mask == 0) continue;
    const vint front = (vint)to_front((vfloat)(lanes + (int32_t)i), mask);
    memcpy(indices + count, &front, sizeof(front));
    store(values + count, to_front(v, mask));
    count += __builtin_popcount(mask);
  }
  for (; i < n && count < capacity; ++i) {
    if (!(x[i] >= threshold)) continue;
    indices[count] = (int32_t)i;
    values[count++] = x[i];
  }
  return count;
}

inline int64_t collect_between(const float* x, int64_t n, float low, float high, float* values) {
  const vfloat lows = broadcast(low), highs = broadcast(high);
  int64_t count = 0, i = 0;
  for (; i + kWidth <= n; i += kWidth) {  // count <= i: a whole vector fits
    const vfloat v = load(x + i);
    const uint32_t mask = lanes_at_least(v, lows) & ~lanes_at_least(v, highs);
    if (mask == 0) continue;
    store(values + count, to_front(v, mask));
    count += __builtin_popcount(mask);
  }
  for (; i < n; ++i)
    if (x[i] >= low && x[i] < high) values[count++] = x[i];
  return count;
}

// A group is a lane of `depth` vectors that follow each other.
inline int64_t group_maxima(const float* x, int64_t n, int64_t depth, float* maxima) {
  int64_t count = 0;
  for (int64_t start = 0; start < n; start += depth * kWidth, count += kWidth) {
    const int64_t end = n - start < depth * kWidth ? n : start + depth * kWidth;
    vfloat top[2] = {broadcast(kBelowAll), broadcast(kBelowAll)};
    int64_t i = start;
    for (; i + 2 * kWidth <= end; i += 2 * kWidth) {
      top[0] = max(load(x + i), top[0]);
      top[1] = max(load(x + i + kWidth), top[1]);
    }
    for (; i + kWidth <= end; i += kWidth) top[0] = max(load(x + i), top[0]);
    if (i < end) top[0] = max(load_last(x + i, end - i), top[0]);
    store(maxima + count, max(top[0], top[1]));
  }
  return count;
}

// Lane i of x if bit i of the lowest `bits` is set, else -infinity.
inline vfloat keep_lanes(vfloat x, uint32_t bits) {
#if defined(__AVX512F__)
  return _mm512_mask_blend_ps((__mmask16)bits, broadcast(kBelowAll), x);
#else
  const vuint lane_bits = (vuint{} + 1u) << (vuint)lane_index();
  const auto chosen = (vuint)((broadcast_word(bits) & lane_bits) == lane_bits);
  return (vfloat)(((vuint)x & chosen) | ((vuint)broadcast(kBelowAll) & ~chosen));
#endif
}

inline void mask(const float* x, const int32_t* bits, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const auto word = (uint32_t)bits[i / 32];
    each<32 / kWidth>([&](int part) {
      const int first = part * kWidth;
      store(out + i + first, keep_lanes(load(x + i + first), word >> first));
    });
  }
  for (; i < n; ++i) out[i] = (uint32_t)bits[i / 32] >> (i % 32) & 1 ? x[i] : kBelowAll;
}

}  // namespace
