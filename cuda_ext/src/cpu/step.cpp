#include "streamkv/step.h"

#include <algorithm>
#include <stdexcept>

namespace streamkv {
namespace {

constexpr std::string_view kStepMagic = "SKI3";
constexpr std::string_view kOutputMagic = "SKO3";

// Takes one thing after another off a message.
class Reader {
 public:
  explicit Reader(std::string_view message) : message_(message) {}

  const char* take(int64_t num_bytes) {
    const auto num_left = static_cast<int64_t>(message_.size()) - offset_;
    if (num_bytes < 0 || num_bytes > num_left)
      throw std::invalid_argument("step message: expected " + std::to_string(num_bytes) +
                                  " bytes at " + std::to_string(offset_) + ", got " +
                                  std::to_string(num_left));
    const char* data = message_.data() + offset_;
    offset_ += num_bytes;
    return data;
  }

  template <class T>
  T number() {
    T value;
    memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }

  template <class T = int32_t>
  PackedArray<T> array(int64_t size) {
    return {take(size * static_cast<int64_t>(sizeof(T))), size};
  }

  void end() const {
    if (offset_ != static_cast<int64_t>(message_.size()))
      throw std::invalid_argument("step message: expected its end at " + std::to_string(offset_) +
                                  ", got " + std::to_string(message_.size()) + " bytes");
  }

 private:
  std::string_view message_;
  int64_t offset_ = 0;
};

RowAdded read_added(Reader& reader) {
  RowAdded added{};
  added.row = reader.number<int32_t>();
  added.num_prompt_tokens = reader.number<int32_t>();
  const auto num_tokens = reader.number<int32_t>();
  const auto num_blocks = reader.number<int32_t>();
  const auto num_stop_ids = reader.number<int32_t>();
  const auto num_biases = reader.number<int32_t>();
  SamplingParams& sampling = added.sampling;
  sampling.choice = reader.number<int32_t>();
  sampling.min_tokens = reader.number<int32_t>();
  sampling.num_logprobs = reader.number<int32_t>();
  sampling.top_k = reader.number<int32_t>();
  const auto num_allowed = reader.number<int32_t>();
  const auto num_bad_words = reader.number<int32_t>();
  sampling.mask_slot = reader.number<int32_t>();
  sampling.num_prompt_logprobs = reader.number<int32_t>();
  sampling.seed = reader.number<int64_t>();
  sampling.temperature = reader.number<double>();
  sampling.top_p = reader.number<double>();
  sampling.min_p = reader.number<double>();
  sampling.presence_penalty = reader.number<double>();
  sampling.frequency_penalty = reader.number<double>();
  sampling.repetition_penalty = reader.number<double>();
  added.token_ids = reader.array(num_tokens);
  added.block_ids = reader.array(num_blocks);
  added.min_tokens_stop_ids = reader.array(num_stop_ids);
  added.bias_ids = reader.array(num_biases);
  added.bias_values = reader.array<float>(num_biases);
  added.allowed_ids = reader.array(num_allowed);
  added.bad_words = reader.array(num_bad_words);
  return added;
}

template <class T>
void append(std::string& message, T value) {
  message.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

template <class T>
void append(std::string& message, const std::vector<T>& values) {
  if (!values.empty())
    message.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

void append_logprobs(std::string& message, const SampledRow& row) {
  append(message, static_cast<int32_t>(row.top_ids.size()));
  append(message, row.rank);
  append<double>(message, row.logprob);
  append(message, row.top_ids);
  append(message, row.top_logprobs);
}

bool has_logprobs(const OutputRow& row) {
  return row.has_logprobs && !row.sampled.failed && !row.is_deferred;
}

void append_no_logprobs(std::string& message) {
  append<int32_t>(message, -1);
  append<int32_t>(message, 0);
  append<double>(message, 0);
}

}  // namespace

StepInput parse_step(std::string_view message) {
  Reader reader(message);
  const std::string_view magic(reader.take(4), 4);
  if (magic != kStepMagic)
    throw std::invalid_argument("step message: expected it to begin with " +
                                std::string(kStepMagic) + "; is the other side of this version?");
  StepInput step;
  const int64_t num_removed = reader.number<int32_t>();
  step.step_id = reader.number<int64_t>();
  const int64_t num_added = reader.number<int32_t>();
  const int64_t num_appended = reader.number<int32_t>();
  const int64_t num_copies = reader.number<int32_t>();
  const int64_t num_scheduled = reader.number<int32_t>();
  step.removed = reader.array(num_removed);
  step.appended = reader.array(2 * num_appended);
  step.copies = reader.array(4 * num_copies);
  step.scheduled = reader.array(4 * num_scheduled);
  // Each takes its bytes off the message, so a wrong number can't make this long.
  for (int64_t i = 0; i < num_added; ++i) step.added.push_back(read_added(reader));
  reader.end();
  return step;
}

int64_t step_id_of(std::string_view message) {
  int64_t step_id = -1;
  if (message.size() >= 16 && message.substr(0, 4) == kStepMagic)
    memcpy(&step_id, message.data() + 8, sizeof(step_id));
  return step_id;
}

std::string write_output(const StepOutput& output) {
  const bool with_logprobs = std::any_of(output.rows.begin(), output.rows.end(), has_logprobs);
  std::vector<int32_t> tokens, failed, deferred;
  for (const OutputRow& row : output.rows) {
    if (row.sampled.failed) failed.push_back(static_cast<int32_t>(tokens.size()));
    if (row.is_deferred) deferred.push_back(static_cast<int32_t>(tokens.size()));
    tokens.push_back(row.sampled.token_id);
  }
  std::string message(kOutputMagic);
  append(message, static_cast<int32_t>(tokens.size()));
  append(message, output.step_id);
  append(message, output.duration_s);
  append(message, output.copies_s);
  append(message, static_cast<int32_t>(failed.size()));
  append(message, static_cast<int32_t>(deferred.size()));
  append(message, static_cast<int32_t>(with_logprobs ? tokens.size() : 0));
  append(message, static_cast<int32_t>(output.scored.size()));
  append(message, static_cast<int32_t>(output.copies_done.size()));
  append<int32_t>(message, 0);  // of copies that failed: those in neither list have, with an error
  append(message, static_cast<int32_t>(output.error.size()));
  append<int32_t>(message, 0);
  append(message, tokens);
  append(message, failed);
  append(message, deferred);
  append(message, output.copies_done);
  if (with_logprobs)
    for (const OutputRow& row : output.rows)
      has_logprobs(row) ? append_logprobs(message, row.sampled) : append_no_logprobs(message);
  for (const SampledRow& row : output.scored) append_logprobs(message, row);
  message += output.error;
  return message;
}

}  // namespace streamkv
