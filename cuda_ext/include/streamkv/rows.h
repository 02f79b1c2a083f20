// Rows: what the device remembers of each running sequence between steps.
//
// The same as streamkv/runner/rows.py, which is its oracle. Nothing that a kernel will use as an
// index leaves here unchecked: a step that breaks the protocol is a std::invalid_argument.
#pragma once

#include <stdint.h>

#include <vector>

#include "streamkv/batch_arrays.h"
#include "streamkv/mask_board.h"
#include "streamkv/memory.h"
#include "streamkv/sampler.h"
#include "streamkv/step.h"

namespace streamkv {

struct RowsShape {
  int64_t num_rows;
  int64_t max_model_len;
  int64_t block_size;
  int64_t num_blocks;
  int64_t vocab_size;
  int64_t max_tokens;  // in one step
  int64_t max_scored;  // in one step
};

// A row that wants a token from the step whose batch was made last.
struct AskingRow {
  int32_t row;
  int32_t position;  // where the token will stand: the number of tokens before it
  bool is_void;      // it is after a position that was deferred, and gets none
};

// A token of a prompt whose log-probability that step is to find.
struct ScoredToken {
  int32_t row;
  int32_t position;
};

class Rows {
 public:
  // std::invalid_argument for sizes below 1. `masks` must outlive the rows; null: none has a slot.
  Rows(const RowsShape& shape, const MaskBoard* masks);

  // Removed, then added, then appended. (Copies are BlockCopier's.)
  void apply(const StepInput& step);

  // The inputs of a step from `scheduled` [n, 4], n >= 1. Valid until the next call.
  const BatchArrays& batch(const PackedInts& scheduled);

  // Who wants a token from that batch, and which tokens it is to score, both in `scheduled`'s
  // order. Its rows of logits are those of the first, then those of the others.
  const std::vector<AskingRow>& asking() const { return asking_; }
  const std::vector<ScoredToken>& scored() const { return scored_; }

  SampleArgs sample_args(const AskingRow& asking, const float* logits, const int32_t* mask) const;
  ScoreArgs score_args(const ScoredToken& scored, const float* logits) const;
  const SamplingParams& sampling(int32_t row) const { return rows_[row].sampling; }

  // Appends the sampled token to its row; or none, and what follows is void until the row asks for
  // this position again.
  void keep(const AskingRow& asking, int32_t token_id);
  void defer(const AskingRow& asking);

 private:
  struct Row {
    int64_t num_tokens = 0;  // known, sampled ones included
    int64_t num_prompt_tokens = 0;
    int64_t num_blocks = 0;
    int64_t last_batch = 0;    // the number of the batch that it was in
    int64_t deferred_at = -1;  // the position; -1: none is
    SamplingParams sampling{};
  };

  void add(const RowAdded& added);
  void append(int32_t row, int32_t block_id);
  void check_scheduled(const PackedInts& scheduled);
  void check_known(int32_t row, int64_t start, int64_t end) const;
  int64_t count_scored(int32_t row, int64_t start, int64_t end, int32_t asks) const;
  void size_batch(const PackedInts& scheduled);
  void ask(int32_t row, int64_t position);
  void fill_tokens(int32_t row, int64_t start, int64_t count, int64_t first_token);
  SamplingParams sampling_of(const RowAdded& added) const;
  int32_t* tokens(int64_t row) const;
  int32_t* block_table(int64_t row) const;

  RowsShape shape_;
  const MaskBoard* masks_;
  int64_t table_width_;   // blocks that a row can have
  Memory tokens_;         // int32 [num_rows, max_model_len + 1]: one may be sampled past the end
  Memory block_tables_;   // int32 [num_rows, table_width]
  std::vector<Row> rows_;
  BatchArrays batch_;
  std::vector<AskingRow> asking_;
  std::vector<ScoredToken> scored_;
  int64_t num_batches_ = 0;
};

}  // namespace streamkv
