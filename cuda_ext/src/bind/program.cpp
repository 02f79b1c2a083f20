// streamkv._cpu.Program: see program.h. Keeps what it is given alive.
#include "streamkv/program.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>

#include "arguments.h"
#include "batch.h"
#include "streamkv/batch_arrays.h"
#include "weights.h"

namespace streamkv {
namespace {

using OptionalArray = std::optional<Array>;

Extent parse_extent(const std::string& name) {
  if (name == "tokens") return Extent::kTokens;
  if (name == "logit_rows") return Extent::kLogitRows;
  refuse("add_buffer", "extent", "'tokens' or 'logit_rows'", "'" + name + "'");
}

template <class Owned>
void add_embedding(Program& program, const Owned& weight, BufferId out) {
  program.add_embedding(check_weight("embedding", weight), out);
}

void add_rms_norm(Program& program, BufferId x, const Array& weight, float eps, BufferId out,
                  const std::string& out_dtype) {
  const float* values = elements<float>("rms_norm", "weight", weight, {kAny});
  program.add_rms_norm(x, values, static_cast<int64_t>(weight.shape(0)), eps, out,
                       parse_any_dtype("rms_norm", "out_dtype", out_dtype));
}

const float* check_bias(const char* op, const OptionalArray& bias, int64_t num_outputs) {
  return bias ? elements<float>(op, "bias", *bias, {num_outputs}) : nullptr;
}

template <class Owned>
void add_linear(Program& program, BufferId x, const Owned& weight, const OptionalArray& bias,
                BufferId residual, BufferId out) {
  const auto& view = check_weight("linear", weight);
  program.add_linear(x, view, check_bias("linear", bias, view.num_outputs), residual, out);
}

template <class Owned>
void add_linear_silu_mul(Program& program, BufferId x, const Owned& weight,
                         const OptionalArray& bias, BufferId out, const std::string& out_dtype) {
  constexpr auto kOp = "linear_silu_mul";
  const auto& view = check_weight(kOp, weight);
  program.add_linear_silu_mul(x, view, check_bias(kOp, bias, view.num_outputs), out,
                              parse_any_dtype(kOp, "out_dtype", out_dtype));
}

void add_paged_attention(Program& program, BufferId qkv, int64_t layer, int64_t num_heads,
                         float scale, BufferId out, const std::string& out_dtype) {
  program.add_paged_attention(qkv, layer, num_heads, scale, out,
                              parse_any_dtype("paged_attention", "out_dtype", out_dtype));
}

// The heads of the cache.
const KvCache& check_num_kv_heads(const char* op, const Program& program, int64_t num_kv_heads) {
  const KvCache& cache = program.cache();
  if (num_kv_heads != cache.num_kv_heads)
    refuse(op, "num_kv_heads", std::to_string(cache.num_kv_heads) + " as the cache has",
           std::to_string(num_kv_heads));
  return cache;
}

void add_head_rms_norm(Program& program, BufferId qkv, const Array& q_weight,
                       const Array& k_weight, float eps, int64_t num_heads, int64_t num_kv_heads,
                       BufferId out) {
  constexpr auto kOp = "head_rms_norm";
  const KvCache& cache = check_num_kv_heads(kOp, program, num_kv_heads);
  const float* q_values = elements<float>(kOp, "q_weight", q_weight, {cache.head_dim});
  const float* k_values = elements<float>(kOp, "k_weight", k_weight, {cache.head_dim});
  program.add_head_rms_norm(qkv, q_values, k_values, eps, num_heads, out);
}

void add_rotary(Program& program, BufferId qkv, const Array& cos_sin, int64_t num_heads,
                int64_t num_kv_heads, BufferId out) {
  const KvCache& cache = check_num_kv_heads("rotary", program, num_kv_heads);
  const float* table = elements<float>("rotary", "cos_sin", cos_sin, {kAny, cache.head_dim});
  program.add_rotary(qkv, table, static_cast<int64_t>(cos_sin.shape(0)), num_heads, out);
}

void check_below(const char* argument, const int32_t* values, int64_t length, int64_t limit) {
  const int32_t* largest = std::max_element(values, values + length);
  if (length > 0 && *largest >= limit)
    refuse("run", argument, "numbers from 0 to " + std::to_string(limit - 1),
           std::to_string(*largest) + " at " + std::to_string(largest - values));
}

// Kernels read a batch unchecked. What its constructor could not know is checked here.
void run(Program& program, const BatchArrays& arrays, Team& team, int64_t first, int64_t last) {
  const Batch batch = arrays.view();
  const KvLayer cache = program.cache().layer(0);
  check_below("token_ids", batch.token_ids, batch.num_tokens, program.vocab_size());
  check_below("positions", batch.positions, batch.num_tokens, program.max_positions());
  check_slots("run", batch.slots, batch.num_tokens, cache);
  check_contexts("run", batch, cache);
  const nb::gil_scoped_release no_gil;
  program.run(batch, team, first, last == -1 ? program.num_ops() : last);
}

nb::object read(const Program& program, BufferId buffer) {
  const auto rows = static_cast<size_t>(program.num_rows(buffer));
  const auto row_bytes = static_cast<size_t>(program.row_bytes(buffer));
  auto* data = new uint8_t[rows * row_bytes];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
  std::copy_n(static_cast<const uint8_t*>(program.buffer(buffer)), rows * row_bytes, data);
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(data, {rows, row_bytes}, owner));
}

void write(Program& program, BufferId buffer, const Array& rows, int64_t num_rows) {
  const uint8_t* data =
      elements<uint8_t>("write", "rows", rows, {num_rows, program.row_bytes(buffer)});
  program.set_num_rows(buffer, num_rows);
  std::copy_n(data, rows.size(), static_cast<uint8_t*>(program.buffer(buffer)));
}

// Ops with a weight, for a class of them. Arrays are kept as they come (`noconvert`): a converted
// one would be freed after the call.
template <class Owned>
void bind_products(nb::class_<Program>& program) {
  program
      .def("add_embedding", &add_embedding<Owned>, nb::arg("weight"), nb::arg("out"),
           nb::keep_alive<1, 2>())
      .def("add_linear", &add_linear<Owned>, nb::arg("x"), nb::arg("weight"),
           nb::arg("bias").none().noconvert(), nb::arg("residual") = -1, nb::kw_only(),
           nb::arg("out"), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def("add_linear_silu_mul", &add_linear_silu_mul<Owned>, nb::arg("x"), nb::arg("weight"),
           nb::arg("bias").none().noconvert(), nb::arg("out"), nb::arg("out_dtype"),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());
}

}  // namespace

void bind_program(nb::module_& m) {
  nb::class_<Program> program(m, "Program", "A model's forward, recorded once, run for any step.");
  bind_products<OwnedWeight>(program);
  bind_products<OwnedQuantizedWeight>(program);
  program
      .def(nb::init<KvCache&>(), nb::arg("cache"), nb::keep_alive<1, 2>())
      .def("add_buffer",
           [](Program& program, const std::string& extent, int64_t row_bytes, int64_t place) {
             return program.add_buffer(parse_extent(extent), row_bytes, place);
           },
           nb::arg("extent"), nb::arg("row_bytes"), nb::arg("place"))
      .def("add_rms_norm", &add_rms_norm, nb::arg("x"), nb::arg("weight").noconvert(),
           nb::arg("eps"), nb::arg("out"), nb::arg("out_dtype"), nb::keep_alive<1, 3>())
      .def("add_head_rms_norm", &add_head_rms_norm, nb::arg("qkv"),
           nb::arg("q_weight").noconvert(), nb::arg("k_weight").noconvert(), nb::arg("eps"),
           nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("out"), nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 4>())
      .def("add_rotary", &add_rotary, nb::arg("qkv"), nb::arg("cos_sin").noconvert(),
           nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("out"), nb::keep_alive<1, 3>())
      .def("add_store_kv", &Program::add_store_kv, nb::arg("qkv"), nb::arg("layer"),
           nb::arg("num_heads"))
      .def("add_paged_attention", &add_paged_attention, nb::arg("qkv"), nb::arg("layer"),
           nb::arg("num_heads"), nb::arg("scale"), nb::arg("out"), nb::arg("out_dtype"))
      .def("add_quantize", &Program::add_quantize, nb::arg("x"), nb::arg("width"), nb::arg("out"))
      .def("add_select_rows", &Program::add_select_rows, nb::arg("x"), nb::arg("out"))
      .def_prop_ro("num_ops", &Program::num_ops)
      .def("reserve", &Program::reserve, nb::arg("max_tokens"), nb::arg("max_logit_rows"),
           "Takes memory for the largest step, once all buffers are added.")
      .def("run", &run, nb::arg("batch"), nb::arg("team"), nb::arg("first") = 0,
           nb::arg("last") = -1, "Ops [first, last) of a step; -1: to the end.")
      .def("read", &read, nb::arg("buffer"), "uint8 [rows, row_bytes] of the last step, a copy.")
      .def("write", &write, nb::arg("buffer"), nb::arg("rows"), nb::arg("num_rows"),
           "Fills a buffer as if the last step had had so many rows in its extent.")
      .def("profile", &Program::profile, nb::arg("on"), "Begins at zero.")
      .def_prop_ro("op_ns", &Program::op_ns, "Of each op, in all profiled runs.")
      .def_prop_ro("num_profiled_runs", &Program::num_profiled_runs);
}

}  // namespace streamkv
