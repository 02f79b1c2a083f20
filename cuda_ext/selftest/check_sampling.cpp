// The loops of sampling against plain ones, and whole rows against sorting everything.
#include <math.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "selftest.h"
#include "streamkv/sampler.h"
#include "streamkv/token_mask.h"

namespace streamkv::selftest {

namespace {

constexpr float kInfinity = INFINITY;

std::vector<float> logits_of(Random& random, int64_t n, bool with_ties) {
  std::vector<float> x = random.uniforms(n);
  for (float& logit : x) logit = with_ties ? roundf(logit * 8.0f) / 2.0f : logit * 6.0f;
  if (n > 4) x[random.below(n)] = -kInfinity;
  return x;
}

int64_t plain_argmax(const std::vector<float>& x) {
  int64_t best = -1;
  for (size_t i = 0; i < x.size(); ++i) {
    if (isnan(x[i]) || x[i] == kInfinity) return -1;
    if (x[i] > (best < 0 ? -kInfinity : x[best])) best = static_cast<int64_t>(i);
  }
  return best;
}

void check_argmax(Report& report, Random& random, int64_t n) {
  const auto argmax = kernels().sampling.argmax;
  const std::string what = "argmax of " + std::to_string(n);
  std::vector<float> x = logits_of(random, n, true);
  report.expect(argmax(x.data(), n) == plain_argmax(x), what);
  const int64_t at = random.below(n);
  const float before = x[at];
  for (const float special : {NAN, -NAN, kInfinity, -kInfinity, 99.0f, -0.0f}) {
    x[at] = special;
    report.expect(argmax(x.data(), n) == plain_argmax(x), what + " with a special number");
  }
  x[at] = before;
  x.assign(n, -kInfinity);
  report.expect(argmax(x.data(), n) == -1, what + ", all -infinity");
}

void check_sum_exp(Report& report, Random& random, int64_t n) {
  const std::vector<float> x = logits_of(random, n, false);
  for (const float factor : {0.01f, 1.0f, 30.0f}) {
    double expected = 0.0;
    for (const float logit : x) expected += exp((static_cast<double>(logit) - 6.0) * factor);
    const double got = kernels().sampling.sum_exp(x.data(), n, 6.0f, factor);
    // The argument of exp is rounded to float32.
    const double tolerance = expected * 1e-5 + static_cast<double>(n) * 1e-37;
    report.expect(fabs(got - expected) <= tolerance, "sum_exp of " + std::to_string(n));
  }
}

void check_selection(Report& report, Random& random, int64_t n) {
  const SamplingKernels& loops = kernels().sampling;
  const std::vector<float> x = logits_of(random, n, true);
  const std::string what = " of " + std::to_string(n);
  for (const float low : {-kInfinity, -1.0f, 1.5f, 3.5f, 9.0f}) {
    std::vector<int32_t> indices;
    std::vector<float> values, between;
    for (int64_t i = 0; i < n; ++i) {
      if (x[i] >= low && x[i] < 3.0f) between.push_back(x[i]);
      if (!(x[i] >= low)) continue;
      indices.push_back(static_cast<int32_t>(i));
      values.push_back(x[i]);
    }
    const int64_t count = static_cast<int64_t>(values.size());
    report.expect(loops.count_at_least(x.data(), n, low) == count, "count_at_least" + what);
    for (const int64_t capacity : {n, count, count / 2}) {
      const int64_t kept = std::min(count, capacity);
      Guarded found(capacity * 4), at(capacity * 4);
      report.expect(loops.collect_at_least(x.data(), n, low, at.as<int32_t>(), found.as<float>(),
                                           capacity) == kept &&
                        std::equal(values.begin(), values.begin() + kept, found.as<float>()) &&
                        std::equal(indices.begin(), indices.begin() + kept, at.as<int32_t>()) &&
                        found.is_intact() && at.is_intact(),
                    "collect_at_least" + what);
    }
    Guarded found(n * 4);
    report.expect(loops.collect_between(x.data(), n, low, 3.0f, found.as<float>()) ==
                          static_cast<int64_t>(between.size()) &&
                      std::equal(between.begin(), between.end(), found.as<float>()) &&
                      found.is_intact(),
                  "collect_between" + what);
  }
}

// Together the groups have the maximum, and the k-th of theirs is no higher than the k-th of all.
void check_group_maxima(Report& report, Random& random, int64_t n) {
  std::vector<float> x = logits_of(random, n, false);
  for (const int64_t size : {1, 2, 3, 10, 1000}) {
    Guarded maxima((n / size + 32) * 4);
    const int64_t count = kernels().sampling.group_maxima(x.data(), n, size, maxima.as<float>());
    std::vector<float> found(maxima.as<float>(), maxima.as<float>() + count);
    std::vector<float> sorted = x;
    std::sort(sorted.begin(), sorted.end(), std::greater<float>());
    std::sort(found.begin(), found.end(), std::greater<float>());
    bool holds = maxima.is_intact() && count * size >= n && found[0] == sorted[0];
    for (size_t i = 0; holds && i < std::min(found.size(), sorted.size()); ++i)
      holds = found[i] <= sorted[i];
    report.expect(holds, "group_maxima of " + std::to_string(n) + " by " + std::to_string(size));
  }
}

// About one bit in `rarity`.
std::vector<int32_t> random_bits(Random& random, int64_t n, int64_t rarity) {
  std::vector<int32_t> token_ids;
  for (int64_t i = 0; i < n; ++i)
    if (random.below(rarity) == 0) token_ids.push_back(static_cast<int32_t>(i));
  return mask_of(token_ids, n);
}

void check_mask(Report& report, Random& random, int64_t n) {
  const std::vector<float> x = logits_of(random, n, true);
  for (const int64_t rarity : {1, 2, 40}) {
    const std::vector<int32_t> bits = random_bits(random, n, rarity);
    std::vector<float> expected(x);
    for (int64_t i = 0; i < n; ++i)
      if (!is_allowed(bits, i)) expected[i] = -kInfinity;
    Guarded beside(n * 4), in_place(n * 4);
    memcpy(in_place.as<float>(), x.data(), n * 4);
    kernels().sampling.mask(x.data(), bits.data(), n, beside.as<float>());
    kernels().sampling.mask(in_place.as<float>(), bits.data(), n, in_place.as<float>());
    report.expect(memcmp(beside.as<float>(), expected.data(), n * 4) == 0 &&
                      beside == in_place && beside.is_intact() && in_place.is_intact(),
                  "mask of " + std::to_string(n));
  }
}

// The token by its definition: everything sorted, in double precision.
int32_t plain_sample(const std::vector<float>& x, const SamplingParams& params, double uniform) {
  std::vector<int32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return x[a] > x[b]; });
  std::vector<double> weights(x.size());
  for (size_t i = 0; i < x.size(); ++i)
    weights[i] = exp((static_cast<double>(x[i]) - x[order[0]]) / params.temperature);
  size_t kept = 0;
  while (kept < x.size() && weights[order[kept]] >= params.min_p) ++kept;
  if (params.top_k > 0) kept = std::min(kept, static_cast<size_t>(params.top_k));
  double total = 0.0, running = 0.0;
  for (size_t i = 0; i < kept; ++i) total += weights[order[i]];
  size_t reached = 0;
  while (reached < kept && running < params.top_p * total) running += weights[order[reached++]];
  std::sort(order.begin(), order.begin() + reached);
  double rest = uniform * running;
  for (size_t i = 0; i < reached; ++i) {
    rest -= weights[order[i]];
    if (rest < 0.0) return order[i];
  }
  return order[reached - 1];
}

void check_rows(Report& report, Random& random, int64_t n) {
  const std::vector<float> x = logits_of(random, n, false);  // hardly any are equal
  const int32_t token_ids[] = {0};
  SamplerScratch scratch;
  SampledRow row;
  for (int64_t i = 0; i < 60; ++i) {
    SamplingParams params{};
    params.temperature = i % 2 == 0 ? 1.0 : 0.6;
    params.top_p = i % 3 == 0 ? 1.0 : 0.2 + 0.01 * static_cast<double>(i);
    params.min_p = i % 5 == 0 ? 0.013 : 0.0;
    params.top_k = i % 4 == 0 ? random.below(n) + 1 : 0;
    params.repetition_penalty = 1.0;
    params.num_logprobs = 3;
    params.seed = static_cast<int64_t>(random.bits());
    sample_row({x.data(), n, &params, token_ids, 1, 1}, scratch, row);
    const int32_t expected = plain_sample(x, params, philox_uniform(params.seed, 1, 0));
    report.expect(!row.failed && row.token_id == expected,
                  "sample_row of " + std::to_string(n) + ", case " + std::to_string(i));
    double total = 0.0;
    for (const float logit : x) total += exp(static_cast<double>(logit));
    report.expect(fabs(row.logprob - (x[row.token_id] - log(total))) < 2e-6 &&
                      row.top_ids[0] == plain_argmax(x),
                  "log-probabilities of " + std::to_string(n));
    const SampledRow sampled = row;
    score_row({x.data(), n, row.token_id, 3}, scratch, row);
    report.expect(row.logprob == sampled.logprob && row.rank == sampled.rank &&
                      row.top_ids == sampled.top_ids && row.top_logprobs == sampled.top_logprobs,
                  "score_row of " + std::to_string(n));
  }
}

// `limit` tokens one by one, then words of ones: as many as can be found before it ends.
void check_list_allowed(Report& report) {
  for (const int64_t limit : {1, 31, 64, 100}) {
    std::vector<int32_t> words(2 * limit + 2, -1);
    for (int64_t i = 0; i < 2 * limit; ++i) words[i] = i % 2;
    Guarded ids((limit + 64) * 4);
    const bool holds = list_allowed(words, limit, ids.as<int32_t>()) == -1 && ids.is_intact();
    words.resize(2 * limit);
    report.expect(holds && list_allowed(words, limit, ids.as<int32_t>()) == limit &&
                      ids.as<int32_t>()[limit - 1] == 32 * (2 * limit - 1) && ids.is_intact(),
                  "list_allowed up to " + std::to_string(limit));
  }
}

// As if the vocabulary had none but the allowed tokens, few or many.
void check_masked_rows(Report& report, Random& random, int64_t n) {
  const std::vector<float> x = logits_of(random, n, false);
  const int32_t token_ids[] = {0};
  SamplerScratch scratch;
  SampledRow row;
  for (int64_t i = 0; i < 60; ++i) {
    const std::vector<int32_t> bits = random_bits(random, n, i % 2 == 0 ? 2 : 50);
    std::vector<int32_t> allowed;
    std::vector<float> scores;
    for (int64_t id = 0; id < n; ++id)
      if (is_allowed(bits, id)) {
        allowed.push_back(static_cast<int32_t>(id));
        scores.push_back(x[id]);
      }
    if (allowed.empty()) continue;
    SamplingParams params{};
    params.temperature = i % 3 == 0 ? 0.0 : 0.8;
    params.top_p = i % 4 == 0 ? 0.7 : 1.0;
    params.top_k = i % 5 == 0 ? 20 : 0;
    params.repetition_penalty = 1.0;
    params.num_logprobs = -1;
    params.seed = static_cast<int64_t>(random.bits());
    sample_row({x.data(), n, &params, token_ids, 1, 1, bits.data()}, scratch, row);
    const int64_t expected =
        params.temperature == 0.0
            ? plain_argmax(scores)
            : plain_sample(scores, params, philox_uniform(params.seed, 1, 0));
    report.expect(!row.failed && row.token_id == allowed[expected],
                  "masked row of " + std::to_string(n) + ", case " + std::to_string(i));
  }
}

}  // namespace

void check_sampling(Report& report) {
  Random random(5);
  std::vector<int64_t> lengths = {511, 512, 513, 1000, 4099, 30000};
  for (int64_t n = 1; n < 70; ++n) lengths.push_back(n);
  for (const int64_t n : lengths) {
    check_argmax(report, random, n);
    check_sum_exp(report, random, n);
    check_selection(report, random, n);
    check_group_maxima(report, random, n);
    check_mask(report, random, n);
  }
  for (const int64_t n : {3, 50, 1000, 20000}) check_rows(report, random, n);
  check_list_allowed(report);
  for (const int64_t n : {3, 50, 1000, 20000}) check_masked_rows(report, random, n);
  // The first words that the authors' known answers give for counter and key zero.
  constexpr uint64_t kFirst = 0x6627e8d5, kSecond = 0xe169c58d;
  const uint64_t bits = (kFirst >> 5) << 26 | kSecond >> 6;
  report.expect(philox_uniform(0, 0, 0) == static_cast<double>(bits) * 0x1p-53, "philox_uniform");
}

}  // namespace streamkv::selftest
