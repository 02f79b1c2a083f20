// Which tokens a row may get next: bits over the vocabulary, bit i % 32 of word i / 32.
//
// Masks are applied from the strongest to the weakest. One that would leave no token isn't applied:
// the weaker yields, and there is always something to choose.
#pragma once

#include <stdint.h>

#include <vector>

#include "streamkv/sampler.h"

namespace streamkv {

constexpr int64_t num_mask_words(int64_t vocab_size) { return (vocab_size + 31) / 32; }

// The bits of these, but for those that the vocabulary doesn't have.
std::vector<int32_t> mask_of(const std::vector<int32_t>& token_ids, int64_t vocab_size);

// Whether any of a row's masks may hold.
bool has_masks(const SampleArgs& args);

// What the row's masks leave, in scratch.allowed: its grammar's, its allowed tokens, bad words, and
// the stop tokens while min_tokens aren't reached, in this order.
void find_allowed(const SampleArgs& args, SamplerScratch& scratch);

inline bool is_allowed(const std::vector<int32_t>& words, int64_t token_id) {
  return (static_cast<uint32_t>(words[token_id / 32]) >> (token_id % 32) & 1) != 0;
}

// The ids of the bits, ascending, and how many; -1 if there are more than `limit`. `token_ids` has
// room for limit + 64.
int64_t list_allowed(const std::vector<int32_t>& words, int64_t limit, int32_t* token_ids);

}  // namespace streamkv
