// Where the K and V of a partition lie, for arithmetic and for fetching ahead.
//
// Included by kernels.cpp alone.
#pragma once

#include "streamkv/kernels.h"
#include "vec.h"

namespace {

using streamkv::kPartition;

constexpr int kColumn = 16;  // tokens of a column: of one block, each key's pair beside the next's
constexpr int kNumColumns = kPartition / kColumn;

// Where the K and V of one partition and KV head lie. A column that isn't there is some other.
template <class E>
struct Context {
  const E* keys[kNumColumns];
  const E* values[kNumColumns];  // [kColumn, head_dim]
  int64_t pair_stride;           // elements from the keys' pair of dims to the next
};

// The partition to come, fetched while this one is computed: keys with keys, values with values. A
// line of keys is 16 tokens' pair of bfloat16 dims, or one float32 dim.
struct Ahead {
  const char* keys[kNumColumns];
  const char* values[kNumColumns];
  int64_t line_stride;  // bytes from a line of keys to the next
  int64_t lines_per_pair;
  int64_t row_bytes;  // of one token's values
  int32_t columns;    // a bit for each that is to be fetched

  bool has(int64_t column) const { return columns >> column & 1; }
};

inline void fetch_keys(const Ahead& ahead, int64_t column, int64_t pair) {
  const char* line = ahead.keys[column] + pair * ahead.lines_per_pair * ahead.line_stride;
  for (int64_t i = 0; i < ahead.lines_per_pair; ++i) prefetch(line + i * ahead.line_stride);
}

inline void fetch_values(const Ahead& ahead, int64_t column, int64_t token) {
  const char* row = ahead.values[column] + token * ahead.row_bytes;
  for (int64_t i = 0; i < ahead.row_bytes; i += 64) prefetch(row + i);
}

// All of it from `first_column` on.
inline void fetch(const Ahead& ahead, int64_t head_dim, int64_t first_column) {
  for (int64_t column = first_column; column < kNumColumns; ++column) {
    if (!ahead.has(column)) continue;
    for (int64_t pair = 0; pair < head_dim / 2; ++pair) fetch_keys(ahead, column, pair);
    for (int64_t token = 0; token < kColumn; ++token) fetch_values(ahead, column, token);
  }
}

}  // namespace
