#include "streamkv/runner.h"

#include <string.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include "streamkv/sampler.h"

namespace streamkv {
namespace {

RowsShape rows_shape(const KvCache& cache, const RunnerLimits& limits) {
  return {limits.num_rows,  limits.max_model_len, cache.block_size,
          cache.num_blocks, limits.vocab_size,    limits.max_tokens, limits.max_scored};
}

// To be used when there is no memory for another; the step's id is filled in then.
std::string make_spare_output() {
  StepOutput output;
  output.error = "out of memory";
  return write_output(output);
}

}  // namespace

Runner::Runner(Program* program, Team& team, KvCache& cache, BufferId logits,
               const RunnerLimits& limits, MaskBoard* masks)
    : program_(program),
      team_(team),
      logits_(logits),
      limits_(limits),
      masks_(masks),
      rows_(rows_shape(cache, limits), masks),
      copier_(cache, team),
      spare_output_(make_spare_output()) {
  if (program_ != nullptr)
    program_->reserve(limits_.max_tokens, std::min(limits_.max_tokens, limits_.num_rows) +
                                              std::min(limits_.max_tokens, limits_.max_scored));
}

bool Runner::serve(Channel& channel, std::chrono::nanoseconds idle_timeout) {
  std::string message;
  for (;;) {
    const Received received = channel.receive(message, idle_timeout);
    if (received != Received::kMessage) return received == Received::kClosed;
    channel.reply(step(message));
  }
}

std::string Runner::step(std::string_view message) {
  try {
    if (spare_output_.empty()) spare_output_ = make_spare_output();
    return try_step(message);
  } catch (const std::bad_alloc&) {
    return out_of_memory(message);
  }
}

// std::bad_alloc if there is not even memory to say so.
std::string Runner::try_step(std::string_view message) {
  try {
    const BatchArrays* batch = prepare(message);
    if (batch == nullptr) return sample(nullptr, 0);
    if (program_ == nullptr) throw std::invalid_argument("this runner has no program");
    program_->run(batch->view(), team_, 0, program_->num_ops());
    const void* logits = num_logit_rows() > 0 ? program_->buffer(logits_) : nullptr;
    return sample(static_cast<const float*>(logits), num_logit_rows());
  } catch (const std::bad_alloc&) {
    return fail("out of memory");
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

std::string Runner::out_of_memory(std::string_view message) {
  is_batched_ = false;  // `fail` came as far as giving the rows their tokens: that needs no memory
  std::string output = spare_output_.empty() ? make_spare_output() : std::move(spare_output_);
  spare_output_.clear();
  const int64_t step_id = step_id_of(message);
  memcpy(output.data() + kOutputStepIdAt, &step_id, sizeof(step_id));
  return output;
}

// --- the two halves -----------------------------------------------------------------------------

const BatchArrays* Runner::prepare(std::string_view message) {
  started_ = std::chrono::steady_clock::now();
  output_ = {};
  output_.step_id = step_id_of(message);
  is_batched_ = false;
  const StepInput step = parse_step(message);
  copier_.check(step.copies);
  rows_.apply(step);
  if (step.copies.size() > 0) make_copies(step.copies);
  if (step.scheduled.size() == 0) return nullptr;
  const BatchArrays& batch = rows_.batch(step.scheduled);
  is_batched_ = true;
  return &batch;
}

void Runner::make_copies(const PackedInts& copies) {
  const auto started = std::chrono::steady_clock::now();
  copier_.make(copies, output_.copies_done);
  output_.copies_s =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

int64_t Runner::num_logit_rows() const {
  return static_cast<int64_t>(rows_.asking().size() + rows_.scored().size());
}

std::string Runner::sample(const float* logits, int64_t num_rows) {
  if (num_rows != num_logit_rows())
    throw std::invalid_argument("sample: expected logits of " + std::to_string(num_logit_rows()) +
                                " rows, got " + std::to_string(num_rows));
  const std::vector<AskingRow>& asking = rows_.asking();
  output_.rows.resize(asking.size());
  output_.scored.resize(rows_.scored().size());
  sample_rows(logits);
  for (size_t i = 0; i < asking.size(); ++i) {
    if (output_.rows[i].is_deferred)
      rows_.defer(asking[i]);
    else
      rows_.keep(asking[i], output_.rows[i].sampled.token_id);
  }
  return finish();
}

std::string Runner::fail(std::string_view error) {
  // A step that was sent ahead builds on these tokens; its rows are lost, others aren't.
  if (is_batched_)
    for (const AskingRow& asking : rows_.asking()) rows_.keep(asking, 0);
  output_.rows.clear();
  output_.scored.clear();
  output_.error = error;
  return finish();
}

std::string Runner::finish() {
  is_batched_ = false;
  output_.duration_s =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  return write_output(output_);
}

// --- sampling as phases: a score or a row is an item ----------------------------------------------

void Runner::sample_rows(const float* logits) {
  const std::vector<AskingRow>& asking = rows_.asking();
  const auto deadline = MaskBoard::Clock::now() + limits_.mask_wait;
  items_.clear();
  wanted_.clear();
  waiting_.clear();
  for (size_t i = 0; i < asking.size(); ++i) {
    const int32_t slot = rows_.sampling(asking[i].row).mask_slot;
    output_.rows[i].is_deferred = true;
    if (asking[i].is_void) continue;
    if (slot < 0) {
      items_.push_back({static_cast<int64_t>(i), nullptr});
    } else {
      wanted_.push_back({slot, asking[i].position});
      waiting_.push_back(static_cast<int64_t>(i));
    }
  }
  look_for_masks(MaskBoard::Clock::time_point::min());
  run_items(logits, true);
  if (waiting_.empty()) return;
  look_for_masks(deadline);
  run_items(logits, false);
}

// Moves rows whose masks are there by then from those that wait to the items.
void Runner::look_for_masks(MaskBoard::Clock::time_point deadline) {
  if (waiting_.empty()) return;
  masks_->find(wanted_.data(), static_cast<int64_t>(wanted_.size()), deadline);
  size_t num_left = 0;
  for (size_t i = 0; i < waiting_.size(); ++i) {
    if (wanted_[i].words != nullptr) {
      items_.push_back({waiting_[i], wanted_[i].words});
    } else {
      wanted_[num_left] = wanted_[i];
      waiting_[num_left++] = waiting_[i];
    }
  }
  wanted_.resize(num_left);
  waiting_.resize(num_left);
}

void Runner::run_items(const float* logits, bool with_scores) {
  struct Args {
    Runner* runner;
    const float* logits;
  } args{this, logits};
  num_scores_ = with_scores ? static_cast<int64_t>(output_.scored.size()) : 0;
  sampling_failed_.store(false);
  const Phase phase{num_scores_ + static_cast<int64_t>(items_.size()),
                    [](const void* self, int64_t item, void*) {
                      const auto& args = *static_cast<const Args*>(self);
                      args.runner->run_item(item, args.logits);
                    },
                    &args};
  if (phase.num_items > 0) team_.run(&phase, 1);
  items_.clear();
  if (sampling_failed_.load()) throw std::runtime_error("sampling failed: out of memory");
}

void Runner::run_item(int64_t item, const float* logits) {
  static thread_local SamplerScratch scratch;
  const auto row_of = [&](int64_t row) { return logits + row * limits_.vocab_size; };
  try {
    if (item < num_scores_) {
      const auto num_asking = static_cast<int64_t>(rows_.asking().size());
      score_row(rows_.score_args(rows_.scored()[item], row_of(num_asking + item)), scratch,
                output_.scored[item]);
      return;
    }
    const Item& found = items_[item - num_scores_];
    const AskingRow& asking = rows_.asking()[found.row];
    OutputRow& row = output_.rows[found.row];
    sample_row(rows_.sample_args(asking, row_of(found.row), found.mask), scratch, row.sampled);
    row.has_logprobs = rows_.sampling(asking.row).num_logprobs >= 0;
    row.is_deferred = false;
  } catch (const std::exception&) {  // no exception may leave a thread of the team
    sampling_failed_.store(true);
  }
}

}  // namespace streamkv
