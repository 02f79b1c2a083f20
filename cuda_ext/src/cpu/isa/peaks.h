// The most that a thread can do with this instruction set: what benchmarks measure kernels against.
#pragma once

#include "quantized_dot.h"

namespace {

// Chains of dependent operations: enough to hide the latency of each on two ports, few enough for
// the registers. They begin with different values, so that the compiler can't merge them.
constexpr int kPeakChains = kWidth == 16 ? 20 : 12;

inline int64_t peak_fma(int64_t num_rounds, float* out) {
  vfloat acc[kPeakChains];
  const vfloat half = broadcast(0.5f), one = broadcast(out[0]);
  repeat<kPeakChains>([&](auto i) { acc[i.value] = broadcast(out[0] * i.value); });
  for (int64_t round = 0; round < num_rounds; ++round)
    repeat<kPeakChains>([&](auto i) { acc[i.value] = fma(acc[i.value], half, one); });
  repeat<kPeakChains - 1>([&](auto i) { acc[0] = acc[0] + acc[i.value + 1]; });
  memcpy(out, &acc[0], sizeof(vfloat));
  return num_rounds * kPeakChains * kWidth * 2;
}

#if defined(__AVX512BF16__)
inline int64_t peak_bf16_dot(int64_t num_rounds, float* out) {
  __m512 acc[kPeakChains];
  const __m512bh pair = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f80));  // 1 and 0
  repeat<kPeakChains>([&](auto i) { acc[i.value] = _mm512_set1_ps(out[0] * i.value); });
  for (int64_t round = 0; round < num_rounds; ++round)
    repeat<kPeakChains>([&](auto i) {
      acc[i.value] = _mm512_dpbf16_ps(acc[i.value], pair, pair);
    });
  repeat<kPeakChains - 1>([&](auto i) { acc[0] = _mm512_add_ps(acc[0], acc[i.value + 1]); });
  _mm512_storeu_ps(out, acc[0]);
  return num_rounds * kPeakChains * kWidth * 4;
}
constexpr auto kPeakBf16Dot = &peak_bf16_dot;
#else
constexpr int64_t (*kPeakBf16Dot)(int64_t, float*) = nullptr;
#endif

// Of 4-bit weights where those take the fewest instructions.
inline int64_t peak_int8_dot(int64_t num_rounds, float* out) {
  using ByteDot = Dot<dot_bits(4)>;
  vint acc[kPeakChains];
  const typename ByteDot::Weights weights[1] = {ByteDot::prepare(broadcast_word(0x01010101u))};
  repeat<kPeakChains>([&](auto i) {
    acc[i.value] = (vint)broadcast_word((uint32_t)(int32_t)(out[0] * i.value));
  });
  for (int64_t round = 0; round < num_rounds; ++round)
    repeat<kPeakChains>([&](auto i) {
      const vuint inputs[1] = {(vuint)acc[(i.value + 1) % kPeakChains]};
      acc[i.value] = ByteDot::add(acc[i.value], weights, inputs);
    });
  repeat<kPeakChains - 1>([&](auto i) { acc[0] += acc[i.value + 1]; });
  memcpy(out, &acc[0], sizeof(vint));
  return num_rounds * kPeakChains * kWidth * 8;
}

inline void peak_read(const void* data, int64_t num_bytes, int64_t ahead_bytes, float* out) {
  constexpr int kVectors = 8, kStepBytes = kVectors * static_cast<int>(sizeof(vint));
  vint acc[kVectors] = {};
  const char* p = static_cast<const char*>(data);
  for (const char* end = p + num_bytes; p < end; p += kStepBytes) {
    if (ahead_bytes > 0)
      for (int line = 0; line < kStepBytes; line += 64) __builtin_prefetch(p + ahead_bytes + line);
    repeat<kVectors>([&](auto i) {
      acc[i.value] ^= *reinterpret_cast<const vint*>(p + i.value * sizeof(vint));
    });
  }
  repeat<kVectors - 1>([&](auto i) { acc[0] ^= acc[i.value + 1]; });
  memcpy(out, &acc[0], sizeof(vint));
}

}  // namespace
