// Attention of up to 8 rows to one partition: the arithmetic that batch invariance rests on.
//
// Included by attention.cpp alone. The context is cut into partitions of kPartition tokens from
// position 0. Each is computed on its own: scores are sums over head_dim in order, values sums over
// tokens in order, one accumulator per output; then it is merged into the running softmax, left to
// right. A masked score has weight exactly 0 and adding it changes no bit. So the result of a query
// depends on its own context alone: not on the rows it is computed with, the number of queries,
// where blocks or chunks end, or who runs it.
//
// Values of bfloat16 are read two at a time, so a row of results holds the even dims of each 2 *
// kWidth first, then the odd ones; it is put in order when it is written out.
#pragma once

#include "attention_score.h"

namespace {

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

template <int C, class V>
inline void load_values(const V* p, vfloat (&values)[C]) {
  for (int c = 0; c < C; ++c) values[c] = to_float(load(p + c * kWidth));
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
  Queries queries;
  const int32_t* positions;  // [R], ascending unless all of the partition is visible to all
  float* attended;           // [R, head_dim] sum so far of exp(score - highest) * value
  float* highest;            // [R] highest score so far; kLanes may be written
  float* total;              // [R] sum so far of exp(score - highest)
  float* record;             // null, or where to put what the partition gave instead of merging
  int64_t head_dim;
};

// C vectors of the values from `dim` on, weighted, of `count` tokens; merged, or put into records.
template <int R, int C, class K, class V>
inline void attend_vectors(const Rows& rows, const float* weights, const Context<K, V>& context,
                           const Ahead& ahead, int64_t count, int64_t dim,
                           const Factors& factors) {
  vfloat acc[R][C];
  repeat<R * C>([&](auto i) { acc[i.value / C][i.value % C] = vfloat{}; });
  const int64_t head_dim = rows.head_dim;
  for (int64_t column = 0; column * kColumn < count; ++column) {
    const int64_t tokens = smaller(count - column * kColumn, kColumn);
    const V* from = context.values[column] + dim;
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

template <int R, int C, class K, class V>
inline void attend(const Rows& rows, const float* weights, const Context<K, V>& context,
                   const Ahead& ahead, int64_t count, int64_t dim, const Factors& factors) {
  for (; dim + C * kWidth <= rows.head_dim; dim += C * kWidth)
    attend_vectors<R, C>(rows, weights, context, ahead, count, dim, factors);
  if constexpr (C > 1)
    if (dim < rows.head_dim)
      attend<R, C / 2>(rows, weights, context, ahead, count, dim, factors);
}

// R rows attend to the partition that begins at position `start`.
template <int R, class K, class V>
void pass(const Rows& rows, int64_t start, const Context<K, V>& context, const Ahead& ahead) {
  const int64_t count = smaller(rows.positions[R - 1] + 1 - start, kPartition);
  const int64_t num_cols = num_vectors(count);
  alignas(64) float scores[R * kPartition];
  fetch_scales(ahead);
  score<R, tile_columns(R, kKeyRegisters<K>)>(rows.queries, context, ahead, 0, num_cols, scores);
  Partials here;
  Factors factors;
  clear(here);
  weigh({kHasScales<K> ? context.value_scales : nullptr, count}, R, rows.positions, start, scores,
        here.highest, here.total);
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
  attend<R, tile_columns(R, 1)>(rows, scores, context, ahead, count, 0, factors);
  fetch(ahead, (count + kColumn - 1) / kColumn);
}

template <class K, class V>
void run_pass(int64_t num_rows, const Rows& rows, int64_t start, const Context<K, V>& context,
              const Ahead& ahead) {
  switch (num_rows) {
    case 1: return pass<1>(rows, start, context, ahead);
    case 2: return pass<2>(rows, start, context, ahead);
    case 3: return pass<3>(rows, start, context, ahead);
    case 4: return pass<4>(rows, start, context, ahead);
    case 5: return pass<5>(rows, start, context, ahead);
    case 6: return pass<6>(rows, start, context, ahead);
    case 7: return pass<kMaxPassRows == 8 ? 7 : 6>(rows, start, context, ahead);
    default: return pass<kMaxPassRows>(rows, start, context, ahead);
  }
}

}  // namespace
