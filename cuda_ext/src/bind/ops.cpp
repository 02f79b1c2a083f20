// streamkv._cpu.ops: one op at once on numpy arrays, arguments checked. Attention's are bound in
// attention.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>
#include <type_traits>

#include "arguments.h"
#include "weights.h"

namespace streamkv {
namespace {

using OptionalArray = std::optional<Array>;

constexpr int64_t kMaxColumns = int64_t{1} << 31;

int64_t num_rows(const Array& array) {
  return array.ndim() == 0 ? 0 : static_cast<int64_t>(array.shape(0));
}

int64_t num_columns(const Array& array) {
  return array.ndim() < 2 ? kAny : static_cast<int64_t>(array.shape(1));
}

template <class Owned>
nb::object embedding(Team& team, const Array& token_ids, const Owned& weight) {
  constexpr auto kOp = "embedding";
  const auto& view = check_weight(kOp, weight);
  auto args = no_args(embedding_kernel(view));
  args.weight = view;
  args.token_ids = indices(kOp, "token_ids", token_ids, kAny, view.num_outputs);
  args.num_tokens = num_rows(token_ids);
  const Output out = make_output(Dtype::kFloat32, args.num_tokens, view.depth);
  args.out = static_cast<float*>(out.data);
  run_op(team, embedding_kernel(view), args);
  return out.array;
}

nb::object rms_norm(Team& team, const Array& x, const Array& weight, float eps,
                    const std::string& out_dtype) {
  constexpr auto kOp = "rms_norm";
  RmsNormArgs args;
  args.x = elements<float>(kOp, "x", x, {kAny, kAny});
  args.num_rows = num_rows(x);
  args.hidden = num_columns(x);
  args.weight = elements<float>(kOp, "weight", weight, {args.hidden});
  args.out_dtype = parse_any_dtype(kOp, "out_dtype", out_dtype);
  args.eps = eps;
  const Output out = make_output(args.out_dtype, args.num_rows, args.hidden);
  args.out = out.data;
  run_op(team, kernels().rms_norm, args);
  return out.array;
}

// linear and linear_silu_mul, but for what they write to: MatmulArgs or QuantizedMatmulArgs.
template <class Owned>
auto check_product(const char* op, const Array& x, const Owned& weight, const OptionalArray& bias,
                   bool is_paired) {
  const auto& view = check_weight(op, weight);
  if (view.is_paired != is_paired)
    refuse(op, "weight", is_paired ? "a paired one" : "one that is not paired",
           is_paired ? "one that is not" : "a paired one");
  auto args = no_args(matmul_kernel(view));
  args.weight = view;
  args.x = static_cast<decltype(args.x)>(inputs(op, x, weight.input_dtype(), view.depth));
  args.num_rows = num_rows(x);
  if (bias) args.bias = elements<float>(op, "bias", *bias, {view.num_outputs});
  return args;
}

template <class Owned>
nb::object linear(Team& team, const Array& x, const Owned& weight, const OptionalArray& bias,
                  const OptionalArray& residual) {
  constexpr auto kOp = "linear";
  auto args = check_product(kOp, x, weight, bias, false);
  const int64_t num_outputs = args.weight.num_outputs;
  if (residual)
    args.residual = elements<float>(kOp, "residual", *residual, {args.num_rows, num_outputs});
  const Output out = make_output(Dtype::kFloat32, args.num_rows, num_outputs);
  args.out = out.data;
  run_op(team, matmul_kernel(args.weight), args);
  return out.array;
}

template <class Owned>
nb::object linear_silu_mul(Team& team, const Array& x, const Owned& weight,
                           const OptionalArray& bias,
                           const std::optional<std::string>& out_dtype) {
  constexpr auto kOp = "linear_silu_mul";
  auto args = check_product(kOp, x, weight, bias, true);
  constexpr bool is_quantized = std::is_same_v<Owned, OwnedQuantizedWeight>;
  const auto parse = is_quantized ? parse_any_dtype : parse_dtype;
  args.out_dtype = out_dtype ? parse(kOp, "out_dtype", *out_dtype) : weight.input_dtype();
  const Output out = make_output(args.out_dtype, args.num_rows, args.weight.num_outputs / 2);
  args.out = out.data;
  run_op(team, matmul_kernel(args.weight), args);
  return out.array;
}

nb::object quantize(Team& team, const Array& x) {
  QuantizeArgs args;
  args.x = elements<float>("quantize", "x", x, {kAny, kAny});
  args.num_rows = num_rows(x);
  args.width = num_columns(x);
  const Output out = make_output(Dtype::kInt8, args.num_rows, args.width);
  args.out = static_cast<InputGroup*>(out.data);
  run_op(team, kernels().quantized.quantize, args);
  return out.array;
}

void check_num_heads(const char* op, int64_t num_heads, int64_t num_kv_heads) {
  if (num_heads < 1 || num_kv_heads < 1 || num_heads > kMaxHeads || num_kv_heads > kMaxHeads)
    refuse(op, "num_heads",
           "at least 1 head and 1 KV head, and at most " + std::to_string(kMaxHeads) + " of each",
           std::to_string(num_heads) + " and " + std::to_string(num_kv_heads));
}

nb::object head_rms_norm(Team& team, const Array& qkv, const Array& q_weight,
                         const Array& k_weight, float eps, int64_t num_heads,
                         int64_t num_kv_heads) {
  constexpr auto kOp = "head_rms_norm";
  HeadRmsNormArgs args;
  args.q_weight = elements<float>(kOp, "q_weight", q_weight, {kAny});
  args.head_dim = num_rows(q_weight);
  if (args.head_dim > kMaxColumns)
    refuse(kOp, "q_weight", "at most 2**31 numbers", std::to_string(args.head_dim));
  args.k_weight = elements<float>(kOp, "k_weight", k_weight, {args.head_dim});
  check_num_heads(kOp, num_heads, num_kv_heads);
  args.num_heads = num_heads;
  args.num_kv_heads = num_kv_heads;
  args.eps = eps;
  const int64_t width = (num_heads + 2 * num_kv_heads) * args.head_dim;
  args.qkv = elements<float>(kOp, "qkv", qkv, {kAny, width});
  args.num_tokens = num_rows(qkv);
  const Output out = make_output(Dtype::kFloat32, args.num_tokens, width);
  args.out = static_cast<float*>(out.data);
  run_op(team, kernels().head_rms_norm, args);
  return out.array;
}

nb::object rotary(Team& team, const Array& qkv, const Array& positions, const Array& cos_sin,
                  int64_t num_heads, int64_t num_kv_heads) {
  constexpr auto kOp = "rotary";
  RotaryArgs args;
  args.cos_sin = elements<float>(kOp, "cos_sin", cos_sin, {kAny, kAny});
  args.head_dim = num_columns(cos_sin);
  if (args.head_dim % 2 != 0 || args.head_dim > kMaxColumns)
    refuse(kOp, "cos_sin", "an even number of columns up to 2**31",
           std::to_string(args.head_dim));
  check_num_heads(kOp, num_heads, num_kv_heads);
  args.num_rotated = num_heads + num_kv_heads;
  args.num_copied = num_kv_heads;
  const int64_t width = (args.num_rotated + args.num_copied) * args.head_dim;
  args.qkv = elements<float>(kOp, "qkv", qkv, {kAny, width});
  args.num_tokens = num_rows(qkv);
  args.positions = indices(kOp, "positions", positions, args.num_tokens, num_rows(cos_sin));
  const Output out = make_output(Dtype::kFloat32, args.num_tokens, width);
  args.out = static_cast<float*>(out.data);
  run_op(team, kernels().rotary, args);
  return out.array;
}

nb::object select_rows(Team& team, const Array& x, const Array& rows) {
  constexpr auto kOp = "select_rows";
  SelectRowsArgs args;
  args.x = elements<float>(kOp, "x", x, {kAny, kAny});
  args.width = num_columns(x);
  args.rows = indices(kOp, "rows", rows, kAny, num_rows(x));
  args.num_rows = num_rows(rows);
  const Output out = make_output(Dtype::kFloat32, args.num_rows, args.width);
  args.out = static_cast<float*>(out.data);
  run_op(team, kernels().select_rows, args);
  return out.array;
}

// Ops with a weight, for a class of them.
template <class Owned>
void bind_products(nb::module_& ops) {
  ops.def("embedding", &embedding<Owned>, nb::arg("team"), nb::arg("token_ids"),
          nb::arg("weight"));
  ops.def("linear", &linear<Owned>, nb::arg("team"), nb::arg("x"), nb::arg("weight"),
          nb::arg("bias").none() = nb::none(), nb::arg("residual").none() = nb::none());
  ops.def("linear_silu_mul", &linear_silu_mul<Owned>, nb::arg("team"), nb::arg("x"),
          nb::arg("weight"), nb::arg("bias").none() = nb::none(),
          nb::arg("out_dtype").none() = nb::none());
}

}  // namespace

void bind_ops(nb::module_& m) {
  nb::module_ ops = m.def_submodule("ops", "One op at once on numpy arrays.");
  bind_products<OwnedWeight>(ops);
  bind_products<OwnedQuantizedWeight>(ops);
  ops.def("quantize", &quantize, nb::arg("team"), nb::arg("x"),
          "Rows of float32 as int8 inputs of products.");
  ops.def("rms_norm", &rms_norm, nb::arg("team"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"),
          nb::arg("out_dtype"));
  ops.def("head_rms_norm", &head_rms_norm, nb::arg("team"), nb::arg("qkv"), nb::arg("q_weight"),
          nb::arg("k_weight"), nb::arg("eps"), nb::arg("num_heads"), nb::arg("num_kv_heads"));
  ops.def("rotary", &rotary, nb::arg("team"), nb::arg("qkv"), nb::arg("positions"),
          nb::arg("cos_sin"), nb::arg("num_heads"), nb::arg("num_kv_heads"));
  ops.def("select_rows", &select_rows, nb::arg("team"), nb::arg("x"), nb::arg("rows"));
}

}  // namespace streamkv
