// Sampling for tests: rows of logits to tokens, outside of a step. See streamkv/sampler.h.
#include "streamkv/sampler.h"

#include "streamkv/token_mask.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace nb = nanobind;

namespace streamkv {

namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

struct Row {
  SamplingParams params;
  std::vector<int32_t> token_ids;
  int64_t num_prompt_tokens;
  std::vector<int32_t> mask;  // bits; empty: none
};

void check_ids(const char* what, const std::vector<int32_t>& ids, int64_t vocab_size) {
  for (const int32_t id : ids)
    if (id < 0 || id >= vocab_size)
      throw std::invalid_argument(std::string("sample_rows: ") + what + ": expected 0 .. " +
                                  std::to_string(vocab_size - 1) + ", got " + std::to_string(id));
}

void check_bad_words(const std::vector<int32_t>& words, int64_t vocab_size) {
  for (size_t at = 0; at < words.size();) {
    const size_t num_left = words.size() - at - 1;
    if (words[at] < 1 || static_cast<size_t>(words[at]) > num_left)
      throw std::invalid_argument("sample_rows: bad_words: expected 1 to " +
                                  std::to_string(num_left) + " tokens, got " +
                                  std::to_string(words[at]));
    const auto first = words.begin() + static_cast<int64_t>(at) + 1;
    check_ids("bad_words", {first, first + words[at]}, vocab_size);
    at += static_cast<size_t>(words[at]) + 1;
  }
}

// The fields of protocol.RowSampling by name, then token_ids, num_prompt_tokens and mask.
Row to_row(nb::dict fields, int64_t vocab_size) {
  Row row;
  SamplingParams& params = row.params;
  const auto set = [&](const char* name, auto& value) {
    value = nb::cast<std::decay_t<decltype(value)>>(fields[name]);
  };
  set("temperature", params.temperature);
  set("top_p", params.top_p);
  set("min_p", params.min_p);
  set("presence_penalty", params.presence_penalty);
  set("frequency_penalty", params.frequency_penalty);
  set("repetition_penalty", params.repetition_penalty);
  set("top_k", params.top_k);
  set("seed", params.seed);
  set("choice", params.choice);
  set("min_tokens", params.min_tokens);
  set("num_logprobs", params.num_logprobs);
  set("min_tokens_stop_ids", params.min_tokens_stop_ids);
  set("bias_ids", params.bias_ids);
  set("bias_values", params.bias_values);
  std::vector<int32_t> allowed_ids;
  set("allowed_ids", allowed_ids);
  set("bad_words", params.bad_words);
  set("token_ids", row.token_ids);
  set("num_prompt_tokens", row.num_prompt_tokens);
  set("mask", row.mask);
  check_ids("min_tokens_stop_ids", params.min_tokens_stop_ids, vocab_size);
  check_ids("bias_ids", params.bias_ids, vocab_size);
  check_ids("token_ids", row.token_ids, vocab_size);
  if (!allowed_ids.empty()) params.allowed = mask_of(allowed_ids, vocab_size);
  check_bad_words(params.bad_words, vocab_size);
  if (!row.mask.empty() && static_cast<int64_t>(row.mask.size()) != num_mask_words(vocab_size))
    throw std::invalid_argument("sample_rows: mask: expected " +
                                std::to_string(num_mask_words(vocab_size)) + " words, got " +
                                std::to_string(row.mask.size()));
  if (params.bias_ids.size() != params.bias_values.size())
    throw std::invalid_argument("sample_rows: expected a bias value for each id");
  if (row.num_prompt_tokens < 0 || row.num_prompt_tokens > (int64_t)row.token_ids.size())
    throw std::invalid_argument("sample_rows: num_prompt_tokens: expected 0 .. " +
                                std::to_string(row.token_ids.size()) + ", got " +
                                std::to_string(row.num_prompt_tokens));
  return row;
}

// (token_id, failed, logprob, rank, top_ids, top_logprobs) of each row.
nb::list sample_rows(Logits logits, nb::list rows) {
  const int64_t vocab_size = (int64_t)logits.shape(1);
  if (logits.shape(0) != rows.size() || vocab_size == 0)
    throw std::invalid_argument("sample_rows: expected logits [" + std::to_string(rows.size()) +
                                ", vocabulary], got [" + std::to_string(logits.shape(0)) + ", " +
                                std::to_string(vocab_size) + "]");
  SamplerScratch scratch;
  SampledRow sampled;
  nb::list result;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row row = to_row(nb::cast<nb::dict>(rows[i]), vocab_size);
    const SampleArgs args{logits.data() + (int64_t)i * vocab_size, vocab_size, &row.params,
                          row.token_ids.data(), (int64_t)row.token_ids.size(),
                          row.num_prompt_tokens, row.mask.empty() ? nullptr : row.mask.data()};
    {
      nb::gil_scoped_release no_gil;
      sample_row(args, scratch, sampled);
    }
    result.append(nb::make_tuple(sampled.token_id, sampled.failed, sampled.logprob, sampled.rank,
                                 sampled.top_ids, sampled.top_logprobs));
  }
  return result;
}

}  // namespace

void bind_sampler(nb::module_& m) {
  m.def("sample_rows", &sample_rows, nb::arg("logits"), nb::arg("rows"),
        "Samples a token for each row of float32 logits [R, V]. A row is a dict of RowSampling's "
        "fields with token_ids, num_prompt_tokens and mask, the words of a grammar's or none.");
  m.def("philox_uniform", &philox_uniform, nb::arg("seed"), nb::arg("position"),
        nb::arg("choice"), "The number in [0, 1) that a token is drawn with.");
}

}  // namespace streamkv
