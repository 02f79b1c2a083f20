// Scores of some rows with one partition's keys, and the softmax weights that they become.
//
// Included by attention.cpp alone. A score is a sum over head_dim in order, or an exact one of int8.
#pragma once

#include "attention_kv.h"
#include "quantized_dot.h"
#include "streamkv/attention_plan.h"

namespace {

#if defined(__AVX512F__) || !defined(__SSE4_1__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

constexpr int kMaxPassRows = kRegisters == 32 ? 8 : 6;
constexpr int kLanes = 16;  // of arrays with one number per row of a pass, at least kWidth
constexpr float kNoScore = -3.40282347e38f;  // finite: the difference of two is 0, not NaN

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t num_vectors(int64_t length) { return divide_up(length, kWidth); }

// How many vectors wide a product of `rows` rows may be so that all of it stays in registers:
// accumulators, `loaded` registers per column, and two more.
constexpr int tile_columns(int rows, int loaded) {
  const int most = (kRegisters - 2) / (rows + loaded);
  return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// Queries of int8 are multiplied as a quantized weight's inputs are.
using KeyDot = Dot<8>;

// What keeps one vector of keys in registers.
template <class K>
constexpr int kKeyRegisters = 1;
template <>
constexpr int kKeyRegisters<bf16> = 2;
template <>
constexpr int kKeyRegisters<int8_t> = sizeof(KeyDot::Weights) > sizeof(vuint) ? 2 : 1;

// Queries of rows, the first one's; its neighbours follow.
struct Queries {
  const float* values;    // [R, head_dim], scaled
  const int8_t* bytes;    // [R, head_dim], for keys of int8
  const float* scales;    // [R], of bytes
  const int32_t* starts;  // [R] where sums of bytes' products begin
  int64_t head_dim;
};

// Dims `dim` and the next of kWidth keys.
inline vfloat even_keys(const bf16* p, int64_t) { return even_of(load_words(p)); }
inline vfloat odd_keys(const bf16* p, int64_t) { return odd_of(load_words(p)); }
inline vfloat even_keys(const float* p, int64_t) { return load(p); }
inline vfloat odd_keys(const float* p, int64_t line_stride) { return load(p + line_stride); }

// Columns [first, end) to fetch while scores are computed.
struct Share {
  const Ahead& ahead;
  int64_t first, end;

  void fetch(int64_t line) const {
    for (int64_t c = first; c < end; ++c) fetch_keys(ahead, c, line);
  }
};

// scores[R, kPartition], C vectors of it from `scores` on; keys of float32 or bfloat16.
template <int R, int C, class K>
inline void score_vectors(const Queries& queries, const K* const (&keys)[C],
                          const float* const (&)[C], int64_t line_stride, const Share& share,
                          float* scores) {
  constexpr int64_t kLines = 2 / kPerWord<K>;  // of a pair of dims
  const int64_t head_dim = queries.head_dim;
  vfloat acc[R][C];
  repeat<R * C>([&](auto i) { acc[i.value / C][i.value % C] = vfloat{}; });
  for (int64_t dim = 0, at = 0; dim < head_dim; dim += 2, at += kLines * line_stride) {
    for (int64_t line = 0; line < kLines; ++line) share.fetch(dim / 2 * kLines + line);
    vfloat column[C];
    for (int c = 0; c < C; ++c) column[c] = even_keys(keys[c] + at, line_stride);
    for (int r = 0; r < R; ++r) {
      const vfloat x = broadcast(queries.values[r * head_dim + dim]);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(x, column[c], acc[r][c]);
    }
    for (int c = 0; c < C; ++c) column[c] = odd_keys(keys[c] + at, line_stride);
    for (int r = 0; r < R; ++r) {
      const vfloat x = broadcast(queries.values[r * head_dim + dim + 1]);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(x, column[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(scores + r * kPartition + c * kWidth, acc[r][c]);
}

// Those of int8.
template <int R, int C>
inline void score_vectors(const Queries& queries, const int8_t* const (&keys)[C],
                          const float* const (&key_scales)[C], int64_t line_stride,
                          const Share& share, float* scores) {
  const int64_t head_dim = queries.head_dim;
  vint acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      acc[r][c] = KeyDot::begin((vint)broadcast_word((uint32_t)queries.starts[r]));
  for (int64_t line = 0, at = 0; line < head_dim / 4; ++line, at += line_stride) {
    share.fetch(line);
    KeyDot::Weights column[C];
    for (int c = 0; c < C; ++c) column[c] = KeyDot::prepare(load_words(keys[c] + at));
    for (int r = 0; r < R; ++r) {
      uint32_t word;
      memcpy(&word, queries.bytes + r * head_dim + 4 * line, sizeof(word));
      const vuint x = broadcast_word(word);
      for (int c = 0; c < C; ++c) acc[r][c] = KeyDot::add(acc[r][c], &column[c], &x);
    }
  }
  for (int r = 0; r < R; ++r) {
    const vfloat scale = broadcast(queries.scales[r]);
    const vint start = (vint)broadcast_word((uint32_t)queries.starts[r]);
    for (int c = 0; c < C; ++c)
      store(scores + r * kPartition + c * kWidth,
            to_float(KeyDot::end(acc[r][c], start)) * (scale * load(key_scales[c])));
  }
}

// Vectors [vector, num) of the scores.
template <int R, int C, class K, class V>
inline void score(const Queries& queries, const Context<K, V>& context, const Ahead& ahead,
                  int64_t vector, int64_t num, float* scores) {
  constexpr int64_t kPerColumn = kColumn / kWidth;
  for (; vector + C <= num; vector += C) {
    const K* keys[C];
    const float* scales[C];
    for (int c = 0; c < C; ++c) {
      const int64_t column = (vector + c) / kPerColumn, token = (vector + c) % kPerColumn * kWidth;
      keys[c] = context.keys[column] + token * kPerWord<K>;
      scales[c] = kHasScales<K> ? context.key_scales[column] + token : nullptr;
    }
    const K* const(&fixed_keys)[C] = keys;
    const float* const(&fixed_scales)[C] = scales;
    // Columns that begin in these vectors and are to be fetched: neighbours, or none.
    int64_t first = (vector + kPerColumn - 1) / kPerColumn;
    int64_t end = (vector + C + kPerColumn - 1) / kPerColumn;
    while (first < end && !ahead.has(first)) ++first;
    while (first < end && !ahead.has(end - 1)) --end;
    score_vectors<R, C>(queries, fixed_keys, fixed_scales, context.line_stride,
                        Share{ahead, first, end}, scores + vector * kWidth);
  }
  if constexpr (C > 1) score<R, C / 2>(queries, context, ahead, vector, num, scores);
}

// Of one partition: what its scores are turned to weights with.
struct Softmax {
  const float* const* value_scales;  // [kNumColumns] of int8 values, which weights take up; or null
  int64_t count;                     // tokens of the partition that any of the rows sees
};

// A row's N vectors of scores from `vector` on become weights; adds them to `sums`.
template <int N>
__attribute__((always_inline)) inline void weigh_vectors(const Softmax& softmax, float* scores,
                                                         int64_t vector, vfloat shift,
                                                         vfloat& sums) {
  constexpr int64_t kPerColumn = kColumn / kWidth;
  vfloat weights[N];
  repeat<N>([&](auto i) {
    weights[i.value] = load(scores + (vector + i.value) * kWidth) - shift;
  });
  exp_nonpositive(weights);
  repeat<N>([&](auto i) {
    const int64_t at = vector + i.value;
    sums += weights[i.value];
    if (softmax.value_scales != nullptr)
      weights[i.value] *=
          load(softmax.value_scales[at / kPerColumn] + at % kPerColumn * kWidth);
    store(scores + at * kWidth, weights[i.value]);
  });
}

// Turns a row's first `visible` scores to weights, the rest to 0; returns the sum.
inline float weigh_row(const Softmax& softmax, float* scores, int64_t visible, float highest) {
  constexpr int kTogether = 4;
  const int64_t used = num_vectors(visible), num = num_vectors(softmax.count);
  const vfloat shift = broadcast(highest);
  vfloat sums = {};
  int64_t c = 0;
  for (; c + kTogether <= used; c += kTogether)
    weigh_vectors<kTogether>(softmax, scores, c, shift, sums);
  for (; c < used; ++c) weigh_vectors<1>(softmax, scores, c, shift, sums);
  for (; c < num; ++c) store(scores + c * kWidth, vfloat{});
  return sum(sums);
}

// The greatest of a row's first `visible` scores; what is behind them in their last vector becomes
// minus infinity.
inline float highest_of(float* scores, int64_t visible) {
  const int64_t rest = visible % kWidth, used = num_vectors(visible);
  const vfloat minus_infinity = broadcast(-__builtin_inff());
  if (rest > 0) {
    float* last = scores + (used - 1) * kWidth;
    store(last, lane_index() < (int32_t)rest ? load(last) : minus_infinity);
  }
  vfloat top = minus_infinity;
  for (int64_t c = 0; c < used; ++c) top = max(load(scores + c * kWidth), top);
  return max(top);
}

// scores[num_rows, kPartition] become weights; `positions` are the rows', in a partition from
// `start` on. All rows' greatest scores come first: a row alone would wait for its own.
__attribute__((noinline)) void weigh(const Softmax& softmax, int64_t num_rows,
                                     const int32_t* positions, int64_t start, float* scores,
                                     float* highest, float* total) {
  const auto visible = [&](int64_t r) { return smaller(positions[r] + 1 - start, softmax.count); };
  for (int64_t r = 0; r < num_rows; ++r)
    highest[r] = highest_of(scores + r * kPartition, visible(r));
  for (int64_t r = 0; r < num_rows; ++r)
    total[r] = weigh_row(softmax, scores + r * kPartition, visible(r), highest[r]);
}

}  // namespace
