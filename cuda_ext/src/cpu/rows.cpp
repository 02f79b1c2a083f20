#include "streamkv/rows.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "streamkv/token_mask.h"

namespace streamkv {
namespace {

using std::to_string;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();

void check_count(const char* what, int64_t value, int64_t limit = kLimit) {
  if (value < 1 || value > limit)
    throw std::invalid_argument(std::string("Rows: ") + what + ": expected 1 to " +
                                to_string(limit) + ", got " + to_string(value));
}

RowsShape checked(const RowsShape& shape) {
  constexpr int64_t kMaxRows = int64_t{1} << 20;  // with the longest contexts nothing overflows
  check_count("num_rows", shape.num_rows, kMaxRows);
  check_count("max_model_len", shape.max_model_len);
  check_count("block_size", shape.block_size);
  check_count("num_blocks", shape.num_blocks);
  check_count("vocab_size", shape.vocab_size);
  check_count("max_tokens", shape.max_tokens);
  if (shape.max_scored != 0) check_count("max_scored", shape.max_scored);
  if (shape.num_blocks > kLimit / shape.block_size || shape.max_model_len >= kLimit)
    throw std::invalid_argument("Rows: " + to_string(shape.num_blocks) + " blocks of " +
                                to_string(shape.block_size) + " tokens and a context of " +
                                to_string(shape.max_model_len) + ": expected less than 2^31");
  return shape;
}

// Of every `stride`-th value from `first` on.
void check_range(const std::string& what, const PackedInts& values, int64_t end, int64_t first = 0,
                 int64_t stride = 1) {
  int64_t low = 0, high = 0;
  for (int64_t i = first; i < values.size(); i += stride) {
    const int64_t value = values[i];
    low = i == first ? value : std::min(low, value);
    high = i == first ? value : std::max(high, value);
  }
  if (low < 0 || high >= end)
    throw std::invalid_argument(what + ": expected 0 .. " + to_string(end - 1) + ", got " +
                                to_string(low) + " .. " + to_string(high));
}

// NaN is in no range.
bool in_range(double value, double low, double high) { return value >= low && value <= high; }

// The ranges of protocol.SamplingParams, for which the sampler is written.
void check_sampling(const RowAdded& added) {
  const SamplingParams& sampling = added.sampling;
  bool is_valid = in_range(sampling.temperature, 0, 100) && in_range(sampling.top_p, 0, 1) &&
                  in_range(sampling.min_p, 0, 1) && in_range(sampling.presence_penalty, -2, 2) &&
                  in_range(sampling.frequency_penalty, -2, 2) &&
                  in_range(sampling.repetition_penalty, 0, 100) && sampling.top_p > 0 &&
                  sampling.repetition_penalty > 0 && sampling.top_k >= 0 &&
                  sampling.min_tokens >= 0 && sampling.num_logprobs >= -1 &&
                  sampling.num_prompt_logprobs >= -1;
  for (int64_t i = 0; i < added.bias_values.size(); ++i)
    is_valid = is_valid && in_range(added.bias_values[i], -100, 100);
  if (!is_valid)
    throw std::invalid_argument("row " + to_string(added.row) +
                                ": expected sampling parameters in the ranges of SamplingParams");
}

void check_mask_slot(const RowAdded& added, const MaskBoard* masks) {
  const int32_t slot = added.sampling.mask_slot;
  if (slot != -1 && (masks == nullptr || !masks->has(slot)))
    throw std::invalid_argument("row " + to_string(added.row) +
                                ": expected a slot that is on the mask board, got " +
                                to_string(slot));
}

// Words of which every token is known, as they were packed.
std::vector<int32_t> known_words(const RowAdded& added, int64_t vocab_size) {
  std::vector<int32_t> known;
  const PackedInts& packed = added.bad_words;
  for (int64_t at = 0; at < packed.size();) {
    const int64_t length = packed[at], first = at + 1;
    if (length < 1 || length > packed.size() - first)
      throw std::invalid_argument("row " + to_string(added.row) + ": bad words: expected 1 to " +
                                  to_string(packed.size() - first) + " tokens at " +
                                  to_string(at) + ", got " + to_string(length));
    const size_t num_before = known.size();
    bool is_known = true;
    known.push_back(static_cast<int32_t>(length));
    for (int64_t i = first; i < first + length; ++i) {
      is_known = is_known && packed[i] >= 0 && packed[i] < vocab_size;
      known.push_back(packed[i]);
    }
    if (!is_known) known.resize(num_before);
    at = first + length;
  }
  return known;
}

}  // namespace

Rows::Rows(const RowsShape& shape, const MaskBoard* masks)
    : shape_(checked(shape)),
      masks_(masks),
      table_width_(ceil_div(shape.max_model_len, shape.block_size)),
      tokens_(shape.num_rows * (shape.max_model_len + 1) * static_cast<int64_t>(sizeof(int32_t))),
      block_tables_(shape.num_rows * table_width_ * static_cast<int64_t>(sizeof(int32_t))),
      rows_(shape.num_rows) {}

int32_t* Rows::tokens(int64_t row) const {
  return static_cast<int32_t*>(tokens_.data()) + row * (shape_.max_model_len + 1);
}

int32_t* Rows::block_table(int64_t row) const {
  return static_cast<int32_t*>(block_tables_.data()) + row * table_width_;
}

// --- changes ------------------------------------------------------------------------------------

void Rows::apply(const StepInput& step) {
  asking_.clear();
  scored_.clear();
  check_range("removed rows", step.removed, shape_.num_rows);
  check_range("appended rows", step.appended, shape_.num_rows, 0, 2);
  for (int64_t i = 0; i < step.removed.size(); ++i) rows_[step.removed[i]] = Row{};
  for (const RowAdded& added : step.added) add(added);
  for (int64_t i = 0; i < step.appended.size(); i += 2)
    append(step.appended[i], step.appended[i + 1]);
}

void Rows::add(const RowAdded& added) {
  if (added.row < 0 || added.row >= shape_.num_rows)
    throw std::invalid_argument("added row " + to_string(added.row) + ": expected 0 .. " +
                                to_string(shape_.num_rows - 1));
  const std::string name = "row " + to_string(added.row);
  const int64_t num_tokens = added.token_ids.size(), num_blocks = added.block_ids.size();
  check_range(name + ": token ids", added.token_ids, shape_.vocab_size);
  check_range(name + ": block ids", added.block_ids, shape_.num_blocks);
  if (num_tokens > shape_.max_model_len + 1 || num_blocks > table_width_)
    throw std::invalid_argument(name + ": " + to_string(num_tokens) + " tokens in " +
                                to_string(num_blocks) + " blocks don't fit");
  if (added.num_prompt_tokens < 0 || added.num_prompt_tokens > num_tokens)
    throw std::invalid_argument(name + ": expected at most " + to_string(num_tokens) +
                                " prompt tokens, got " + to_string(added.num_prompt_tokens));
  check_sampling(added);
  check_mask_slot(added, masks_);
  Row& row = rows_[added.row];
  row.sampling = sampling_of(added);
  row.deferred_at = -1;
  row.num_tokens = num_tokens;
  row.num_prompt_tokens = added.num_prompt_tokens;
  row.num_blocks = num_blocks;
  added.token_ids.copy_to(tokens(added.row));
  added.block_ids.copy_to(block_table(added.row));
  std::fill(block_table(added.row) + num_blocks, block_table(added.row) + table_width_, 0);
}

SamplingParams Rows::sampling_of(const RowAdded& added) const {
  // A token that the vocabulary doesn't have is never sampled: masking it is done.
  const auto is_known = [this](int32_t id) { return id >= 0 && id < shape_.vocab_size; };
  SamplingParams sampling = added.sampling;
  for (int64_t i = 0; i < added.min_tokens_stop_ids.size(); ++i)
    if (const int32_t id = added.min_tokens_stop_ids[i]; is_known(id))
      sampling.min_tokens_stop_ids.push_back(id);
  for (int64_t i = 0; i < added.bias_ids.size(); ++i)
    if (const int32_t id = added.bias_ids[i]; is_known(id)) {
      sampling.bias_ids.push_back(id);
      sampling.bias_values.push_back(added.bias_values[i]);
    }
  if (added.allowed_ids.size() > 0) {
    std::vector<int32_t> allowed_ids(added.allowed_ids.size());
    added.allowed_ids.copy_to(allowed_ids.data());
    sampling.allowed = mask_of(allowed_ids, shape_.vocab_size);
  }
  sampling.bad_words = known_words(added, shape_.vocab_size);
  return sampling;
}

void Rows::append(int32_t row, int32_t block_id) {
  const int64_t place = rows_[row].num_blocks;
  if (block_id < 0 || block_id >= shape_.num_blocks || place == table_width_)
    throw std::invalid_argument("row " + to_string(row) + " can't take block " +
                                to_string(block_id) + " as its number " + to_string(place));
  block_table(row)[place] = block_id;
  rows_[row].num_blocks = place + 1;
}

// --- batches ------------------------------------------------------------------------------------

const BatchArrays& Rows::batch(const PackedInts& scheduled) {
  asking_.clear();
  scored_.clear();
  check_scheduled(scheduled);
  size_batch(scheduled);
  int64_t num_tokens = 0;
  for (int64_t i = 0; i < scheduled.size(); i += 4) {
    const int32_t row = scheduled[i];
    const int64_t start = scheduled[i + 1], count = scheduled[i + 2], end = start + count;
    fill_tokens(row, start, count, num_tokens);
    num_tokens += count;
    batch_.query_start[i / 4 + 1] = static_cast<int32_t>(num_tokens);
    batch_.context_lens[i / 4] = static_cast<int32_t>(end);
    std::copy_n(block_table(row), batch_.max_blocks,
                batch_.block_tables.data() + i / 4 * batch_.max_blocks);
    if ((scheduled[i + 3] & kAskSample) == 0) continue;
    batch_.logit_rows.push_back(static_cast<int32_t>(num_tokens - 1));
    ask(row, end);
  }
  for (int64_t i = 0; i < scheduled.size(); i += 4) {
    const int32_t row = scheduled[i];
    const int64_t start = scheduled[i + 1], end = start + scheduled[i + 2];
    const int64_t num_scored = count_scored(row, start, end, scheduled[i + 3]);
    for (int64_t j = 0; j < num_scored; ++j) {
      batch_.logit_rows.push_back(batch_.query_start[i / 4] + static_cast<int32_t>(j));
      scored_.push_back({row, static_cast<int32_t>(start + j + 1)});
    }
  }
  return batch_;
}

void Rows::ask(int32_t index, int64_t position) {
  Row& row = rows_[index];
  if (row.deferred_at == position) {
    row.deferred_at = -1;
    row.num_tokens = position;
  }
  asking_.push_back({index, static_cast<int32_t>(position), row.deferred_at >= 0});
}

// Tokens of the prompt that follow the positions computed.
int64_t Rows::count_scored(int32_t row, int64_t start, int64_t end, int32_t asks) const {
  if ((asks & kAskScore) == 0) return 0;
  return std::max<int64_t>(0, std::min(end, rows_[row].num_prompt_tokens - 1) - start);
}

// Throws unless every scheduled token and its block is known, and each row comes once.
void Rows::check_scheduled(const PackedInts& scheduled) {
  check_range("scheduled rows", scheduled, shape_.num_rows, 0, 4);
  int64_t num_tokens = 0, num_scored = 0;
  ++num_batches_;
  for (int64_t i = 0; i < scheduled.size(); i += 4) {
    const int32_t row = scheduled[i], asks = scheduled[i + 3];
    const int64_t start = scheduled[i + 1], count = scheduled[i + 2];
    check_known(row, start, start + count);
    if (asks < 0 || asks > kAskAll)
      throw std::invalid_argument("row " + to_string(row) + ": expected to ask 0 to 3, got " +
                                  to_string(asks));
    if ((asks & kAskScore) != 0 && rows_[row].sampling.num_prompt_logprobs < 0)
      throw std::invalid_argument("row " + to_string(row) +
                                  " asks for scores: expected num_prompt_logprobs from 0, got -1");
    num_scored += count_scored(row, start, start + count, asks);
    if (rows_[row].last_batch == num_batches_)
      throw std::invalid_argument("row " + to_string(row) + " is scheduled twice");
    rows_[row].last_batch = num_batches_;
    num_tokens += count;
  }
  if (num_tokens > shape_.max_tokens)
    throw std::invalid_argument("expected at most " + to_string(shape_.max_tokens) +
                                " tokens in a step, got " + to_string(num_tokens));
  if (num_scored > shape_.max_scored)
    throw std::invalid_argument("expected at most " + to_string(shape_.max_scored) +
                                " tokens of prompts to score in a step, got " +
                                to_string(num_scored));
}

void Rows::check_known(int32_t index, int64_t start, int64_t end) const {
  const Row& row = rows_[index];
  const bool is_known = start >= 0 && end > start && end <= row.num_tokens &&
                        end <= row.num_blocks * shape_.block_size;
  if (is_known && end <= shape_.max_model_len) return;
  const std::string scheduled = "row " + to_string(index) + ": positions " + to_string(start) +
                                " to " + to_string(end) + " are scheduled, ";
  if (is_known)
    throw std::invalid_argument(scheduled + "the context ends at " +
                                to_string(shape_.max_model_len));
  throw std::invalid_argument(scheduled + "known are " + to_string(row.num_tokens) +
                              " tokens in " + to_string(row.num_blocks) + " blocks");
}

void Rows::size_batch(const PackedInts& scheduled) {
  const int64_t num_rows = scheduled.size() / 4;
  int64_t num_tokens = 0, max_context = 0;
  for (int64_t i = 0; i < scheduled.size(); i += 4) {
    num_tokens += scheduled[i + 2];
    max_context = std::max<int64_t>(max_context, int64_t{scheduled[i + 1]} + scheduled[i + 2]);
  }
  batch_.max_blocks = ceil_div(max_context, shape_.block_size);
  batch_.token_ids.resize(num_tokens);
  batch_.positions.resize(num_tokens);
  batch_.slots.resize(num_tokens);
  batch_.query_start.assign(num_rows + 1, 0);
  batch_.context_lens.resize(num_rows);
  batch_.block_tables.resize(num_rows * batch_.max_blocks);
  batch_.logit_rows.clear();
}

void Rows::fill_tokens(int32_t row, int64_t start, int64_t count, int64_t first_token) {
  const int32_t* table = block_table(row);
  std::copy_n(tokens(row) + start, count, batch_.token_ids.data() + first_token);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = start + i;
    const int64_t block = table[position / shape_.block_size];
    batch_.positions[first_token + i] = static_cast<int32_t>(position);
    batch_.slots[first_token + i] =
        static_cast<int32_t>(block * shape_.block_size + position % shape_.block_size);
  }
}

// --- sampling -----------------------------------------------------------------------------------

SampleArgs Rows::sample_args(const AskingRow& asking, const float* logits,
                             const int32_t* mask) const {
  const Row& row = rows_[asking.row];
  return {logits,          shape_.vocab_size,     &row.sampling, tokens(asking.row),
          asking.position, row.num_prompt_tokens, mask};
}

ScoreArgs Rows::score_args(const ScoredToken& scored, const float* logits) const {
  return {logits, shape_.vocab_size, tokens(scored.row)[scored.position],
          rows_[scored.row].sampling.num_prompt_logprobs};
}

void Rows::keep(const AskingRow& asking, int32_t token_id) {
  if (token_id < 0 || token_id >= shape_.vocab_size)
    throw std::runtime_error("row " + to_string(asking.row) + ": expected a token below " +
                             to_string(shape_.vocab_size) + ", got " + to_string(token_id));
  tokens(asking.row)[asking.position] = token_id;
  rows_[asking.row].num_tokens = asking.position + 1;
}

void Rows::defer(const AskingRow& asking) {
  keep(asking, 0);  // any token: what a step computes of it is void
  if (!asking.is_void) rows_[asking.row].deferred_at = asking.position;
}

}  // namespace streamkv
