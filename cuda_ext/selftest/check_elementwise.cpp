// rms_norm, head_rms_norm, rotary and select_rows.
#include <math.h>

#include "packed.h"

namespace streamkv::selftest {

namespace {

void check_rms_norm(Report& report, Random& random, int64_t hidden, Dtype out_dtype) {
  constexpr int64_t kRows = 37;
  constexpr float kEps = 1e-5f;
  const std::vector<float> x = random.uniforms(kRows * hidden), weight = random.uniforms(hidden);
  std::vector<double> expected, tolerance;
  for (int64_t row = 0; row < kRows; ++row) {
    double squares = 0.0;
    for (int64_t i = 0; i < hidden; ++i) squares += pow(x[row * hidden + i], 2);
    const double scale = 1.0 / sqrt(squares / static_cast<double>(hidden) + kEps);
    for (int64_t i = 0; i < hidden; ++i) {
      expected.push_back(x[row * hidden + i] * scale * weight[i]);
      tolerance.push_back(fabs(expected.back()) * (relative_error(out_dtype) + 2e-6));
    }
  }
  const std::string what = "rms_norm of " + std::to_string(hidden) + " to " + name_of(out_dtype);
  Guarded first(kRows * hidden * element_bytes(out_dtype));
  const auto run = [&](int64_t row, int64_t num_rows, Order order, Guarded& out) {
    run_kernel(kernels().rms_norm, {x.data() + row * hidden, weight.data(), out.as<void>(),
                                    out_dtype, num_rows, hidden, kEps},
               order);
  };
  run(0, kRows, Order::kForward, first);
  const auto got = read_numbers(first.as<void>(), out_dtype, kRows * hidden);
  report.expect_near(got.data(), expected, tolerance, what);
  for (const Order order : kOrders) {
    Guarded again(first.num_bytes()), alone(first.num_bytes() / kRows);
    run(0, kRows, order, again);
    run(5, 1, order, alone);
    report.expect(again.is_intact() && again == first, what + ": the same bits");
    report.expect(alone.is_intact() && memcmp(alone.as<char>(),
                                              first.as<char>() + 5 * alone.num_bytes(),
                                              alone.num_bytes()) == 0,
                  what + ": a row alone has the same bits");
  }
}

void check_head_rms_norm(Report& report, Random& random, int64_t head_dim, bool in_place) {
  constexpr int64_t kTokens = 41, kHeads = 4, kKvHeads = 2, kRowHeads = kHeads + 2 * kKvHeads;
  constexpr float kEps = 1e-6f;
  const std::vector<float> qkv = random.uniforms(kTokens * kRowHeads * head_dim);
  const std::vector<float> q_weight = random.uniforms(head_dim);
  const std::vector<float> k_weight = random.uniforms(head_dim);
  std::vector<double> expected(qkv.begin(), qkv.end()), tolerance(qkv.size(), 0.0);
  for (int64_t head = 0; head < kTokens * kRowHeads; ++head) {
    const int64_t of_token = head % kRowHeads;
    if (of_token >= kHeads + kKvHeads) continue;
    const std::vector<float>& weight = of_token < kHeads ? q_weight : k_weight;
    double squares = 0.0;
    for (int64_t i = 0; i < head_dim; ++i) squares += pow(qkv[head * head_dim + i], 2);
    const double scale = 1.0 / sqrt(squares / static_cast<double>(head_dim) + kEps);
    for (int64_t i = 0; i < head_dim; ++i) {
      const int64_t at = head * head_dim + i;
      expected[at] = qkv[at] * scale * weight[i];
      tolerance[at] = 2e-6 * fabs(expected[at]);
    }
  }
  for (const Order order : kOrders) {
    Guarded out(static_cast<int64_t>(qkv.size()) * 4);
    if (in_place) memcpy(out.as<float>(), qkv.data(), out.num_bytes());
    const float* from = in_place ? out.as<float>() : qkv.data();
    run_kernel(kernels().head_rms_norm, {from, q_weight.data(), k_weight.data(), out.as<float>(),
                                         kTokens, kHeads, kKvHeads, head_dim, kEps}, order);
    const std::string what =
        "head_rms_norm of " + std::to_string(head_dim) + (in_place ? " in place" : "");
    report.expect(out.is_intact(), what + ": writes inside");
    report.expect_near(out.as<float>(), expected, tolerance, what);
  }
}

void check_rotary(Report& report, Random& random, int64_t head_dim, bool in_place) {
  constexpr int64_t kTokens = 41, kRotated = 5, kCopied = 2, kPositions = 19;
  const int64_t width = (kRotated + kCopied) * head_dim, half = head_dim / 2;
  const std::vector<float> qkv = random.uniforms(kTokens * width);
  const std::vector<float> cos_sin = random.uniforms(kPositions * head_dim);
  const std::vector<int32_t> positions = random.indices(kTokens, kPositions);
  std::vector<double> expected(qkv.begin(), qkv.end()), tolerance(qkv.size(), 0.0);
  for (int64_t token = 0; token < kTokens; ++token)
    for (int64_t head = 0; head < kRotated; ++head)
      for (int64_t i = 0; i < half; ++i) {
        const int64_t at = token * width + head * head_dim + i;
        const float* table = cos_sin.data() + positions[token] * head_dim;
        const double a = qkv[at], b = qkv[at + half], cosine = table[i], sine = table[half + i];
        expected[at] = a * cosine - b * sine;
        expected[at + half] = b * cosine + a * sine;
        tolerance[at] = tolerance[at + half] = 2e-7 * (fabs(a) + fabs(b));
      }
  for (const Order order : kOrders) {
    Guarded out(kTokens * width * 4);
    if (in_place) memcpy(out.as<float>(), qkv.data(), out.num_bytes());
    const float* from = in_place ? out.as<float>() : qkv.data();
    run_kernel(kernels().rotary, {from, positions.data(), cos_sin.data(), out.as<float>(), kTokens,
                                  kRotated, kCopied, head_dim}, order);
    const std::string what = "rotary of " + std::to_string(head_dim) + (in_place ? " in place" : "");
    report.expect(out.is_intact(), what + ": writes inside");
    report.expect_near(out.as<float>(), expected, tolerance, what);
  }
}

void check_select_rows(Report& report, Random& random, int64_t width) {
  constexpr int64_t kRows = 50, kSelected = 33;
  const std::vector<float> x = random.uniforms(kRows * width);
  const std::vector<int32_t> rows = random.indices(kSelected, kRows);
  for (const Order order : kOrders) {
    Guarded out(kSelected * width * 4);
    run_kernel(kernels().select_rows, {x.data(), rows.data(), out.as<float>(), kSelected, width},
               order);
    bool holds = out.is_intact();
    for (int64_t i = 0; i < kSelected; ++i)
      holds = holds && memcmp(out.as<float>() + i * width, x.data() + rows[i] * width,
                              width * 4) == 0;
    report.expect(holds, "select_rows of " + std::to_string(width));
  }
}

}  // namespace

void check_elementwise(Report& report) {
  Random random(3);
  for (const int64_t hidden : {1, 2, 15, 64, 576, 601})
    for (const Dtype out_dtype : {Dtype::kFloat32, Dtype::kBFloat16})
      check_rms_norm(report, random, hidden, out_dtype);
  for (const int64_t head_dim : {2, 16, 34, 64, 128})
    for (const bool in_place : {false, true}) {
      check_head_rms_norm(report, random, head_dim, in_place);
      check_rotary(report, random, head_dim, in_place);
    }
  for (const int64_t width : {1, 3, 64, 577}) check_select_rows(report, random, width);
}

}  // namespace streamkv::selftest
