// streamkv._cpu.QuantizedWeight, and float rows to quantized ones.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <vector>

#include "streamkv/quantize.h"
#include "weights.h"

namespace streamkv {
namespace {

constexpr int64_t kPackItemRows = 8 * kQuantizedPanel;
constexpr int64_t kQuantizeItems = 256;

WeightFormat parse_weight_format(const char* op, const char* argument, const std::string& name) {
  WeightFormat format;
  if (parse_format(name.c_str(), &format)) return format;
  std::string names;
  for (int i = 0; i < kNumWeightFormats; ++i)
    names += (i == 0 ? "" : ", ") + std::string(format_name(static_cast<WeightFormat>(i)));
  refuse(op, argument, "one of " + names, "'" + name + "'");
}

void check_depth(const char* op, WeightFormat format, int64_t depth) {
  const int64_t multiple = block_depth(format);
  if (depth < 1 || depth > kMaxLength || depth % multiple != 0)
    refuse(op, "depth", "a positive multiple of " + std::to_string(multiple) + " up to 2**31 - 1" +
           " for " + format_name(format), std::to_string(depth));
}

// --- making one ---------------------------------------------------------------------------------

constexpr auto kWeight = "QuantizedWeight";

void check_parts(const std::vector<std::string>& formats, const std::vector<int64_t>& outputs,
                 int64_t depth, bool is_paired) {
  const auto num_parts = static_cast<int64_t>(formats.size());
  if (num_parts < 1 || num_parts > kMaxWeightParts || (is_paired && num_parts != 2))
    refuse(kWeight, "formats",
           is_paired ? "two for a paired weight"
                     : "one for each part, 1 to " + std::to_string(kMaxWeightParts),
           std::to_string(num_parts));
  if (formats.size() != outputs.size())
    refuse(kWeight, "outputs", "one number for each of the " + std::to_string(num_parts) +
           " formats", std::to_string(outputs.size()));
  int64_t num_outputs = 0;
  for (int64_t part = 0; part < num_parts; ++part) {
    check_depth(kWeight, parse_weight_format(kWeight, "formats", formats[part]), depth);
    if (outputs[part] < 1 || outputs[part] > kMaxLength - num_outputs)
      refuse(kWeight, "outputs", "positive numbers up to 2**31 - 1 together",
             std::to_string(outputs[part]));
    num_outputs += outputs[part];
  }
  if (is_paired && outputs[0] != outputs[1])
    refuse(kWeight, "outputs", "as many gates as what they gate",
           std::to_string(outputs[0]) + " and " + std::to_string(outputs[1]));
  // At most 8 bits and scales to a value, the last panels filled up.
  const int64_t max_outputs = kMaxBytes / (depth * 2 + 64) - kMaxWeightParts * kQuantizedPanel;
  if (num_outputs > max_outputs)
    refuse(kWeight, "outputs", "at most " + std::to_string(max_outputs) + " of depth " +
           std::to_string(depth), std::to_string(num_outputs));
}

OwnedQuantizedWeight make_weight(const std::vector<std::string>& formats,
                                 const std::vector<int64_t>& outputs, int64_t depth,
                                 bool is_paired, WeightArena* arena) {
  check_parts(formats, outputs, depth, is_paired);
  OwnedQuantizedWeight weight;
  weight.view = {};
  weight.view.num_parts = static_cast<int64_t>(formats.size());
  weight.view.depth = depth;
  weight.view.is_paired = is_paired;
  weight.table = &kernels();
  int64_t num_bytes = 0;
  for (int64_t i = 0; i < weight.view.num_parts; ++i) {
    weight.view.parts[i] = {nullptr, parse_weight_format(kWeight, "formats", formats[i]),
                            outputs[i]};
    weight.view.num_outputs += outputs[i];
    num_bytes += weight.part_bytes(i);
  }
  const WeightArena::Piece piece = take_from(arena, num_bytes);
  weight.memory = piece.memory;
  const char* data = static_cast<const char*>(piece.data);
  for (int64_t i = 0; i < weight.view.num_parts; ++i) {
    weight.view.parts[i].data = data;  // 64-byte aligned: parts are whole lines
    data += weight.part_bytes(i);
  }
  return weight;
}

// --- rows in and out ----------------------------------------------------------------------------

QuantizedPackArgs check_source(const OwnedQuantizedWeight& weight, const Array& source,
                               int64_t part, int64_t first_output) {
  constexpr auto kOp = "QuantizedWeight.pack";
  if (part < 0 || part >= weight.view.num_parts)
    refuse(kOp, "part", "0 to " + std::to_string(weight.view.num_parts - 1),
           std::to_string(part));
  QuantizedPackArgs args;
  args.part = weight.view.parts[part];
  args.depth = weight.view.depth;
  args.source = elements<uint8_t>(kOp, "source", source,
                                  {kAny, source_row_bytes(args.part.format, args.depth)});
  args.first_output = first_output;
  args.num_rows = static_cast<int64_t>(source.shape(0));
  const int64_t outputs = args.part.num_outputs;
  if (first_output < 0 || args.num_rows > outputs || first_output > outputs - args.num_rows)
    refuse(kOp, "first_output", "rows inside the part's " + std::to_string(outputs) + " outputs",
           std::to_string(args.num_rows) + " from " + std::to_string(first_output));
  const int64_t end = first_output + args.num_rows;
  if (first_output % kQuantizedPanel != 0 || (end % kQuantizedPanel != 0 && end != outputs))
    refuse(kOp, "first_output", "whole panels of " + std::to_string(kQuantizedPanel) +
           " outputs, but for the part's last",
           std::to_string(args.num_rows) + " from " + std::to_string(first_output));
  return args;
}

struct Packing {
  const Kernels* table;
  QuantizedPackArgs whole;
};

void pack_item(const void* bound, int64_t item, void*) {
  const auto& [table, whole] = *static_cast<const Packing*>(bound);
  const int64_t begin = item * kPackItemRows;
  QuantizedPackArgs args = whole;
  args.source = static_cast<const char*>(whole.source) +
                begin * source_row_bytes(whole.part.format, whole.depth);
  args.first_output += begin;
  args.num_rows = std::min(kPackItemRows, whole.num_rows - begin);
  table->quantized.pack(args);
}

// By a team or alone, the interpreter free.
void run_items(Team* team, const Phase& phase) {
  const nb::gil_scoped_release no_gil;
  if (team != nullptr) return team->run(&phase, 1);
  for (int64_t i = 0; i < phase.num_items; ++i) phase.run(phase.args, i, nullptr);
}

void pack(OwnedQuantizedWeight& weight, const Array& source, int64_t part, int64_t first_output,
          Team* team) {
  const Packing packing{weight.table, check_source(weight, source, part, first_output)};
  const int64_t num_items = (packing.whole.num_rows + kPackItemRows - 1) / kPackItemRows;
  run_items(team, {num_items, pack_item, &packing});
}

nb::object unpack(const OwnedQuantizedWeight& weight, int64_t first_output, int64_t num_rows) {
  check_range("QuantizedWeight.unpack", weight, first_output, num_rows);
  const Output out = make_output(Dtype::kFloat32, num_rows, weight.view.depth);
  const nb::gil_scoped_release no_gil;
  weight.table->quantized.unpack(weight.view, first_output, num_rows,
                                 static_cast<float*>(out.data));
  return out.array;
}

// Each array keeps the memory, the weight may go.
nb::list buffers(const OwnedQuantizedWeight& weight) {
  nb::list arrays;
  for (int64_t i = 0; i < weight.view.num_parts; ++i)
    arrays.append(bytes_of(weight.memory, weight.view.parts[i].data, weight.part_bytes(i)));
  return arrays;
}

int64_t num_bytes(const OwnedQuantizedWeight& weight) {
  int64_t total = 0;
  for (int64_t i = 0; i < weight.view.num_parts; ++i) total += weight.part_bytes(i);
  return total;
}

std::vector<std::string> formats(const OwnedQuantizedWeight& weight) {
  std::vector<std::string> names;
  for (int64_t i = 0; i < weight.view.num_parts; ++i)
    names.push_back(format_name(weight.view.parts[i].format));
  return names;
}

std::vector<int64_t> outputs(const OwnedQuantizedWeight& weight) {
  std::vector<int64_t> numbers;
  for (int64_t i = 0; i < weight.view.num_parts; ++i)
    numbers.push_back(weight.view.parts[i].num_outputs);
  return numbers;
}

// --- quantizing ---------------------------------------------------------------------------------

int64_t row_bytes(const std::string& name, int64_t depth) {
  const WeightFormat format = parse_weight_format("row_bytes", "format", name);
  check_depth("row_bytes", format, depth);
  return source_row_bytes(format, depth);
}

struct Quantizing {
  WeightFormat format;
  Dtype source_dtype;
  const void* source;  // [num_rows, depth]
  uint8_t* out;
  int64_t num_rows, depth, item_rows;
  QuantizeReport* reports;  // of items
};

void quantize_item(const void* bound, int64_t item, void*) {
  const auto& q = *static_cast<const Quantizing*>(bound);
  const int64_t x_bytes = input_row_bytes(q.source_dtype, q.depth);
  const int64_t out_bytes = source_row_bytes(q.format, q.depth);
  const int64_t end = std::min((item + 1) * q.item_rows, q.num_rows);
  for (int64_t row = item * q.item_rows; row < end; ++row)
    q.reports[item].add(quantize_row(q.format, static_cast<const char*>(q.source) + row * x_bytes,
                                     q.source_dtype, q.depth, q.out + row * out_bytes));
}

nb::object quantize_reporting(const Array& source, const std::string& name, Team* team) {
  constexpr auto kOp = "quantize";
  Quantizing q;
  q.format = parse_weight_format(kOp, "format", name);
  if (!can_quantize(q.format))
    refuse(kOp, "format", "'int8', 'Q4_0', 'Q4_1' or 'Q8_0'", "'" + name + "'");
  q.source_dtype = check_rows(kOp, source, kAny);
  q.source = source.data();
  q.num_rows = static_cast<int64_t>(source.shape(0));
  q.depth = static_cast<int64_t>(source.shape(1));
  check_depth(kOp, q.format, q.depth);
  const Output out = make_output_of<uint8_t>(q.num_rows, source_row_bytes(q.format, q.depth));
  q.out = static_cast<uint8_t*>(out.data);
  q.item_rows = q.num_rows / kQuantizeItems + 1;
  const int64_t num_items = (q.num_rows + q.item_rows - 1) / q.item_rows;
  std::vector<QuantizeReport> reports(num_items);
  q.reports = reports.data();
  run_items(team, {num_items, quantize_item, &q});
  QuantizeReport report;
  for (const QuantizeReport& item : reports) report.add(item);
  return nb::make_tuple(out.array, report.largest, report.lost_error);
}

nb::object quantize(const Array& source, const std::string& name, Team* team) {
  return nb::object(quantize_reporting(source, name, team)[0]);
}

}  // namespace

void bind_quantized(nb::module_& m) {
  m.def("row_bytes", &row_bytes, nb::arg("format"), nb::arg("depth"),
        "Of a row of so many values as files have it.");
  m.def("quantize", &quantize, nb::arg("source"), nb::arg("format"),
        nb::arg("team").none() = nb::none(),
        "Rows of float32, float16 or uint16 (bfloat16 bits) to rows of int8, Q4_0, Q4_1 or Q8_0.");
  m.def("quantize_reporting", &quantize_reporting, nb::arg("source"), nb::arg("format"),
        nb::arg("team").none() = nb::none(),
        "The same, with the largest magnitude and the largest error (root of the mean square of a "
        "block) of what float16 scales can't hold: 0 if there is none, infinite if too large.");

  nb::class_<OwnedQuantizedWeight>(m, "QuantizedWeight",
                                   "A matrix of a few bits a value, as products read it.")
      .def("__init__",
           [](OwnedQuantizedWeight* self, const std::vector<std::string>& formats,
              const std::vector<int64_t>& outputs, int64_t depth, bool is_paired,
              WeightArena* arena) {
             new (self) OwnedQuantizedWeight(
                 make_weight(formats, outputs, depth, is_paired, arena));
           },
           nb::arg("formats"), nb::arg("outputs"), nb::arg("depth"), nb::arg("is_paired") = false,
           nb::arg("arena").none() = nb::none(),
           "Parts of one format each, one after another; in memory of its own, or in an arena.")
      .def("pack", &pack, nb::arg("source"), nb::arg("part"), nb::arg("first_output"),
           nb::arg("team").none() = nb::none(),
           "Takes rows of a part as files have them, uint8 [rows, row_bytes]; int8: a float32 "
           "scale, then the values.")
      .def("unpack", &unpack, nb::arg("first_output"), nb::arg("num_rows"),
           "Rows of the matrix as float32.")
      .def("buffers", &buffers, "The packed bytes of each part, writable.")
      .def_prop_ro("formats", &formats)
      .def_prop_ro("outputs", &outputs)
      .def_prop_ro("num_outputs", [](const OwnedQuantizedWeight& w) { return w.view.num_outputs; })
      .def_prop_ro("depth", [](const OwnedQuantizedWeight& w) { return w.view.depth; })
      .def_prop_ro("is_paired", [](const OwnedQuantizedWeight& w) { return w.view.is_paired; })
      .def_prop_ro("num_bytes", &num_bytes)
      .def_prop_ro("input_dtype",
                   [](const OwnedQuantizedWeight& w) { return dtype_name(w.input_dtype()); });
}

}  // namespace streamkv
