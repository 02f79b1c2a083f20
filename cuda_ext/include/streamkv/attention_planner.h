// Cuts a step's attention into items.
//
// The context of a row is cut into partitions of kPartition tokens from position 0. Each partition
// is computed on its own and merged into the row's running softmax left to right, so the plan
// decides only who reads what when, never a bit.
#pragma once

#include <stdint.h>

#include <memory>

#include "streamkv/attention_plan.h"
#include "streamkv/batch.h"

namespace streamkv {

struct AttentionShape {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
};

class AttentionPlanner {
 public:
  AttentionPlanner();
  ~AttentionPlanner();

  // Query tiles for prompts, rows that share leading blocks together, long contexts of few rows
  // split among threads. Valid until the next call; keeps its memory.
  const AttentionPlan& plan(const Batch& batch, const AttentionShape& shape, int num_threads);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace streamkv
