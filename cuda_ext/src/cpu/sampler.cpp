// Sampling without sorting the vocabulary.
//
// Each filter comes down to one number that a logit must reach: "the least float whose ... is
// enough", found exactly by bisection over the floats, since all that filters compare (scaled
// logits, log-probabilities) is a monotone function of the logit, rounding included. So tokens that
// tie are kept or dropped together. What a filter has to know of the vocabulary (the k-th greatest,
// where top_p is reached) is looked for among few candidates that the vector loops collect.
#include "streamkv/sampler.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "streamkv/kernels.h"
#include "streamkv/token_mask.h"

namespace streamkv {

namespace {

constexpr double kGreedyBelow = 1e-5;  // a lower temperature is greedy: dividing would overflow
constexpr int64_t kStretch = 512;      // logits whose weights are summed at once
constexpr int64_t kFineStretch = 16;
constexpr int64_t kSortable = 64;  // so few candidates are sorted, more are cut down first
constexpr int64_t kFew = 1024;     // so few allowed tokens are gathered, more are masked in place

// A logit as filters see it, 0 for the highest, and in proportion to its probability.
struct Scale {
  float highest, temperature;
  float operator()(float x) const { return (x - highest) / temperature; }
  float weight(float x) const { return (float)exp((double)(*this)(x)); }  // up to 1
  double sum_exp(const float* x, int64_t n) const {
    return kernels().sampling.sum_exp(x, n, highest, 1.0f / temperature);
  }
};

// Floats in the order of their values as integers.
int32_t to_order(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits >= 0 ? bits : bits ^ 0x7fffffff;
}

float from_order(int32_t order) {
  const int32_t bits = order >= 0 ? order : order ^ 0x7fffffff;
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// The least float up to `highest` for which the monotone `is_enough` holds; it does for `highest`.
template <class IsEnough>
float least_float(float highest, IsEnough is_enough) {
  int64_t low = to_order(-INFINITY), high = to_order(highest);
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (is_enough(from_order((int32_t)middle)))
      high = middle;
    else
      low = middle + 1;
  }
  return from_order((int32_t)high);
}

template <class T>
T* room_for(std::vector<T>& memory, int64_t n) {
  if ((int64_t)memory.size() < n) memory.resize(n);
  return memory.data();
}

// -- Edits ---------------------------------------------------------------------------------------

bool has_counted_penalties(const SamplingParams& params) {
  return params.presence_penalty != 0.0 || params.frequency_penalty != 0.0;
}

bool is_edited(const SampleArgs& args) {
  const SamplingParams& params = *args.params;
  return !params.bias_ids.empty() || params.repetition_penalty != 1.0 ||
         has_counted_penalties(params);
}

// The repetition penalty, once on every token of prompt and output.
void penalize_repeated(const SampleArgs& args, float* scores, int32_t* counts) {
  // In float32 a tinier one is zero, and a logit of zero divided by it is not a number.
  const float penalty = (float)std::max(args.params->repetition_penalty, (double)FLT_MIN);
  for (int64_t i = 0; i < args.num_tokens; ++i) {
    const int32_t token_id = args.token_ids[i];
    if (counts[token_id]++ > 0) continue;
    float& score = scores[token_id];
    score = score > 0.0f ? score / penalty : score * penalty;
  }
  for (int64_t i = 0; i < args.num_tokens; ++i) counts[args.token_ids[i]] = 0;
}

// Frequency (per occurrence) and presence (once) penalties, on tokens of the output.
void penalize_counted(const SampleArgs& args, float* scores, int32_t* counts) {
  const SamplingParams& params = *args.params;
  for (int64_t i = args.num_prompt_tokens; i < args.num_tokens; ++i) ++counts[args.token_ids[i]];
  for (int64_t i = args.num_prompt_tokens; i < args.num_tokens; ++i) {
    const int32_t token_id = args.token_ids[i];
    if (counts[token_id] == 0) continue;
    scores[token_id] -=
        (float)(params.frequency_penalty * counts[token_id] + params.presence_penalty);
    counts[token_id] = 0;
  }
}

// Biases, then penalties.
const float* edit(const SampleArgs& args, SamplerScratch& scratch) {
  const SamplingParams& params = *args.params;
  float* scores = room_for(scratch.scores, args.vocab_size);
  int32_t* counts = room_for(scratch.counts, args.vocab_size);
  memcpy(scores, args.logits, args.vocab_size * sizeof(float));
  for (size_t i = 0; i < params.bias_ids.size(); ++i)
    scores[params.bias_ids[i]] += params.bias_values[i];
  if (params.repetition_penalty != 1.0) penalize_repeated(args, scores, counts);
  if (has_counted_penalties(params)) penalize_counted(args, scores, counts);
  // A tiny repetition penalty may overflow; that must not look like broken weights.
  const auto clamp = [&](int32_t token_id) {
    if (scores[token_id] > FLT_MAX) scores[token_id] = FLT_MAX;
  };
  for (const int32_t token_id : params.bias_ids) clamp(token_id);
  for (int64_t i = 0; i < args.num_tokens; ++i) clamp(args.token_ids[i]);
  return scores;
}

// -- Masks ---------------------------------------------------------------------------------------

// What is chosen from.
struct Scores {
  const float* values;
  int64_t size;
  const int32_t* ids;  // null: they are the places

  int32_t id(int64_t place) const { return ids == nullptr ? (int32_t)place : ids[place]; }
};

// The scores of the allowed tokens alone if they are few; else of all, the others -infinity.
Scores mask(const float* scores, int64_t vocab_size, SamplerScratch& scratch) {
  int32_t* ids = room_for(scratch.few_ids, kFew + 64);
  const int64_t num_few = list_allowed(scratch.allowed, kFew, ids);
  if (num_few >= 0) {
    float* few = room_for(scratch.few_scores, num_few);
    for (int64_t i = 0; i < num_few; ++i) few[i] = scores[ids[i]];
    return {few, num_few, ids};
  }
  float* masked = room_for(scratch.scores, vocab_size);
  kernels().sampling.mask(scores, scratch.allowed.data(), vocab_size, masked);
  return {masked, vocab_size, nullptr};
}

// -- Filters -------------------------------------------------------------------------------------

// Collects into `values` and `indices` of the scratch; returns how many.
int64_t collect(const float* x, int64_t n, float threshold, SamplerScratch& scratch) {
  return kernels().sampling.collect_at_least(x, n, threshold, room_for(scratch.indices, n),
                                             room_for(scratch.values, n), n);
}

// The k-th greatest of x, 1 <= k <= n, none of them NaN.
float kth_greatest(const float* x, int64_t n, int64_t k, SamplerScratch& scratch) {
  // Each of the k groups with the greatest maxima holds one that is at least the k-th of these
  // maxima, so k numbers are; hardly more, unless great ones stand together.
  const int64_t size = std::max<int64_t>(1, n / (4 * k));
  float* maxima = room_for(scratch.values, n / size + 32);
  const int64_t num_groups = kernels().sampling.group_maxima(x, n, size, maxima);
  float threshold = -INFINITY;
  if (k <= num_groups) {
    std::nth_element(maxima, maxima + k - 1, maxima + num_groups, std::greater<float>());
    threshold = maxima[k - 1];
  }
  const int64_t count = collect(x, n, threshold, scratch);
  float* values = scratch.values.data();
  std::nth_element(values, values + k - 1, values + count, std::greater<float>());
  return values[k - 1];
}

// The x[i] at which, going down, the weights added to `weight` reach `target`. n > 0.
float find_reached(float* x, int64_t n, double weight, double target, const Scale& scale) {
  std::sort(x, x + n, std::greater<float>());
  for (int64_t i = 0; i < n; ++i) {
    weight += scale.weight(x[i]);
    if (weight >= target) return x[i];
  }
  return x[n - 1];
}

// The greatest of x such that it and all above have top_p of the weight of x.
float find_top_p(const float* x, int64_t n, double top_p, const Scale& scale,
                 SamplerScratch& scratch) {
  const SamplingKernels& loops = kernels().sampling;
  const double total = scale.sum_exp(x, n), target = top_p * total;
  // The one looked for is in [low, high), where `found` are; from `high` on all weigh `weight`.
  // What is below this `low` weighs less than half of what may be left out.
  const double lowest_scaled = log(0.5 * (1.0 - top_p) * total / (double)n);
  float low = std::max(-FLT_MAX, scale.highest + scale.temperature * (float)lowest_scaled);
  float high = scale.highest;
  double weight = (double)loops.count_at_least(x, n, high);
  if (weight >= target) return high;
  float* found = room_for(scratch.candidates[0], n);
  float* upper = room_for(scratch.candidates[1], n);
  int64_t num_found = loops.collect_between(x, n, low, high, found);
  if (num_found == 0) return high;
  while (num_found > kSortable) {
    const float middle = low * 0.5f + high * 0.5f;
    if (!(low < middle && middle < high)) return low;  // all are equal
    int64_t num_upper = loops.collect_between(found, num_found, middle, high, upper);
    const double upper_weight = scale.sum_exp(upper, num_upper);
    if (weight + upper_weight >= target) {
      low = middle;
    } else {
      num_upper = loops.collect_between(found, num_found, low, middle, upper);
      weight += upper_weight;
      high = middle;
    }
    std::swap(found, upper);
    num_found = num_upper;
  }
  return num_found == 0 ? low : find_reached(found, num_found, weight, target, scale);
}

// What a score must reach to pass min_p, top_k and top_p, in this order.
float filter_limit(const float* scores, int64_t n, const SamplingParams& params,
                   const Scale& scale, SamplerScratch& scratch) {
  const auto limit_of = [&](float scaled) {
    return least_float(scale.highest, [&](float x) { return scale(x) >= scaled; });
  };
  float limit = -INFINITY;
  if (params.min_p > 0.0) limit = limit_of((float)std::min(0.0, log(params.min_p)));
  if (params.top_k > 0 && params.top_k < n)
    limit = std::max(limit, limit_of(scale(kth_greatest(scores, n, params.top_k, scratch))));
  if (params.top_p < 1.0) {
    const float* kept = scores;
    int64_t num_kept = n;
    if (limit > -INFINITY) {
      num_kept = collect(scores, n, limit, scratch);
      kept = scratch.values.data();
    }
    const float last = find_top_p(kept, num_kept, params.top_p, scale, scratch);
    const float weight = scale.weight(last);  // tokens that are as likely are kept as well
    limit = std::max(
        limit, least_float(scale.highest, [&](float x) { return scale.weight(x) >= weight; }));
  }
  return limit;
}

// -- The draw ------------------------------------------------------------------------------------

// Where the stretch of x[0, n) begins in which the running weight passes `rest`, of which what comes
// before is taken off. If rounding leaves none: the last that has any weight.
int64_t find_stretch(const float* x, int64_t n, int64_t stretch, const Scale& scale, double& rest) {
  int64_t found = 0;
  double before = 0.0, found_before = 0.0;
  for (int64_t start = 0; start < n; start += stretch) {
    const double weight = scale.sum_exp(x + start, std::min(stretch, n - start));
    if (weight > 0.0) {
      found = start;
      found_before = before;
      if (rest - before < weight) break;
    }
    before += weight;
  }
  rest -= found_before;
  return found;
}

// Inverse transform sampling: the index in x where the running weight passes `uniform` of all.
int64_t draw(const float* x, int64_t n, const Scale& scale, double uniform,
             SamplerScratch& scratch) {
  const int64_t num_stretches = (n + kStretch - 1) / kStretch;
  double* ends = room_for(scratch.weights, num_stretches);
  double total = 0.0;
  for (int64_t i = 0; i < num_stretches; ++i) {
    const int64_t start = i * kStretch;
    total += scale.sum_exp(x + start, std::min(kStretch, n - start));
    ends[i] = total;
  }
  // Below the total even after rounding, so that the token found has a probability above zero.
  double rest = std::min(uniform * total, nextafter(total, 0.0));
  const int64_t at = std::upper_bound(ends, ends + num_stretches, rest) - ends;
  if (at > 0) rest -= ends[at - 1];
  int64_t index = at * kStretch;
  index += find_stretch(x + index, std::min(kStretch, n - index), kFineStretch, scale, rest);
  return index + find_stretch(x + index, std::min(kFineStretch, n - index), 1, scale, rest);
}

int64_t draw_filtered(const Scores& scores, float highest, const SampleArgs& args,
                      SamplerScratch& scratch) {
  const SamplingParams& params = *args.params;
  const Scale scale{highest, (float)params.temperature};
  const double uniform = philox_uniform(params.seed, (int32_t)args.num_tokens, params.choice);
  const float limit = filter_limit(scores.values, scores.size, params, scale, scratch);
  if (limit == -INFINITY) return draw(scores.values, scores.size, scale, uniform, scratch);
  const int64_t count = collect(scores.values, scores.size, limit, scratch);
  return scratch.indices[draw(scratch.values.data(), count, scale, uniform, scratch)];
}

// -- Log-probabilities ---------------------------------------------------------------------------

// Of out.token_id, from the untouched logits, whose greatest is `highest`; equal ones stand in the
// order of their ids.
void find_logprobs(const float* logits, int64_t n, float highest, int64_t num_wanted,
                   SamplerScratch& scratch, SampledRow& out) {
  const SamplingKernels& loops = kernels().sampling;
  const float log_total = (float)log(loops.sum_exp(logits, n, highest, 1.0f));
  const auto logprob = [&](float x) { return (x - highest) - log_total; };
  out.logprob = logprob(logits[out.token_id]);
  out.rank = 1;
  if (logprob(highest) > out.logprob) {
    const auto is_above = [&](float x) { return logprob(x) > out.logprob; };
    out.rank += (int32_t)loops.count_at_least(logits, n, least_float(highest, is_above));
  }
  const int64_t num_top = std::min(num_wanted, n);
  if (num_top == 0) return;
  const float last = logprob(kth_greatest(logits, n, num_top, scratch));
  const float limit = least_float(highest, [&](float x) { return logprob(x) >= last; });
  const int64_t count = collect(logits, n, limit, scratch);
  std::vector<std::pair<float, int32_t>> top(count);  // minus the log-probability, id
  for (int64_t i = 0; i < count; ++i) top[i] = {-logprob(scratch.values[i]), scratch.indices[i]};
  std::partial_sort(top.begin(), top.begin() + num_top, top.end());
  for (int64_t i = 0; i < num_top; ++i) {
    out.top_logprobs.push_back(-top[i].first);
    out.top_ids.push_back(top[i].second);
  }
}

void clear(SampledRow& row) {
  row.token_id = row.rank = 0;
  row.failed = false;
  row.logprob = 0.0f;
  row.top_ids.clear();
  row.top_logprobs.clear();
}

}  // namespace

void sample_row(const SampleArgs& args, SamplerScratch& scratch, SampledRow& out) {
  const auto argmax = kernels().sampling.argmax;
  const SamplingParams& params = *args.params;
  clear(out);
  const int64_t likeliest = argmax(args.logits, args.vocab_size);
  out.failed = likeliest < 0;
  if (out.failed) return;
  Scores scores{args.logits, args.vocab_size, nullptr};
  int64_t best = likeliest;
  if (is_edited(args)) {
    scores.values = edit(args, scratch);
    best = argmax(scores.values, scores.size);
  }
  float highest = best < 0 ? -INFINITY : scores.values[best];
  const bool is_greedy = !(params.temperature >= kGreedyBelow);
  if (has_masks(args)) {
    find_allowed(args, scratch);
    // The best of all, if it is allowed, is the best of those that are.
    const bool has_best = best >= 0 && is_allowed(scratch.allowed, best);
    if (!has_best || !is_greedy) scores = mask(scores.values, args.vocab_size, scratch);
    if (!has_best) {
      best = argmax(scores.values, scores.size);
      highest = best < 0 ? -INFINITY : scores.values[best];
    }
  }
  out.failed = best < 0;
  if (out.failed) return;
  out.token_id = scores.id(is_greedy ? best : draw_filtered(scores, highest, args, scratch));
  if (params.num_logprobs >= 0)
    find_logprobs(args.logits, args.vocab_size, args.logits[likeliest], params.num_logprobs,
                  scratch, out);
}

void score_row(const ScoreArgs& args, SamplerScratch& scratch, SampledRow& out) {
  clear(out);
  const int64_t likeliest = kernels().sampling.argmax(args.logits, args.vocab_size);
  out.failed = likeliest < 0;
  if (out.failed) return;
  out.token_id = args.token_id;
  find_logprobs(args.logits, args.vocab_size, args.logits[likeliest], args.num_top, scratch, out);
}

}  // namespace streamkv
