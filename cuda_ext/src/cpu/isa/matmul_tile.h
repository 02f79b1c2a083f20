// A tile of a matrix product: a few rows of x times a panel of weights, over some depths.
//
// Each output is one accumulator in a register, and depth goes by one at a time: fma of the even
// element of a pair, then of the odd. Where depth was cut, sums are stored and loaded again, which
// changes no bit. So tiles of any height, and weights widened now or before, give the same sums.
#pragma once

#include "pack.h"

namespace {

// How a tile reads its weights.
enum class Read {
  kFloats,      // float32
  kWords,       // bfloat16 pairs, widened in flight
  kWordsKept,   // the same, and what was widened is kept for the tiles to come
  kWordsTimes,  // bfloat16 pairs, multiplied as they are
};

struct ProductTile {
  const char* x;        // row 0 at the first depth: float32, or bfloat16 for kWordsTimes
  int64_t x_stride;     // bytes
  const char* weights;  // the panel at the first depth
  int64_t num_pairs;    // of depths
  float* kept;          // [2 * num_pairs, kPanel]
  float* sums;          // [rows, kPanel]
  bool is_first;        // sums begin at zero
  const char* ahead;    // weights that will be read later,
  int64_t ahead_step;   // and how many bytes lie between the hints to fetch them
};

constexpr int64_t kLineBytes = 64;

template <Read kRead>
constexpr int64_t pair_bytes() {
  return kPanel * (kRead == Read::kFloats ? 8 : 4);
}

// A vector of the weights of one depth (kOdd: of two). Kept weights go to `kept`.
template <Read kRead, int kOdd>
inline vfloat load_weights(const char* at, float* kept) {
  if constexpr (kRead == Read::kFloats) return load((const float*)at + kOdd * kPanel);
  if constexpr (kRead == Read::kWordsTimes) return (vfloat)load_words(at);
  const vfloat w = kOdd ? odd_of(load_words(at)) : even_of(load_words(at));
  if constexpr (kRead == Read::kWordsKept) store(kept + kOdd * kPanel, w);
  return w;
}

// p, but the compiler can't derive it from another pointer, which would take more registers.
inline const char* opaque(const char* p) {
  asm("" : "+r"(p));
  return p;
}

template <Read kRead>
inline vfloat broadcast_input(const char* x) {
  if constexpr (kRead == Read::kWordsTimes) return (vfloat)broadcast_word(*(const uint32_t*)x);
  return broadcast(*(const float*)x);
}

template <Read kRead>
inline vfloat multiply_add(vfloat input, vfloat w, vfloat sum) {
#if defined(__AVX512BF16__)
  if constexpr (kRead == Read::kWordsTimes) return dot_words((vuint)input, (vuint)w, sum);
#endif
  return fma(input, w, sum);
}

// action(where a sum is stored, the sum) for all sums of a tile.
template <int kRows, class Action>
inline void each_sum(float* stored, vfloat (&sums)[kRows][kPanelVectors], Action action) {
  each<kRows>([&](int r) __attribute__((always_inline)) {
    each<kPanelVectors>([&](int v) __attribute__((always_inline)) {
      action(stored + r * kPanel + v * kWidth, sums[r][v]);
    });
  });
}

// kHints: lines fetched ahead for each pair of depths.
template <int kRows, Read kRead, int kHints>
void multiply_tile(const ProductTile& tile) {
  vfloat sums[kRows][kPanelVectors];
  float* const stored = tile.sums;
  if (tile.is_first)
    each_sum(stored, sums, [](const float*, vfloat& sum) { sum = vfloat{}; });
  else
    each_sum(stored, sums, [](const float* at, vfloat& sum) { sum = load(at); });

  // Three rows to a pointer: few enough to stay in registers.
  constexpr int kPointers = (kRows + 2) / 3;
  const int64_t x_stride = tile.x_stride, ahead_step = tile.ahead_step;
  const char *weights = tile.weights, *ahead = tile.ahead;
  const char* x[kPointers];
  each<kPointers>([&](int i) { x[i] = opaque(tile.x + 3 * i * x_stride); });
  float* kept = tile.kept;
  const auto add_depth = [&](auto odd) __attribute__((always_inline)) {
    vfloat w[kPanelVectors];
    each<kPanelVectors>([&](int v) __attribute__((always_inline)) {
      const int at = v * kWidth;
      w[v] = load_weights<kRead, odd.value>(weights + at * 4, kept + at);
    });
    each<kRows>([&](int r) __attribute__((always_inline)) {
      const char* row = x[r / 3] + r % 3 * x_stride;
      const vfloat input = broadcast_input<kRead>(row + odd.value * 4);
      each<kPanelVectors>([&](int v) __attribute__((always_inline)) {
        vfloat& sum = sums[r][v];
        sum = multiply_add<kRead>(input, w[v], sum);
      });
    });
  };
  for (int64_t pair = 0; pair < tile.num_pairs; ++pair) {
    each<kHints>([&](int) {
      prefetch(ahead);
      ahead += ahead_step;
    });
    add_depth(Number<0>{});
    if constexpr (kRead != Read::kWordsTimes) add_depth(Number<1>{});
    each<kPointers>([&](int i) { x[i] += kRead == Read::kWordsTimes ? 4 : 8; });
    weights += pair_bytes<kRead>();
    if constexpr (kRead == Read::kWordsKept) kept += 2 * kPanel;
  }
  each_sum(stored, sums, [](float* at, const vfloat& sum) { store(at, sum); });
}

// A tile of `height` rows, from 1 to kRows.
template <Read kRead, int kHints, int kRows = kTileHeight>
inline void multiply(int64_t height, const ProductTile& tile) {
  if constexpr (kRows > 1) {
    if (height < kRows) return multiply<kRead, kHints, kRows - 1>(height, tile);
  }
  multiply_tile<kRows, kRead, kHints>(tile);
}

}  // namespace
