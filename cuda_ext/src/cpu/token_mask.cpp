#include "streamkv/token_mask.h"

#include <algorithm>
#include <bit>

namespace streamkv {
namespace {

using Words = std::vector<int32_t>;

int32_t bit_of(int64_t token_id) {
  return static_cast<int32_t>(uint32_t{1} << (token_id % 32));
}

void set_all(Words& words, int64_t vocab_size) {
  words.assign(num_mask_words(vocab_size), -1);
  if (vocab_size % 32 != 0) words.back() = static_cast<int32_t>((1u << vocab_size % 32) - 1);
}

bool is_empty(const Words& words) {
  return std::all_of(words.begin(), words.end(), [](int32_t word) { return word == 0; });
}

void keep_only(const int32_t* mask, Words& words) {
  const auto meets = [mask, at = size_t{0}](int32_t word) mutable {
    return (word & mask[at++]) != 0;
  };
  if (std::none_of(words.begin(), words.end(), meets)) return;
  for (size_t i = 0; i < words.size(); ++i) words[i] &= mask[i];
}

void take_away(const Words& token_ids, Words& words, Words& taken) {
  taken.clear();
  for (const int32_t token_id : token_ids) {
    if (!is_allowed(words, token_id)) continue;
    words[token_id / 32] &= ~bit_of(token_id);
    taken.push_back(token_id);
  }
  if (!taken.empty() && is_empty(words))
    for (const int32_t token_id : taken) words[token_id / 32] |= bit_of(token_id);
}

bool must_hold_stop_ids(const SampleArgs& args) {
  return args.num_tokens - args.num_prompt_tokens < args.params->min_tokens &&
         !args.params->min_tokens_stop_ids.empty();
}

// The last tokens of the words whose others the output ends with.
void find_bad_ends(const SampleArgs& args, Words& ends) {
  const Words& bad_words = args.params->bad_words;
  const int64_t num_output = args.num_tokens - args.num_prompt_tokens;
  ends.clear();
  for (size_t at = 0; at < bad_words.size();) {
    const int64_t num_before = bad_words[at] - 1;
    const int32_t* word = bad_words.data() + at + 1;
    if (num_before <= num_output &&
        std::equal(word, word + num_before, args.token_ids + args.num_tokens - num_before))
      ends.push_back(word[num_before]);
    at += bad_words[at] + 1;
  }
}

}  // namespace

std::vector<int32_t> mask_of(const std::vector<int32_t>& token_ids, int64_t vocab_size) {
  Words words(num_mask_words(vocab_size));
  for (const int32_t token_id : token_ids)
    if (token_id >= 0 && token_id < vocab_size) words[token_id / 32] |= bit_of(token_id);
  return words;
}

bool has_masks(const SampleArgs& args) {
  const SamplingParams& params = *args.params;
  return args.mask != nullptr || !params.allowed.empty() || !params.bad_words.empty() ||
         must_hold_stop_ids(args);
}

void find_allowed(const SampleArgs& args, SamplerScratch& scratch) {
  const SamplingParams& params = *args.params;
  Words& words = scratch.allowed;
  set_all(words, args.vocab_size);
  if (args.mask != nullptr) keep_only(args.mask, words);
  if (!params.allowed.empty()) keep_only(params.allowed.data(), words);
  if (!params.bad_words.empty()) {
    find_bad_ends(args, scratch.bad_ends);
    take_away(scratch.bad_ends, words, scratch.taken);
  }
  if (must_hold_stop_ids(args)) take_away(params.min_tokens_stop_ids, words, scratch.taken);
}

int64_t list_allowed(const std::vector<int32_t>& words, int64_t limit, int32_t* token_ids) {
  int64_t count = 0;
  const auto num_words = static_cast<int64_t>(words.size());
  for (int64_t i = 0; i < num_words; i += 2) {
    uint64_t rest = static_cast<uint32_t>(words[i]);
    if (i + 1 < num_words) rest |= uint64_t{static_cast<uint32_t>(words[i + 1])} << 32;
    for (; rest != 0; rest &= rest - 1)
      token_ids[count++] = static_cast<int32_t>(32 * i) + std::countr_zero(rest);
    if (count > limit) return -1;
  }
  return count;
}

}  // namespace streamkv
