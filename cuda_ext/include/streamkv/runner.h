// Runner: takes a step as bytes, runs the program, samples, gives the output back as bytes.
//
// Owns the rows and nothing else. Used by one thread. No step throws: what goes wrong is `error` in
// its output, and the rows are then as the next step expects them. An output that says so when
// there is no memory left is kept ready; only if it can't be made again does std::bad_alloc leave.
//
// Sampling begins with the rows that need no mask of a grammar or whose mask is there, waits for
// the others' no longer than `mask_wait`, and defers those whose mask hasn't come.
#pragma once

#include <stdint.h>

#include <atomic>
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "streamkv/batch_arrays.h"
#include "streamkv/block_copier.h"
#include "streamkv/channel.h"
#include "streamkv/kv_cache.h"
#include "streamkv/mask_board.h"
#include "streamkv/program.h"
#include "streamkv/rows.h"
#include "streamkv/step.h"
#include "streamkv/team.h"

namespace streamkv {

struct RunnerLimits {
  int64_t num_rows;
  int64_t max_model_len;
  int64_t vocab_size;
  int64_t max_tokens;  // in one step
  int64_t max_scored;  // in one step
  std::chrono::nanoseconds mask_wait;
};

class Runner {
 public:
  // All that is given must outlive the runner. The program is reserved for the largest step; null
  // if only the two halves below are used. `logits`: float [R, vocab_size], of logit rows. `masks`
  // may be null.
  Runner(Program* program, Team& team, KvCache& cache, BufferId logits,
         const RunnerLimits& limits, MaskBoard* masks);

  std::string step(std::string_view message);

  // Answers steps until the channel is closed (true) or no step has come for so long (false).
  bool serve(Channel& channel, std::chrono::nanoseconds idle_timeout);

  // The halves of a step around a forward pass that somebody else makes: `prepare`, and then
  // `sample`, or `fail` if that went wrong (or `prepare` did, by throwing std::invalid_argument).
  // Null: there is nothing to compute; `sample` with no logits.
  const BatchArrays* prepare(std::string_view message);
  std::string sample(const float* logits, int64_t num_logit_rows);
  std::string fail(std::string_view error);

  const RunnerLimits& limits() const { return limits_; }

 private:
  std::string try_step(std::string_view message);
  std::string out_of_memory(std::string_view message);
  void make_copies(const PackedInts& copies);
  int64_t num_logit_rows() const;
  void sample_rows(const float* logits);
  void look_for_masks(MaskBoard::Clock::time_point deadline);
  void run_items(const float* logits, bool with_scores);
  void run_item(int64_t item, const float* logits);
  std::string finish();

  Program* program_;
  Team& team_;
  BufferId logits_;
  RunnerLimits limits_;
  MaskBoard* masks_;
  Rows rows_;
  BlockCopier copier_;

  // Of the step in progress.
  std::chrono::steady_clock::time_point started_;
  StepOutput output_;
  bool is_batched_ = false;  // its rows expect a token each
  struct Item {
    int64_t row;          // place among those that ask
    const int32_t* mask;  // of its grammar
  };
  std::vector<Item> items_;         // to be sampled next
  std::vector<WantedMask> wanted_;  // of rows that can't be sampled yet
  std::vector<int64_t> waiting_;    // their places
  int64_t num_scores_ = 0;          // items of scores, which come before items_
  std::atomic<bool> sampling_failed_{false};

  std::string spare_output_;  // "out of memory"; empty once used, until the next step
};

}  // namespace streamkv
