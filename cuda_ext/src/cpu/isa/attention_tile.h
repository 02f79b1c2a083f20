// Attention of up to 8 rows to one partition: the arithmetic that batch invariance rests on.
//
// Included by kernels.cpp alone. The context is cut into partitions of kPartition tokens from
// position 0. Each is computed on its own: scores are sums over head_dim in order, values sums over
// tokens in order, one accumulator per output; then it is merged into the running softmax, left to
// right. A masked score has weight exactly 0 and adding it changes no bit. So the result of a query
// depends on its own context alone: not on the rows it is computed with, the number of queries,
// where blocks or chunks end, or who runs it.
//
// Values of bfloat16 are read two at a time, so a row of results holds the even dims of each 2 *
// kWidth first, then the odd ones; it is put in order when it is written out.
#pragma once

#include "attention_kv.h"
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
inline int64_t num_vectors(int64_t length) { return (length + kWidth - 1) / kWidth; }

// The keys of kWidth tokens, even and odd dims of a pair (see store_kv.h).
constexpr int64_t token_stride(const bf16*) { return 2; }
constexpr int64_t token_stride(const float*) { return 1; }
inline vfloat even_keys(const bf16* p, int64_t) { return even_of(load_words(p)); }
inline vfloat odd_keys(const bf16* p, int64_t) { return odd_of(load_words(p)); }
inline vfloat even_keys(const float* p, int64_t) { return load(p); }
inline vfloat odd_keys(const float* p, int64_t pair_stride) { return load(p + pair_stride / 2); }

template <int C>
inline void load_values(const bf16* p, vfloat (&values)[C]) {
  if constexpr (C == 1) {
    values[0] = load(p);  // what is left of head_dim
  } else {
    for (int c = 0; c < C; c += 2) {
      const vuint words = load_words(p + c * kWidth);
      values[c] = even_of(words);
      values[c + 1] = odd_of(words);
    }
  }
}

template <int C>
inline void load_values(const float* p, vfloat (&values)[C]) {
  for (int c = 0; c < C; ++c) values[c] = load(p + c * kWidth);
}

// How many vectors wide a product of `rows` rows may be so that all of it stays in registers:
// accumulators, `loaded` registers per column, and two more.
constexpr int tile_columns(int rows, int loaded) {
  const int most = (kRegisters - 2) / (rows + loaded);
  return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// scores[R, kPartition], C vectors of it from `scores` on.
template <int R, int C, class E>
inline void score_vectors(const float* queries, int64_t head_dim, const E* const (&keys)[C],
                          int64_t pair_stride, const Ahead& ahead, int64_t first_column,
                          int64_t end_column, float* scores) {
  vfloat acc[R][C] = {};
  for (int64_t dim = 0, at = 0; dim < head_dim; dim += 2, at += pair_stride) {
    for (int64_t c = first_column; c < end_column; ++c) fetch_keys(ahead, c, dim / 2);
    vfloat column[C];
    for (int c = 0; c < C; ++c) column[c] = even_keys(keys[c] + at, pair_stride);
    for (int r = 0; r < R; ++r) {
      const vfloat x = broadcast(queries[r * head_dim + dim]);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(x, column[c], acc[r][c]);
    }
    for (int c = 0; c < C; ++c) column[c] = odd_keys(keys[c] + at, pair_stride);
    for (int r = 0; r < R; ++r) {
      const vfloat x = broadcast(queries[r * head_dim + dim + 1]);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(x, column[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(scores + r * kPartition + c * kWidth, acc[r][c]);
}

// Vectors [vector, num) of the scores.
template <int R, int C, class E>
inline void score(const float* queries, int64_t head_dim, const Context<E>& context,
                  const Ahead& ahead, int64_t vector, int64_t num, float* scores) {
  constexpr int64_t kPerColumn = kColumn / kWidth;
  for (; vector + C <= num; vector += C) {
    const E* keys[C];
    for (int c = 0; c < C; ++c)
      keys[c] = context.keys[(vector + c) / kPerColumn] +
                (vector + c) % kPerColumn * kWidth * token_stride((const E*)nullptr);
    const E* const(&fixed)[C] = keys;
    // Columns that begin in these vectors and are to be fetched: neighbours, or none.
    int64_t first = (vector + kPerColumn - 1) / kPerColumn;
    int64_t end = (vector + C + kPerColumn - 1) / kPerColumn;
    while (first < end && !ahead.has(first)) ++first;
    while (first < end && !ahead.has(end - 1)) --end;
    score_vectors<R, C, E>(queries, head_dim, fixed, context.pair_stride, ahead, first, end,
                           scores + vector * kWidth);
  }
  if constexpr (C > 1) score<R, C / 2, E>(queries, head_dim, context, ahead, vector, num, scores);
}

// Softmax weights of the first `visible` scores in place, 0 for the rest up to `num_cols` vectors.
inline void weigh(float* scores, int64_t visible, int64_t num_cols, float* highest, float* total) {
  const int64_t whole = visible / kWidth, rest = visible % kWidth;
  const vfloat minus_infinity = broadcast(-__builtin_inff());
  if (rest > 0) {
    float* last = scores + whole * kWidth;
    store(last, lane_index() < (int32_t)rest ? load(last) : minus_infinity);
  }
  const int64_t used = num_vectors(visible);
  vfloat top = minus_infinity;
  for (int64_t c = 0; c < used; ++c) top = max(load(scores + c * kWidth), top);
  *highest = max(top);
  const vfloat shift = broadcast(*highest);
  vfloat weights = {};
  for (int64_t c = 0; c < used; ++c) {
    const vfloat weight = exp_nonpositive(load(scores + c * kWidth) - shift);
    weights += weight;
    store(scores + c * kWidth, weight);
  }
  *total = sum(weights);
  for (int64_t c = used; c < num_cols; ++c) store(scores + c * kWidth, vfloat{});
}

// What a pass reads of a partition, or what a partition gave.
struct Partials {
  alignas(64) float highest[kLanes];
  alignas(64) float total[kLanes];
};

// Factors of the two sides of a merge.
struct Factors {
  alignas(64) float keep[kLanes];
  alignas(64) float add[kLanes];
};

inline void clear(Partials& here) {
  for (int i = 0; i < kLanes; ++i) {
    here.highest[i] = kNoScore;
    here.total[i] = 0.0f;
  }
}

// The one way a partition joins what came before it: here the numbers, with `merge_values` the
// values. Lanes of `here` that are clear leave highest and total of their row as they were.
inline void merge(const Partials& here, int rows, float* highest, float* total, Factors& factors) {
  for (int i = 0; i < rows; i += kWidth) {
    const vfloat before = load(highest + i), now = load(here.highest + i);
    const vfloat top = max(before, now);
    const vfloat keep = exp_nonpositive(before - top), add = exp_nonpositive(now - top);
    store(total + i, fma(load(here.total + i), add, load(total + i) * keep));
    store(highest + i, top);
    store(factors.keep + i, keep);
    store(factors.add + i, add);
  }
}

inline void merge_values(float* attended, vfloat values, vfloat keep, vfloat add) {
  store(attended, fma(values, add, load(attended) * keep));
}

// Rows of a pass: pointers to the first, its neighbours follow.
struct Rows {
  const float* queries;      // [R, head_dim], scaled
  const int32_t* positions;  // [R], ascending unless all of the partition is visible to all
  float* attended;           // [R, head_dim] sum so far of exp(score - highest) * value
  float* highest;            // [R] highest score so far; kLanes may be written
  float* total;              // [R] sum so far of exp(score - highest)
  float* record;             // null, or where to put what the partition gave instead of merging
  int64_t head_dim;
};

// C vectors of the values from `dim` on, weighted, of `count` tokens; merged, or put into records.
template <int R, int C, class E>
inline void attend_vectors(const Rows& rows, const float* weights, const Context<E>& context,
                           const Ahead& ahead, int64_t count, int64_t dim,
                           const Factors& factors) {
  vfloat acc[R][C] = {};
  const int64_t head_dim = rows.head_dim;
  for (int64_t column = 0; column * kColumn < count; ++column) {
    const int64_t tokens = smaller(count - column * kColumn, kColumn);
    const E* from = context.values[column] + dim;
    const bool fetches = dim == 0 && ahead.has(column);
    for (int64_t token = 0; token < tokens; ++token, from += head_dim) {
      if (fetches) fetch_values(ahead, column, token);
      vfloat values[C];
      load_values<C>(from, values);
      for (int r = 0; r < R; ++r) {
        const vfloat weight = broadcast(weights[r * kPartition + column * kColumn + token]);
        for (int c = 0; c < C; ++c) acc[r][c] = fma(weight, values[c], acc[r][c]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    if (rows.record != nullptr) {
      float* to = rows.record + r * (head_dim + streamkv::kRecordPadding) + dim;
      for (int c = 0; c < C; ++c) store(to + c * kWidth, acc[r][c]);
    } else {
      const vfloat keep = broadcast(factors.keep[r]), add = broadcast(factors.add[r]);
      float* to = rows.attended + r * head_dim + dim;
      for (int c = 0; c < C; ++c) merge_values(to + c * kWidth, acc[r][c], keep, add);
    }
  }
}

template <int R, int C, class E>
inline void attend(const Rows& rows, const float* weights, const Context<E>& context,
                   const Ahead& ahead, int64_t count, int64_t dim, const Factors& factors) {
  for (; dim + C * kWidth <= rows.head_dim; dim += C * kWidth)
    attend_vectors<R, C, E>(rows, weights, context, ahead, count, dim, factors);
  if constexpr (C > 1)
    if (dim < rows.head_dim)
      attend<R, C / 2, E>(rows, weights, context, ahead, count, dim, factors);
}

// R rows attend to the partition that begins at position `start`.
template <int R, class E>
void pass(const Rows& rows, int64_t start, const Context<E>& context, const Ahead& ahead) {
  const int64_t count = smaller(rows.positions[R - 1] + 1 - start, kPartition);
  const int64_t num_cols = num_vectors(count);
  alignas(64) float scores[R * kPartition];
  score<R, tile_columns(R, sizeof(E) == 2 ? 2 : 1), E>(rows.queries, rows.head_dim, context,
                                                       ahead, 0, num_cols, scores);
  Partials here;
  Factors factors;
  clear(here);
  for (int r = 0; r < R; ++r) {
    const int64_t visible = smaller(rows.positions[r] + 1 - start, count);
    weigh(scores + r * kPartition, visible, num_cols, here.highest + r, here.total + r);
  }
  if (rows.record != nullptr) {
    for (int r = 0; r < R; ++r) {
      float* numbers =
          rows.record + r * (rows.head_dim + streamkv::kRecordPadding) + rows.head_dim;
      numbers[0] = here.highest[r];
      numbers[1] = here.total[r];
    }
  } else {
    merge(here, R, rows.highest, rows.total, factors);
  }
  attend<R, tile_columns(R, 1), E>(rows, scores, context, ahead, count, 0, factors);
  fetch(ahead, rows.head_dim, (count + kColumn - 1) / kColumn);
}

template <class E>
void run_pass(int64_t num_rows, const Rows& rows, int64_t start, const Context<E>& context,
              const Ahead& ahead) {
  switch (num_rows) {
    case 1: return pass<1, E>(rows, start, context, ahead);
    case 2: return pass<2, E>(rows, start, context, ahead);
    case 3: return pass<3, E>(rows, start, context, ahead);
    case 4: return pass<4, E>(rows, start, context, ahead);
    case 5: return pass<5, E>(rows, start, context, ahead);
    case 6: return pass<6, E>(rows, start, context, ahead);
    case 7: return pass<kMaxPassRows == 8 ? 7 : 6, E>(rows, start, context, ahead);
    default: return pass<kMaxPassRows, E>(rows, start, context, ahead);
  }
}

}  // namespace
