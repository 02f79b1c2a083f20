// Paged attention over one tile of queries: the arithmetic that batch invariance rests on.
//
// Included by kernels.cpp alone. The context is cut into partitions of kPartition tokens from
// position 0. Each is computed on its own: scores are sums over head_dim in order, values sums
// over tokens in order, one accumulator per output; then it is merged into the running softmax,
// left to right. A masked score has weight exactly 0 and adding it changes no bit. So the result
// of a query depends on its own context alone: not on the tile it shares, the number of queries,
// where blocks or chunks end, or who runs it.
#pragma once

#include "streamkv/cpu_kernels.h"
#include "vec.h"

namespace {

using streamkv::AttentionArgs;
using streamkv::kPartition;

// The right side of a product: row k of a dense float32 matrix, or wherever k's row lies.
struct Dense {
  const float* data;
  int64_t stride;
  vfloat at(int64_t k, int64_t column) const { return load(data + k * stride + column); }
};

template <class E>
struct Scattered {
  const E* const* rows;
  vfloat at(int64_t k, int64_t column) const { return load(rows[k] + column); }
};

// out[R, C vectors] = a[R, depth] @ b[depth, C vectors], summed over depth in order.
template <int R, int C, class B>
void matmul_tile(const float* a, int64_t a_stride, B b, int64_t first_column, int64_t depth,
                 float* out, int64_t out_stride) {
  vfloat acc[R][C] = {};
  for (int64_t k = 0; k < depth; ++k) {
    vfloat column[C];
    for (int c = 0; c < C; ++c) column[c] = b.at(k, first_column + c * kWidth);
    for (int r = 0; r < R; ++r) {
      const vfloat x = broadcast(a[r * a_stride + k]);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(x, column[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      store(out + r * out_stride + first_column + c * kWidth, acc[r][c]);
}

template <int R, class B>
void matmul_rows(const float* a, int64_t a_stride, B b, int64_t num_columns, int64_t depth,
                 float* out, int64_t out_stride) {
  int64_t column = 0;
  for (; column + kTileCols * kWidth <= num_columns; column += kTileCols * kWidth)
    matmul_tile<R, kTileCols>(a, a_stride, b, column, depth, out, out_stride);
  for (; column < num_columns; column += kWidth)
    matmul_tile<R, 1>(a, a_stride, b, column, depth, out, out_stride);
}

// out[num_rows, num_columns] = a @ b; tiles only group what is independent.
template <class B>
void matmul(int64_t num_rows, int64_t num_columns, const float* a, int64_t a_stride, B b,
            int64_t depth, float* out, int64_t out_stride) {
  static_assert(kTileRows == 4 || kTileRows == 6, "the remainders below");
  for (int64_t r = 0; r < num_rows; r += kTileRows) {
    const int64_t left = num_rows - r;
    const auto run = left >= kTileRows ? matmul_rows<kTileRows, B>
                     : left == 5       ? matmul_rows<5, B>
                     : left == 4       ? matmul_rows<4, B>
                     : left == 3       ? matmul_rows<3, B>
                     : left == 2       ? matmul_rows<2, B>
                                       : matmul_rows<1, B>;
    run(a + r * a_stride, a_stride, b, num_columns, depth, out + r * out_stride, out_stride);
  }
}

inline int64_t num_vectors(int64_t length) { return (length + kWidth - 1) / kWidth; }

// A tile's buffers, carved from the thread's scratch. rows = queries * group, query by query.
struct Tile {
  float* queries;   // [rows, head_dim], scaled
  float* attended;  // [rows, head_dim] sum so far of exp(score - highest) * value
  float* partial;   // [rows, head_dim] the same for one partition
  float* scores;    // [rows, kPartition]
  float* keys;      // [head_dim, kPartition]
  float* values;    // [kPartition, head_dim]
  float* highest;   // [rows] highest score so far
  float* total;     // [rows] sum so far of exp(score - highest)
  float* partial_highest;
  float* partial_total;
  float* keep;  // [rows] factors of the two sides of a merge
  float* add;
};

inline Tile carve(float* scratch, int64_t head_dim) {
  using namespace streamkv;
  Tile t;
  const auto take = [&](int64_t floats) { return (scratch += floats) - floats; };
  t.queries = take(kMaxTileRows * head_dim);
  t.attended = take(kMaxTileRows * head_dim);
  t.partial = take(kMaxTileRows * head_dim);
  t.scores = take(kMaxTileRows * kPartition);
  t.keys = take(head_dim * kPartition);
  t.values = take(kPartition * head_dim);
  t.highest = take(kStateRows);
  t.total = take(kStateRows);
  t.partial_highest = take(kStateRows);
  t.partial_total = take(kStateRows);
  t.keep = take(kStateRows);
  t.add = take(kStateRows);
  return t;
}

inline void put_key_words(float* keys, int64_t dim, const vuint words[4], const float*) {
  for (int w = 0; w < 4; ++w) store(keys + (dim + w) * kPartition, (vfloat)words[w]);
}

inline void put_key_words(float* keys, int64_t dim, const vuint words[4], const bf16*) {
  for (int w = 0; w < 4; ++w) {  // little endian: the even element is the low half
    store(keys + (dim + 2 * w) * kPartition, (vfloat)(words[w] << 16));
    store(keys + (dim + 2 * w + 1) * kPartition, (vfloat)(words[w] & 0xffff0000u));
  }
}

// `num_tokens` keys as float32 [head_dim, kPartition]. Columns up to the next whole vector repeat
// the last token: finite wherever the context is, and masked.
template <class E>
void load_keys(const E* const* rows, int64_t num_tokens, int64_t head_dim, float* keys) {
  constexpr int64_t kElements = 16 / sizeof(E);
  for (int64_t token = 0; token < num_tokens; token += kWidth) {
    const char* group[kWidth];
    for (int i = 0; i < kWidth; ++i)
      group[i] = (const char*)rows[token + i < num_tokens ? token + i : num_tokens - 1];
    for (int64_t dim = 0; dim < head_dim; dim += kElements) {
      vuint words[4];
      transpose_words(group, dim * sizeof(E), words);
      put_key_words(keys + token, dim, words, rows[0]);
    }
  }
}

template <class E>
void load_values(const E* const* rows, int64_t num_tokens, int64_t head_dim, float* values) {
  for (int64_t token = 0; token < num_tokens; ++token)
    for (int64_t dim = 0; dim < head_dim; dim += kWidth)
      store(values + token * head_dim + dim, load(rows[token] + dim));
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

// The one way a partition joins what came before it, for rows [begin, end).
inline void merge(Tile& t, int64_t begin, int64_t end, int64_t head_dim) {
  for (int64_t i = begin; i < end; i += kWidth) {  // rows past `end` hold nothing: see kStateRows
    const vfloat before = load(t.highest + i), here = load(t.partial_highest + i);
    const vfloat highest = max(before, here);
    const vfloat keep = exp_nonpositive(before - highest), add = exp_nonpositive(here - highest);
    const vfloat total = fma(load(t.partial_total + i), add, load(t.total + i) * keep);
    store(t.highest + i, highest);
    store(t.total + i, total);
    store(t.keep + i, keep);
    store(t.add + i, add);
  }
  for (int64_t i = begin; i < end; ++i) {
    const vfloat keep = broadcast(t.keep[i]), add = broadcast(t.add[i]);
    float* attended = t.attended + i * head_dim;
    const float* partial = t.partial + i * head_dim;
    for (int64_t dim = 0; dim < head_dim; dim += kWidth)
      store(attended + dim, fma(load(partial + dim), add, load(attended + dim) * keep));
  }
}

// Pointers to the K and V of tokens [first, first + count) of one row and KV head.
template <class E>
bool find_tokens(const AttentionArgs& args, int64_t row, int64_t kv_head, int64_t first,
                 int64_t count, const E** keys, const E** values) {
  const int32_t* table = args.block_tables + row * args.max_blocks;
  const int64_t head_elements = args.block_size * args.head_dim;
  for (int64_t i = 0; i < count;) {
    const int64_t block = table[(first + i) / args.block_size];
    if (block < 0 || block >= args.num_blocks) return false;
    const E* head =
        (const E*)args.layer_cache + block * args.block_stride + kv_head * head_elements;
    for (int64_t offset = (first + i) % args.block_size; offset < args.block_size && i < count;
         ++offset, ++i) {
      keys[i] = head + offset * args.head_dim;
      values[i] = keys[i] + args.num_kv_heads * head_elements;
    }
  }
  return true;
}

template <class E>
void load_queries(const AttentionArgs& args, int64_t first_token, int64_t num_queries,
                  int64_t kv_head, Tile& t) {
  const int64_t group = args.num_heads / args.num_kv_heads;
  const vfloat scale = broadcast(args.scale);
  float* to = t.queries;
  for (int64_t query = 0; query < num_queries; ++query) {
    const E* from = (const E*)args.qkv + (first_token + query) * args.qkv_width +
                    kv_head * group * args.head_dim;
    for (int64_t i = 0; i < group * args.head_dim; i += kWidth) store(to + i, load(from + i) * scale);
    to += group * args.head_dim;
  }
  const int64_t rows = num_queries * group;
  memset(t.attended, 0, rows * args.head_dim * sizeof(float));
  for (int64_t i = 0; i < streamkv::kStateRows; ++i) {
    t.highest[i] = t.partial_highest[i] = -__builtin_inff();
    t.total[i] = t.partial_total[i] = 0.0f;
  }
}

template <class E>
void store_attended(const AttentionArgs& args, int64_t first_token, int64_t num_queries,
                    int64_t kv_head, const Tile& t) {
  const int64_t group = args.num_heads / args.num_kv_heads;
  const int64_t out_width = args.num_heads * args.head_dim;
  for (int64_t row = 0; row < num_queries * group; ++row) {
    E* to = (E*)args.out + (first_token + row / group) * out_width +
            (kv_head * group + row % group) * args.head_dim;
    const vfloat total = broadcast(t.total[row]);
    for (int64_t dim = 0; dim < args.head_dim; dim += kWidth)
      store(to + dim, load(t.attended + row * args.head_dim + dim) / total);
  }
}

template <class E>
bool attention_tile(const AttentionArgs& args, int64_t row, int64_t tile, int64_t kv_head,
                    float* scratch) {
  const int64_t group = args.num_heads / args.num_kv_heads, head_dim = args.head_dim;
  const int64_t row_start = args.query_start[row], row_end = args.query_start[row + 1];
  const int64_t first_token = row_start + tile * args.tile_queries;
  const int64_t left = row_end - first_token;
  const int64_t num_queries = left < args.tile_queries ? left : args.tile_queries;
  const int64_t first_position = args.context_lens[row] - (row_end - first_token);
  const int64_t context_len = first_position + num_queries;  // what the tile's last query sees
  const int64_t num_rows = num_queries * group;

  Tile t = carve(scratch, head_dim);
  load_queries<E>(args, first_token, num_queries, kv_head, t);
  for (int64_t start = 0; start < context_len; start += kPartition) {
    const int64_t count = context_len - start < kPartition ? context_len - start : kPartition;
    const E* key_rows[kPartition];
    const E* value_rows[kPartition];
    if (!find_tokens(args, row, kv_head, start, count, key_rows, value_rows)) return false;
    load_keys(key_rows, count, head_dim, t.keys);

    // Queries before this partition see none of it.
    const int64_t first_query = start > first_position ? start - first_position : 0;
    const int64_t begin = first_query * group, num_cols = num_vectors(count);
    float* scores = t.scores + begin * kPartition;
    matmul(num_rows - begin, num_cols * kWidth, t.queries + begin * head_dim, head_dim,
           Dense{t.keys, kPartition}, head_dim, scores, kPartition);
    for (int64_t i = begin; i < num_rows; ++i) {
      const int64_t seen = first_position + i / group + 1 - start;
      weigh(t.scores + i * kPartition, seen < count ? seen : count, num_cols,
            t.partial_highest + i, t.partial_total + i);
    }
    float* partial = t.partial + begin * head_dim;
    if (num_rows - begin <= kTileRows) {  // each value is used once: convert it in flight
      matmul(num_rows - begin, head_dim, scores, kPartition, Scattered<E>{value_rows}, count,
             partial, head_dim);
    } else {
      load_values(value_rows, count, head_dim, t.values);
      matmul(num_rows - begin, head_dim, scores, kPartition, Dense{t.values, head_dim}, count,
             partial, head_dim);
    }
    merge(t, begin, num_rows, head_dim);
  }
  store_attended<E>(args, first_token, num_queries, kv_head, t);
  return true;
}

}  // namespace
