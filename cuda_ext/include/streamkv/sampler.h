// From a row of logits to a token: edits, masks, filters, the draw, log-probabilities.
//
// Same order and meaning as streamkv/runner/sampler.py, which is its oracle: biases, penalties,
// masks, [greedy: argmax], temperature, min_p, top_k, top_p, draw. A row is computed from its own
// logits and parameters alone.
#pragma once

#include <stdint.h>

#include <vector>

namespace streamkv {

// A row's parameters, fixed while it lives: protocol.RowSampling in numbers.
struct SamplingParams {
  double temperature, top_p, min_p;
  double presence_penalty, frequency_penalty, repetition_penalty;
  int64_t top_k;  // 0: no limit
  int64_t seed;
  int32_t choice;
  int64_t min_tokens;
  int32_t num_logprobs;         // -1: off
  int32_t num_prompt_logprobs;  // -1: off
  int32_t mask_slot;            // -1: none
  // All ids are in the vocabulary.
  std::vector<int32_t> min_tokens_stop_ids;
  std::vector<int32_t> bias_ids;
  std::vector<float> bias_values;
  std::vector<int32_t> allowed;    // bits (token_mask.h); empty: any token is
  std::vector<int32_t> bad_words;  // for each its length from 1 on, then its tokens
};

struct SampleArgs {
  const float* logits;           // [vocab_size], not changed
  int64_t vocab_size;
  const SamplingParams* params;
  const int32_t* token_ids;      // [num_tokens] prompt and output so far
  int64_t num_tokens;            // also the position that the sampled token will have
  int64_t num_prompt_tokens;
  const int32_t* mask = nullptr;  // its grammar's bits for this token
};

// A token that is known.
struct ScoreArgs {
  const float* logits;  // [vocab_size], not changed
  int64_t vocab_size;
  int32_t token_id;
  int32_t num_top;
};

struct SampledRow {
  int32_t token_id;  // 0 if failed
  bool failed;       // the logits were not finite; the rest is 0 and empty
  float logprob;     // from here on 0 and empty unless asked for
  int32_t rank;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
};

// Memory that sampling reuses: one for each thread that samples. Grows to the vocabulary when used.
struct SamplerScratch {
  std::vector<float> scores;         // edited logits
  std::vector<int32_t> counts;       // of tokens; all 0 between calls
  std::vector<int32_t> indices;      // what a filter kept, and its logits
  std::vector<float> values;
  std::vector<float> candidates[2];  // for the last that top_p keeps
  std::vector<double> weights;       // of stretches of the logits
  std::vector<int32_t> allowed;      // bits: what masks leave
  std::vector<int32_t> few_ids;      // the same as ids, where they are few, and their scores
  std::vector<float> few_scores;
  std::vector<int32_t> bad_ends, taken;
};

void sample_row(const SampleArgs& args, SamplerScratch& scratch, SampledRow& out);

// Its log-probability, rank and the `num_top` most likely tokens.
void score_row(const ScoreArgs& args, SamplerScratch& scratch, SampledRow& out);

// Philox4x32-10 (Salmon et al., 2011): a number in [0, 1) of 53 bits; streamkv/runner/philox.py.
double philox_uniform(int64_t seed, int32_t position, int32_t choice);

}  // namespace streamkv
