// What an item of attention works on, and where the context lies that it reads.
//
// Included by attention.cpp alone.
#pragma once

#include "attention_tile.h"

namespace {

using streamkv::AttentionArgs;
using streamkv::AttentionItem;
using streamkv::AttentionJoin;
using streamkv::AttentionPlan;
using streamkv::AttentionRun;
using streamkv::AttentionStep;
using streamkv::AttentionTile;
using streamkv::kMaxTileRows;
using streamkv::kRecordPadding;

// A tile's buffers, carved from the thread's scratch. Rows are query by query, in each its heads.
struct Tile {
  float* queries;      // [rows, head_dim]; for int8 keys:
  int8_t* query_bytes;    // [rows, head_dim]
  float* query_scales;    // [rows]
  int32_t* query_starts;  // [rows] (see Queries)
  float* attended;     // [rows, head_dim]
  float* highest;      // [rows]
  float* total;        // [rows]
  int32_t* positions;  // [rows]
  float* keys;         // [head_dim, kPartition] widened
  float* values;       // [kPartition, head_dim] widened
  void* block;         // [2, kPartition * head_dim] gathered, as a block of kPartition tokens
};

inline Tile carve(void* scratch, int64_t head_dim) {
  float* next = (float*)scratch;
  const auto take = [&](int64_t floats) { return (next += floats) - floats; };
  Tile t;
  t.queries = take(kMaxTileRows * head_dim);
  t.query_bytes = (int8_t*)t.queries;
  t.query_scales = take(kMaxTileRows);
  t.query_starts = (int32_t*)take(kMaxTileRows);
  t.attended = take(kMaxTileRows * head_dim);
  t.highest = take(kMaxTileRows + kLanes);
  t.total = take(kMaxTileRows + kLanes);
  t.positions = (int32_t*)take(kMaxTileRows);
  t.keys = take(head_dim * kPartition);
  t.values = take(kPartition * head_dim);
  t.block = take(2 * kPartition * head_dim);
  return t;
}
static_assert((2 * kMaxTileRows * streamkv::kMaxHeadDim + 5 * kMaxTileRows + 2 * kLanes +
               4 * kPartition * streamkv::kMaxHeadDim) * 4 <= streamkv::kScratchBytes,
              "a tile fits into the scratch");

// What an item works on, unpacked.
struct Job {
  const AttentionArgs& args;
  const AttentionPlan& plan;
  const AttentionItem& item;
  const AttentionTile& tile;
  const AttentionRun* runs;
  const AttentionStep* steps;
  Tile t;
};

// Heads of a slice.
struct Slice {
  int64_t kv_head, first_head, num_heads;
};

inline Slice slice_of(const AttentionArgs& args, int64_t slice) {
  const AttentionPlan& plan = *args.plan;
  const int64_t group = args.num_heads / args.cache.num_kv_heads;
  const int64_t kv_head = slice / plan.slices_per_kv_head;
  const int64_t begin = slice % plan.slices_per_kv_head * plan.heads_per_slice;
  return {kv_head, kv_head * group + begin, smaller(plan.heads_per_slice, group - begin)};
}

// Position in the order of work: slices, in each the steps, in each the partitions.
struct Cursor {
  int64_t slice, step, partition;
};

inline int64_t begin_of(const Job& job, int64_t step) {
  const int64_t begin = job.steps[step].first_partition, first = job.item.first_partition;
  return begin > first ? begin : first;
}

inline int64_t end_of(const Job& job, int64_t step) {
  return smaller(job.steps[step].end_partition, job.item.end_partition);
}

// To the first partition at or after this place; false if there is none.
inline bool settle(const Job& job, Cursor& at) {
  while (at.partition >= end_of(job, at.step)) {
    if (++at.step == job.tile.num_steps) {
      at.step = 0;
      if (++at.slice == job.item.end_slice) return false;
    }
    at.partition = begin_of(job, at.step);
  }
  return true;
}

// Tokens of a step's context.
inline int64_t context_len(const Job& job, int64_t step) {
  const AttentionRun& last = job.runs[job.steps[step].end_run - 1];
  return last.first_position + last.num_queries;
}

template <class E>
Context<E, E> locate_columns(const Job& job, const Cursor& at) {
  const KvLayer& cache = job.args.cache;
  const int64_t kv_head = at.slice / job.plan.slices_per_kv_head, size = cache.block_size;
  const int64_t row = job.runs[job.steps[at.step].first_run].row;
  const int32_t* table = job.args.batch->block_tables + row * job.args.batch->max_blocks;
  const int64_t start = at.partition * kPartition, limit = context_len(job, at.step);
  Context<E, E> context = {};
  context.line_stride = kPerWord<E> * size;
  for (int c = 0; c < kNumColumns; ++c) {
    int64_t token = start + c * kColumn;
    if (token >= limit) token = start;
    const int64_t block = table[token / size], offset = token % size;
    E* keys = keys_of<E>(cache, block, kv_head);
    E* values = values_of<E>(cache, block, kv_head);
    context.keys[c] = keys + offset * kPerWord<E>;
    context.values[c] = values + offset * cache.head_dim;
    if constexpr (!kHasScales<E>) continue;
    context.key_scales[c] = scales_of(keys, size, cache.head_dim) + offset;
    context.value_scales[c] = scales_of(values, size, cache.head_dim) + offset;
  }
  return context;
}

// Of a head's parts of a block of kPartition tokens.
template <class E>
Context<E, E> as_context(E* keys, E* values, int64_t head_dim) {
  Context<E, E> context = {};
  context.line_stride = kPerWord<E> * kPartition;
  for (int c = 0; c < kNumColumns; ++c) {
    context.keys[c] = keys + c * kColumn * kPerWord<E>;
    context.values[c] = values + c * kColumn * head_dim;
    if constexpr (!kHasScales<E>) continue;
    context.key_scales[c] = scales_of(keys, kPartition, head_dim) + c * kColumn;
    context.value_scales[c] = scales_of(values, kPartition, head_dim) + c * kColumn;
  }
  return context;
}

// Copies `count` tokens from `offset` on in a block to a part of a block of kPartition tokens.
template <class E>
inline void gather_tokens(const KvLayer& cache, int64_t block, int64_t kv_head, int64_t offset,
                          int64_t count, int64_t to, E* keys, E* values) {
  const int64_t head_dim = cache.head_dim, size = cache.block_size;
  E* from = keys_of<E>(cache, block, kv_head);
  for (int64_t line = 0; line < head_dim / kPerWord<E>; ++line)
    memcpy(keys + (line * kPartition + to) * kPerWord<E>,
           from + (line * size + offset) * kPerWord<E>, count * kPerWord<E> * sizeof(E));
  E* from_values = values_of<E>(cache, block, kv_head);
  memcpy(values + to * head_dim, from_values + offset * head_dim, count * head_dim * sizeof(E));
  if constexpr (!kHasScales<E>) return;
  memcpy(scales_of(keys, kPartition, head_dim) + to, scales_of(from, size, head_dim) + offset,
         count * sizeof(float));
  memcpy(scales_of(values, kPartition, head_dim) + to,
         scales_of(from_values, size, head_dim) + offset, count * sizeof(float));
}

// Where blocks cut columns: copies the partition into one block of kPartition tokens.
template <class E>
Context<E, E> gather(const Job& job, const Cursor& at) {
  const KvLayer& cache = job.args.cache;
  const int64_t head_dim = cache.head_dim, block_size = cache.block_size;
  const int64_t kv_head = at.slice / job.plan.slices_per_kv_head;
  const int64_t row = job.runs[job.steps[at.step].first_run].row;
  const int32_t* table = job.args.batch->block_tables + row * job.args.batch->max_blocks;
  const int64_t start = at.partition * kPartition;
  const int64_t count = smaller(context_len(job, at.step) - start, kPartition);
  E* keys = (E*)job.t.block;
  E* values = (E*)((char*)keys + part_bytes<E>(kPartition, head_dim));
  for (int64_t i = 0; i < count;) {
    const int64_t block = table[(start + i) / block_size], offset = (start + i) % block_size;
    const int64_t tokens = smaller(block_size - offset, count - i);
    gather_tokens(cache, block, kv_head, offset, tokens, i, keys, values);
    i += tokens;
  }
  return as_context(keys, values, head_dim);
}

// The partition's first `count` tokens as float32, values in the order of results
// (attention_tile.h).
inline Context<float, float> widen_partition(const Job& job, const Context<bf16, bf16>& context,
                                             int64_t count) {
  const int64_t head_dim = job.args.cache.head_dim;
  const int64_t lines = head_dim / 2, num_columns = divide_up(count, kColumn);
  for (int64_t c = 0; c < num_columns; ++c) {
    for (int64_t line = 0; line < lines; ++line)
      for (int64_t i = 0; i < kColumn; i += kWidth) {
        const vuint words = load_words(context.keys[c] + line * context.line_stride + 2 * i);
        float* to = job.t.keys + 2 * line * kPartition + c * kColumn + i;
        store(to, even_of(words));
        store(to + kPartition, odd_of(words));
      }
    const int64_t tokens = smaller(count - c * kColumn, kColumn);
    const bf16* from = context.values[c];
    float* to = job.t.values + c * kColumn * head_dim;
    for (int64_t token = 0; token < tokens; ++token, from += head_dim, to += head_dim) {
      int64_t dim = 0;
      for (; dim + 2 * kWidth <= head_dim; dim += 2 * kWidth) {
        const vuint words = load_words(from + dim);
        store(to + dim, even_of(words));
        store(to + dim + kWidth, odd_of(words));
      }
      if (dim < head_dim) store(to + dim, load(from + dim));
    }
  }
  return as_context(job.t.keys, job.t.values, head_dim);
}

// Keys of int8 are multiplied as they are; their values become float32, without their scale.
inline Context<int8_t, float> widen_partition(const Job& job,
                                              const Context<int8_t, int8_t>& context,
                                              int64_t count) {
  const int64_t head_dim = job.args.cache.head_dim;
  Context<int8_t, float> wide = {};
  wide.line_stride = context.line_stride;
  for (int64_t c = 0; c < kNumColumns; ++c) {
    wide.keys[c] = context.keys[c];
    wide.key_scales[c] = context.key_scales[c];
    wide.value_scales[c] = context.value_scales[c];
    float* to = job.t.values + c * kColumn * head_dim;
    wide.values[c] = to;
    const int64_t numbers = smaller(count - c * kColumn, kColumn) * head_dim;
    for (int64_t i = 0; i < numbers; i += kWidth)
      store(to + i, to_float(load(context.values[c] + i)));
  }
  return wide;
}

template <class E>
Ahead ahead_of(const Context<E, E>& next, int64_t head_dim) {
  Ahead ahead;
  for (int c = 0; c < kNumColumns; ++c) {
    ahead.keys[c] = (const char*)next.keys[c];
    ahead.values[c] = (const char*)next.values[c];
    ahead.scales[c] = (const char*)next.key_scales[c];
    ahead.scales[kNumColumns + c] = (const char*)next.value_scales[c];
  }
  ahead.num_lines = head_dim / kPerWord<E>;
  ahead.line_stride = next.line_stride * (int64_t)sizeof(E);
  ahead.row_bytes = head_dim * (int64_t)sizeof(E);
  ahead.columns = (1 << kNumColumns) - 1;
  return ahead;
}

}  // namespace
