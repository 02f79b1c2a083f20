// Where the K and V of a partition lie, for arithmetic and for fetching ahead.
//
// Included by attention.cpp alone.
#pragma once

#include "store_kv.h"

namespace {

using streamkv::kPartition;

constexpr int kNumColumns = kPartition / kColumn;

// Where the K and V of one partition and KV head lie: columns are kColumn tokens of one block. A
// column that isn't there is some other. Scales are int8's.
template <class K, class V>
struct Context {
  const K* keys[kNumColumns];
  const V* values[kNumColumns];  // [kColumn, head_dim]
  const float* key_scales[kNumColumns];
  const float* value_scales[kNumColumns];
  int64_t line_stride;  // elements from a line of keys, their words of one index, to the next
};

// The partition to come, fetched while this one is computed: keys with keys, values with values. A
// line of keys is of 16 tokens.
struct Ahead {
  const char* keys[kNumColumns];
  const char* values[kNumColumns];
  const char* scales[2 * kNumColumns];  // of keys, of values; all null if there are none
  int64_t num_lines;    // of keys
  int64_t line_stride;  // bytes from a line of keys to the next
  int64_t row_bytes;    // of one token's values
  int32_t columns;      // a bit for each that is to be fetched

  bool has(int64_t column) const { return columns >> column & 1; }
};

inline void fetch_keys(const Ahead& ahead, int64_t column, int64_t line) {
  prefetch(ahead.keys[column] + line * ahead.line_stride);
}

inline void fetch_values(const Ahead& ahead, int64_t column, int64_t token) {
  const char* row = ahead.values[column] + token * ahead.row_bytes;
  for (int64_t i = 0; i < ahead.row_bytes; i += 64) prefetch(row + i);
}

inline void fetch_scales(const Ahead& ahead) {
  if (ahead.scales[0] == nullptr) return;
  for (int64_t i = 0; i < 2 * kNumColumns; ++i)
    if (ahead.has(i % kNumColumns)) prefetch(ahead.scales[i]);
}

// All but scales of it from `first_column` on.
inline void fetch(const Ahead& ahead, int64_t first_column) {
  for (int64_t column = first_column; column < kNumColumns; ++column) {
    if (!ahead.has(column)) continue;
    for (int64_t line = 0; line < ahead.num_lines; ++line) fetch_keys(ahead, column, line);
    for (int64_t token = 0; token < kColumn; ++token) fetch_values(ahead, column, token);
  }
}

}  // namespace
