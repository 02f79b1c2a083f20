// Who computes which part of a step's attention: plain data, read by the kernels.
//
// Plain, because kernels are compiled for several instruction sets (see kernels.h). Made once a
// step by AttentionPlanner, used by each layer.
//
// A tile is a set of queries, each with its heads of one KV head (or a slice of them): the rows of
// one matrix. Its steps say which of them read which partitions of the context together. An item
// computes a tile, or, where there are too few of them for the threads, a part of the context of
// one: then what it found is kept for each partition, and whoever ends the tile's last part joins
// the parts, left to right.
#pragma once

#include <stdint.h>

namespace streamkv {

constexpr int64_t kMaxTileRows = 96;  // queries of a tile times heads of a slice

// Consecutive queries of one row of the batch.
struct AttentionRun {
  int32_t row;
  int32_t first_token;
  int32_t num_queries;
  int32_t first_position;
  int32_t first_query;  // how many queries of the tile come before
};

// Runs [first_run, end_run) of the tile read partitions [first_partition, end_partition). They all
// see all of it, unless there is just one run.
struct AttentionStep {
  int32_t first_run, end_run;
  int32_t first_partition, end_partition;
};

struct AttentionTile {
  int32_t first_run, num_runs;    // in AttentionPlan::runs
  int32_t first_step, num_steps;  // in AttentionPlan::steps; the steps of a run are left to right
  int32_t num_queries;
  int32_t num_partitions;  // of its longest context
};

// Where the parts of one tile and slice meet: records [num_partitions, rows of the tile], each of
// head_dim + kRecordPadding floats: values, highest score, total weight. Record 0 is what the first
// part, which begins at position 0, has merged.
struct AttentionJoin {
  int64_t first_float;  // in AttentionPlan::records
  int32_t num_parts;
  int32_t num_pending;    // parts that haven't ended; num_parts again after the last has
  int32_t end_of_first;   // the first part is partitions [0, end_of_first)
};

constexpr int64_t kRecordPadding = 16;

struct AttentionItem {
  int32_t tile;
  int32_t first_slice, end_slice;
  int32_t first_partition, end_partition;
  int32_t join;  // -1: these are all partitions
};

struct AttentionPlan {
  int64_t num_items;
  const AttentionItem* items;
  const AttentionTile* tiles;
  const AttentionRun* runs;
  const AttentionStep* steps;
  AttentionJoin* joins;
  float* records;               // 64-byte aligned
  int32_t slices_per_kv_head;   // 1 unless a KV head has more heads than a tile has rows
  int32_t heads_per_slice;      // the last slice of a KV head may have fewer
};

}  // namespace streamkv
