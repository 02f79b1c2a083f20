// Steps and their outputs as messages of bytes. The layout stands in streamkv/step_bytes.py.
//
// A message comes from outside, so every length in it is checked against its end before anything
// is read; what the numbers mean is checked by Rows.
#pragma once

#include <stdint.h>
#include <string.h>

#include <bit>
#include <string>
#include <string_view>
#include <vector>

#include "streamkv/sampler.h"

namespace streamkv {

static_assert(std::endian::native == std::endian::little, "messages are copied, not converted");

// Numbers of 4 bytes inside a message, at any address.
template <class T>
class PackedArray {
 public:
  PackedArray() = default;
  PackedArray(const char* data, int64_t size) : data_(data), size_(size) {}

  int64_t size() const { return size_; }
  T operator[](int64_t index) const {
    T value;
    memcpy(&value, data_ + index * sizeof(T), sizeof(T));
    return value;
  }
  void copy_to(T* target) const {
    if (size_ > 0) memcpy(target, data_, size_ * sizeof(T));
  }

 private:
  const char* data_ = nullptr;
  int64_t size_ = 0;
};

using PackedInts = PackedArray<int32_t>;
using PackedFloats = PackedArray<float>;

struct RowAdded {
  int32_t row;
  int32_t num_prompt_tokens;
  PackedInts token_ids;
  PackedInts block_ids;
  SamplingParams sampling;  // its lists are empty: Rows fills them from these
  PackedInts min_tokens_stop_ids;
  PackedInts bias_ids;
  PackedFloats bias_values;  // as many as bias_ids
  PackedInts allowed_ids;
  PackedInts bad_words;
};

// Points into the message it was read from.
struct StepInput {
  int64_t step_id = -1;
  PackedInts removed;    // [n]
  PackedInts appended;   // [n, 2] flat: (row, block)
  PackedInts copies;     // [n, 4] flat: (number, CopyKind, source, target)
  PackedInts scheduled;  // [n, 4] flat: (row, start, count, Ask)
  std::vector<RowAdded> added;
};

// What a row wants from a step, bit by bit.
enum Ask : int32_t { kAskNone = 0, kAskSample = 1, kAskScore = 2, kAskAll = 3 };

struct OutputRow {
  SampledRow sampled;
  bool has_logprobs;
  bool is_deferred;  // it has no token
};

struct StepOutput {
  int64_t step_id = -1;
  double duration_s = 0;
  double copies_s = 0;               // what the copies took of it
  std::vector<OutputRow> rows;       // those that asked for a token, in the order scheduled
  std::vector<SampledRow> scored;    // tokens of prompts, in that order, then by position
  std::vector<int32_t> copies_done;  // numbers of copies that are made, though there is an error
  std::string error;                 // not empty: nothing was sampled
};

// Throws std::invalid_argument for a message that is not one step from end to end.
StepInput parse_step(std::string_view message);

// The id alone, -1 if there is none: to say which step a broken message was.
int64_t step_id_of(std::string_view message);

std::string write_output(const StepOutput& output);
constexpr int64_t kOutputStepIdAt = 8;  // where its step_id stands

}  // namespace streamkv
