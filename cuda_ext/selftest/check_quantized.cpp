// Quantized weights: packing and what is read back, inputs, and products against sums in double
// precision of the very numbers, with the bits of a row in any company.
#include <math.h>

#include <algorithm>

#include "packed.h"
#include "quantized_blocks.h"
#include "streamkv/formats.h"

namespace streamkv::selftest {

namespace {

constexpr int64_t kMostRows = 61;

// --- rows in and out ----------------------------------------------------------------------------

void check_reading(Report& report, Random& random, const TestQuantized& weight) {
  const int64_t outputs = weight.view.num_outputs, depth = weight.view.depth;
  report.expect(weight.is_intact(), "pack " + weight.name() + ": writes inside");
  const auto holds = [&](const float* got, int64_t output) {
    const auto [part, at] = weight.find(output);
    return memcmp(got, part->values.data() + at * depth, depth * 4) == 0;
  };
  Guarded all(outputs * depth * 4), last(depth * 4);
  kernels().quantized.unpack(weight.view, 0, outputs, all.as<float>());
  kernels().quantized.unpack(weight.view, outputs - 1, 1, last.as<float>());
  bool is_right = all.is_intact() && last.is_intact() && holds(last.as<float>(), outputs - 1);
  for (int64_t i = 0; i < outputs; ++i) is_right &= holds(all.as<float>() + i * depth, i);
  report.expect(is_right, "unpack " + weight.name());

  constexpr int64_t kTokens = 90;
  const std::vector<int32_t> token_ids = random.indices(kTokens, outputs);
  for (const Order order : kOrders) {
    Guarded out(kTokens * depth * 4);
    run_kernel(kernels().quantized.embedding,
               {token_ids.data(), weight.view, out.as<float>(), kTokens}, order);
    is_right = out.is_intact();
    for (int64_t i = 0; i < kTokens; ++i)
      is_right &= holds(out.as<float>() + i * depth, token_ids[i]);
    report.expect(is_right, "embedding " + weight.name());
  }
}

// --- inputs -------------------------------------------------------------------------------------

int64_t groups_of(int64_t width) { return (width + kInputGroup - 1) / kInputGroup; }

// As the kernels have it to be, bit for bit.
InputGroup quantized(const float* x, int64_t n) {
  InputGroup group{};
  float largest = 0.0f;
  bool is_finite = true;
  for (int64_t i = 0; i < n; ++i) {
    largest = std::max(largest, fabsf(x[i]));
    is_finite = is_finite && isfinite(x[i]);
  }
  if (!is_finite) {
    group.scale = NAN;
    return group;
  }
  if (largest == 0.0f) return group;
  group.scale = largest / 127.0f;
  int sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    group.values[i] = static_cast<int8_t>(rintf(x[i] * (127.0f / largest)));
    sum += group.values[i];
  }
  group.negative_sum = -sum;
  group.scaled_sum = group.scale * static_cast<float>(sum);
  return group;
}

bool is_same(const InputGroup& got, const InputGroup& expected) {
  return isnan(expected.scale) ? isnan(got.scale) : memcmp(&got, &expected, sizeof(got)) == 0;
}

void check_inputs(Report& report, Random& random, int64_t width) {
  constexpr int64_t kRows = 23;
  std::vector<float> x = random.uniforms(kRows * width);
  for (int64_t i = 0; i < width; ++i) x[width + i] = 0.0f;
  for (int64_t i = 0; i < width; ++i) x[2 * width + i] *= 1e-30f;
  x[3 * width + width / 2] = INFINITY;
  x[4 * width + width - 1] = NAN;
  const int64_t groups = groups_of(width);
  const std::string what = "quantize " + std::to_string(width);
  for (const Order order : kOrders) {
    Guarded out(kRows * groups * static_cast<int64_t>(sizeof(InputGroup)));
    run_kernel(kernels().quantized.quantize, {x.data(), out.as<InputGroup>(), kRows, width},
               order);
    bool holds = out.is_intact();
    for (int64_t row = 0; row < kRows; ++row)
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t at = g * kInputGroup;
        holds &= is_same(out.as<InputGroup>()[row * groups + g],
                         quantized(x.data() + row * width + at,
                                   std::min(kInputGroup, width - at)));
      }
    report.expect(holds, what);
  }

  // What rms_norm makes is what it makes of float32, quantized.
  const std::vector<float> weight = random.uniforms(width);
  Guarded normed(kRows * width * 4), direct(kRows * groups * 44), later(kRows * groups * 44);
  const auto norm = [&](void* out, Dtype dtype) {
    run_kernel(kernels().rms_norm, {x.data(), weight.data(), out, dtype, 3, width, 1e-5f},
               Order::kForward);
  };
  norm(normed.as<void>(), Dtype::kFloat32);
  norm(direct.as<void>(), Dtype::kInt8);
  run_kernel(kernels().quantized.quantize,
             {normed.as<float>(), later.as<InputGroup>(), 3, width}, Order::kForward);
  report.expect(direct.is_intact() && direct == later, "rms_norm to int8 of " +
                                                           std::to_string(width));
}

// --- products -----------------------------------------------------------------------------------

struct Inputs {
  std::vector<float> floats;
  std::vector<InputGroup> groups;  // [kMostRows, groups]

  Inputs(Random& random, int64_t depth, Filling filling)
      : floats(random.uniforms(kMostRows * depth)), groups(kMostRows * groups_of(depth)) {
    if (filling != Filling::kRandom) std::fill(floats.begin(), floats.end(), 0.75f);
    run_kernel(kernels().quantized.quantize, {floats.data(), groups.data(), kMostRows, depth},
               Order::kForward);
  }
};

struct Sums {
  std::vector<double> values, errors;  // [rows, num_outputs]
};

// The greatest error of so many float32 additions in a row.
Sums reference(const TestQuantized& weight, const Inputs& x) {
  const int64_t depth = weight.view.depth, groups = groups_of(depth);
  const double step = 0x1p-24 * static_cast<double>(4 * groups + 8);
  Sums sums;
  for (int64_t row = 0; row < kMostRows; ++row)
    for (int64_t output = 0; output < weight.view.num_outputs; ++output) {
      const auto [part, at] = weight.find(output);
      double sum = 0.0, magnitude = 0.0;
      for (int64_t half = 0; half * 16 < depth; ++half) {  // groups share their scales, or halves
        double product = 0.0, minimum = 0.0;
        for (int64_t k = half * 16; k < std::min(half * 16 + 16, depth); ++k) {
          const InputGroup& group = x.groups[row * groups + k / kInputGroup];
          const double input = static_cast<double>(group.values[k % kInputGroup]) * group.scale;
          product += input * part->levels[at * depth + k] * part->scales[at * depth + k];
          minimum += input * part->minima[at * depth + k];
        }
        sum += product + minimum;
        magnitude += fabs(product) + fabs(minimum);
      }
      sums.values.push_back(sum);
      sums.errors.push_back(step * magnitude + 1e-30);
    }
  return sums;
}

struct Product {
  const TestQuantized& weight;
  const Inputs& x;
  std::vector<float> bias, residual;  // empty: none
  Dtype out_dtype;

  int64_t columns() const { return weight.view.num_outputs / (weight.view.is_paired ? 2 : 1); }
  int64_t row_bytes() const { return input_row_bytes(out_dtype, columns()); }
  std::string name() const {
    return "linear " + weight.name() + " to " +
           (out_dtype == Dtype::kInt8 ? "int8" : name_of(out_dtype)) +
           (bias.empty() ? "" : " + bias") + (residual.empty() ? "" : " + residual");
  }

  // Rows [first, first + num_rows).
  void run(int64_t first, int64_t num_rows, Order order, Guarded& out) const {
    QuantizedMatmulArgs args{};
    args.x = x.groups.data() + first * groups_of(weight.view.depth);
    args.weight = weight.view;
    args.bias = bias.empty() ? nullptr : bias.data();
    args.out = out.as<void>();
    args.out_dtype = out_dtype;
    args.num_rows = num_rows;
    if (!residual.empty()) {  // in place
      memcpy(out.as<void>(), residual.data() + first * columns(), num_rows * columns() * 4);
      args.residual = out.as<float>();
    }
    run_kernel(kernels().quantized.matmul, args, order);
  }

  void finish(Sums& sums) const {
    const int64_t outputs = weight.view.num_outputs;
    for (size_t i = 0; i < sums.values.size(); ++i) {
      if (!bias.empty()) sums.values[i] += bias[i % outputs];
      if (!residual.empty()) sums.values[i] += residual[i];
      sums.errors[i] += 0x1p-22 * (fabs(sums.values[i]) + 2.0);
    }
    if (weight.view.is_paired) sums = gated(sums);
  }

  // silu(gate) * up.
  Sums gated(const Sums& sums) const {
    Sums out;
    for (size_t at = 0; at < sums.values.size(); at += 2 * columns())
      for (int64_t i = 0; i < columns(); ++i) {
        const double gate = sums.values[at + i], up = sums.values[at + columns() + i];
        const double silu = gate / (1.0 + exp(-gate)), value = silu * up;
        out.values.push_back(value);
        out.errors.push_back(1.2 * fabs(up) * sums.errors[at + i] +
                             (fabs(silu) + 1.2 * sums.errors[at + i]) *
                                 sums.errors[at + columns() + i] +
                             (relative_error(out_dtype) + 0x1p-21) * fabs(value) + 1e-30);
      }
    return out;
  }
};

// Rows in any company have the bits they have among all.
void check_bits(Report& report, Random& random, const Product& product, Guarded& all) {
  for (const int64_t num_rows : {1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 24, 32, 33, 48, 61})
    for (const Order order : kOrders) {
      const int64_t first = num_rows == kMostRows ? 0 : random.below(kMostRows - num_rows);
      Guarded some(num_rows * product.row_bytes());
      product.run(first, num_rows, order, some);
      report.expect(some.is_intact() &&
                        memcmp(some.as<char>(), all.as<char>() + first * product.row_bytes(),
                               some.num_bytes()) == 0,
                    product.name() + ": rows " + std::to_string(first) + " + " +
                        std::to_string(num_rows) + " have the same bits");
    }
}

void check_product(Report& report, Random& random, const TestQuantized& weight,
                   const Inputs& x, bool has_bias, bool has_residual) {
  const int64_t outputs = weight.view.num_outputs;
  Product product{weight, x, {}, {}, Dtype::kFloat32};
  if (has_bias) product.bias = random.uniforms(outputs);
  if (has_residual) product.residual = random.uniforms(kMostRows * outputs);
  Guarded all(kMostRows * product.row_bytes());
  product.run(0, kMostRows, Order::kForward, all);
  Sums expected = reference(weight, x);
  product.finish(expected);
  report.expect_near(all.as<float>(), expected.values, expected.errors, product.name());
  check_bits(report, random, product, all);
  if (!weight.view.is_paired) return;

  // Other inputs are these, rounded.
  product.out_dtype = Dtype::kBFloat16;
  Guarded narrow(kMostRows * product.row_bytes());
  product.run(0, kMostRows, Order::kForward, narrow);
  bool holds = narrow.is_intact();
  for (int64_t i = 0; i < kMostRows * product.columns(); ++i)
    holds &= narrow.as<uint16_t>()[i] == to_bf16(all.as<float>()[i]);
  report.expect(holds, product.name() + " is float32, rounded");
  product.out_dtype = Dtype::kInt8;
  Guarded groups(kMostRows * product.row_bytes()), later(groups.num_bytes());
  product.run(0, kMostRows, Order::kForward, groups);
  run_kernel(kernels().quantized.quantize,
             {all.as<float>(), later.as<InputGroup>(), kMostRows, product.columns()},
             Order::kForward);
  report.expect(groups.is_intact() && groups == later, product.name() + " is float32, quantized");
  check_bits(report, random, product, groups);
}

// A row that isn't finite spoils itself alone.
void check_spoilt_row(Report& report, const TestQuantized& weight, const Inputs& x) {
  constexpr int64_t kRows = 14, kSpoilt = 5;
  const int64_t outputs = weight.view.num_outputs, groups = groups_of(weight.view.depth);
  Inputs spoilt = x;
  spoilt.groups[kSpoilt * groups + groups / 2].scale = NAN;
  Guarded good(kRows * outputs * 4), bad(kRows * outputs * 4);
  Product{weight, x, {}, {}, Dtype::kFloat32}.run(0, kRows, Order::kForward, good);
  Product{weight, spoilt, {}, {}, Dtype::kFloat32}.run(0, kRows, Order::kForward, bad);
  bool holds = true;
  for (int64_t i = 0; i < kRows * outputs; ++i) {
    const float got = bad.as<float>()[i];
    holds &= i / outputs == kSpoilt ? isnan(got) : got == good.as<float>()[i];
  }
  report.expect(holds, "linear " + weight.name() + ": a row that isn't finite");
}

void check_format(Report& report, Random& random, WeightFormat format) {
  const int64_t depth = std::max(block_depth(format), kInputGroup);
  const auto check = [&](std::vector<Blocks> parts, bool is_paired, Filling filling,
                         bool has_bias, bool has_residual) {
    const TestQuantized weight(std::move(parts), is_paired, is_paired ? 32 : 64);
    const Inputs x(random, weight.view.depth, filling);
    check_reading(report, random, weight);
    check_product(report, random, weight, x, has_bias, has_residual);
    if (!is_paired) check_spoilt_row(report, weight, x);
  };
  const auto blocks = [&](int64_t outputs, int64_t depth, Filling filling = Filling::kRandom) {
    return Blocks(random, format, outputs, depth, filling);
  };
  check({blocks(1, depth)}, false, Filling::kRandom, true, true);
  check({blocks(77, 3 * depth)}, false, Filling::kRandom, true, false);
  check({blocks(96, 768), blocks(33, 768), blocks(32, 768)}, false, Filling::kRandom, false, true);
  check({blocks(1, 2 * depth), blocks(1, 2 * depth)}, true, Filling::kRandom, true, false);
  check({blocks(104, 512), blocks(104, 512)}, true, Filling::kRandom, false, false);
  for (const Filling filling : {Filling::kLeast, Filling::kGreatest})
    check({blocks(64, 256, filling)}, false, filling, false, false);
}

}  // namespace

void check_quantized(Report& report) {
  Random random(11);
  for (const int64_t width : {1, 2, 15, 31, 32, 33, 64, 100, 576})
    check_inputs(report, random, width);
  for (int format = 0; format < kNumWeightFormats; ++format)
    check_format(report, random, static_cast<WeightFormat>(format));
  // Depths that don't fill a group, and parts of several formats.
  for (const int64_t depth : {1, 2, 31, 33, 100, 577}) {
    const TestQuantized weight({Blocks(random, WeightFormat::kInt8, 45, depth)}, false);
    check_reading(report, random, weight);
    check_product(report, random, weight, Inputs(random, depth, Filling::kRandom), true, false);
  }
  const TestQuantized mixed({Blocks(random, WeightFormat::kQ4_K, 70, 512),
                             Blocks(random, WeightFormat::kQ6_K, 33, 512),
                             Blocks(random, WeightFormat::kInt8, 5, 512),
                             Blocks(random, WeightFormat::kQ4_1, 64, 512)}, false);
  check_reading(report, random, mixed);
  check_product(report, random, mixed, Inputs(random, 512, Filling::kRandom), true, true);
  const TestQuantized pair({Blocks(random, WeightFormat::kQ4_K, 40, 256),
                            Blocks(random, WeightFormat::kQ8_0, 40, 256)}, true);
  check_product(report, random, pair, Inputs(random, 256, Filling::kRandom), true, false);
}

}  // namespace streamkv::selftest
