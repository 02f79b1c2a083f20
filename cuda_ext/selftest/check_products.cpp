// Matrix products against sums in double precision, and the bits of a row in any company.
#include <math.h>

#include <algorithm>

#include "packed.h"

namespace streamkv::selftest {

namespace {

constexpr int64_t kMostRows = 150;

struct Product {
  Dtype dtype;
  int64_t num_outputs, depth;
  bool is_paired, has_bias, has_residual;

  Dtype input_dtype() const {
    return dtype == Dtype::kBFloat16 ? kernels().bf16_inputs : Dtype::kFloat32;
  }
  Dtype out_dtype() const { return is_paired ? input_dtype() : Dtype::kFloat32; }
  int64_t out_columns() const { return is_paired ? num_outputs / 2 : num_outputs; }
  std::string name() const {
    return (is_paired ? "linear_silu_mul " : "linear ") + name_of(dtype) + " [" +
           std::to_string(num_outputs) + ", " + std::to_string(depth) + "]" +
           (has_bias ? " + bias" : "") + (has_residual ? " + residual" : "");
  }
};

struct Sums {
  std::vector<double> values, errors;  // [rows, num_outputs]
};

// x @ weight.T + bias + residual and what float32 may make of it.
Sums reference(const Product& product, const std::vector<float>& x,
               const std::vector<float>& weight, const std::vector<float>& bias,
               const std::vector<float>& residual, int64_t num_rows) {
  const int64_t outputs = product.num_outputs, depth = product.depth;
  const double step = 0x1p-24 * (8 + 2 * sqrt(static_cast<double>(depth)));
  Sums sums;
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t output = 0; output < outputs; ++output) {
      double sum = 0.0, magnitude = 0.0;
      for (int64_t k = 0; k < depth; ++k) {
        const double term =
            static_cast<double>(x[row * depth + k]) * weight[output * depth + k];
        sum += term;
        magnitude += fabs(term);
      }
      if (product.has_bias) sum += bias[output];
      if (product.has_residual) sum += residual[row * outputs + output];
      sums.values.push_back(sum);
      sums.errors.push_back(step * magnitude + 0x1p-22 * (fabs(sum) + 3.0));
    }
  return sums;
}

// silu(gate) * up.
Sums gated(const Product& product, const Sums& sums) {
  const int64_t half = product.num_outputs / 2;
  Sums out;
  for (size_t at = 0; at < sums.values.size(); at += product.num_outputs)
    for (int64_t i = 0; i < half; ++i) {
      const double gate = sums.values[at + i], up = sums.values[at + half + i];
      const double silu = gate / (1.0 + exp(-gate)), value = silu * up;
      out.values.push_back(value);
      out.errors.push_back(1.2 * fabs(up) * sums.errors[at + i] +
                           fabs(silu) * sums.errors[at + half + i] +
                           (relative_error(product.out_dtype()) + 0x1p-21) * fabs(value) + 1e-30);
    }
  return out;
}

void check_product(Report& report, Random& random, const Product& product) {
  const int64_t outputs = product.num_outputs, depth = product.depth;
  const auto source = random_source(random, product.dtype, outputs * depth);
  TestWeight weight(product.dtype, outputs, depth, product.is_paired, source.data(), product.dtype,
                    outputs);
  std::vector<float> x = random.uniforms(kMostRows * depth);
  const bool is_narrow = product.input_dtype() == Dtype::kBFloat16;
  if (is_narrow) x = rounded_to_bf16(x);
  std::vector<uint16_t> narrow(x.size());
  std::transform(x.begin(), x.end(), narrow.begin(), to_bf16);
  const std::vector<float> bias = random.uniforms(outputs);
  const std::vector<float> residual = random.uniforms(kMostRows * outputs);

  const int64_t columns = product.out_columns();
  const int64_t row_bytes = columns * element_bytes(product.out_dtype());
  // Rows [first, first + num_rows).
  const auto run = [&](int64_t first, int64_t num_rows, Order order, Guarded& out) {
    MatmulArgs args{};
    args.x = is_narrow ? static_cast<const void*>(narrow.data() + first * depth)
                       : static_cast<const void*>(x.data() + first * depth);
    args.weight = weight.view;
    args.bias = product.has_bias ? bias.data() : nullptr;
    args.out = out.as<void>();
    args.out_dtype = product.out_dtype();
    args.num_rows = num_rows;
    if (product.has_residual) {  // in place
      memcpy(out.as<void>(), residual.data() + first * outputs, num_rows * outputs * 4);
      args.residual = out.as<float>();
    }
    run_kernel(kernels().matmul, args, order);
  };

  Guarded all(kMostRows * row_bytes);
  run(0, kMostRows, Order::kForward, all);
  Sums expected = reference(product, x, weight.values, bias, residual, kMostRows);
  if (product.is_paired) expected = gated(product, expected);
  const auto got = read_numbers(all.as<void>(), product.out_dtype(), kMostRows * columns);
  report.expect_near(got.data(), expected.values, expected.errors, product.name());

  for (const int64_t num_rows : {1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 24, 31, 33, 64, 127, 150})
    for (const Order order : kOrders) {
      const int64_t first = num_rows == kMostRows ? 0 : random.below(kMostRows - num_rows);
      Guarded some(num_rows * row_bytes);
      run(first, num_rows, order, some);
      report.expect(some.is_intact() && memcmp(some.as<char>(), all.as<char>() + first * row_bytes,
                                               some.num_bytes()) == 0,
                    product.name() + ": rows " + std::to_string(first) + " + " +
                        std::to_string(num_rows) + " have the same bits");
    }
}

// A tuning is heeded: smaller items are more. (Every check of a product shows that no bit changes.)
template <class Args>
void check_cuts(Report& report, const Kernel<Args>& kernel, Args args,
                ProductTuning Tuning::* part, const std::string& name) {
  const auto num_items = [&](int64_t item_kib, int64_t item_tiles) {
    Tuning wanted = kDefaultTuning;
    wanted.*part = {item_kib, item_tiles, 0};
    set_tuning(wanted);
    const int64_t count = kernel.num_items(args, 2);
    set_tuning(kDefaultTuning);
    return count;
  };
  args.num_rows = 1;
  report.expect(num_items(64, 1) > num_items(512, 1), name + ": items of fewer weights are more");
  args.num_rows = kMostRows;
  report.expect(num_items(1 << 16, 1) > num_items(1 << 16, 10),
                name + ": items of fewer tiles are more");
}

}  // namespace

void check_products(Report& report) {
  Random random(2);
  MatmulArgs floats{};
  floats.weight = {nullptr, Dtype::kBFloat16, 2048, 512, false};
  check_cuts(report, kernels().matmul, floats, &Tuning::floats, "linear");
  QuantizedMatmulArgs quantized{};
  quantized.weight = {{{nullptr, WeightFormat::kQ8_0, 2048}}, 1, 2048, 512, false};
  check_cuts(report, kernels().quantized.matmul, quantized, &Tuning::quantized,
             "quantized linear");
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    check_product(report, random, {dtype, 1, 2, false, true, true});
    check_product(report, random, {dtype, 77, 66, false, true, false});
    check_product(report, random, {dtype, 130, 514, false, false, true});
    check_product(report, random, {dtype, 96, 1030, false, false, false});
    check_product(report, random, {dtype, 2, 64, true, true, false});
    check_product(report, random, {dtype, 148, 300, true, true, false});
    check_product(report, random, {dtype, 192, 576, true, false, false});
  }
}

}  // namespace streamkv::selftest
