// streamkv._cpu.PackedWeight, and which instruction set packs and computes.
#include "weights.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <vector>

namespace streamkv {
namespace {

constexpr int64_t kPackItemRows = 256;
constexpr int64_t kArenaBytes = 64 << 20;

OwnedWeight make_weight(const std::string& dtype, int64_t num_outputs, int64_t depth,
                        bool is_paired, WeightArena* arena) {
  OwnedWeight weight;
  weight.view = {nullptr, parse_dtype("PackedWeight", "dtype", dtype), num_outputs, depth,
                 is_paired};
  if (num_outputs < 1 || num_outputs > kMaxLength || (is_paired && num_outputs % 2 != 0))
    refuse("PackedWeight", "num_outputs",
           is_paired ? "a positive even number up to 2**31 - 1 for a paired weight"
                     : "a positive number up to 2**31 - 1",
           std::to_string(num_outputs));
  if (depth < 2 || depth > kMaxLength || depth % 2 != 0)
    refuse("PackedWeight", "depth", "a positive even number up to 2**31 - 1",
           std::to_string(depth));
  weight.table = &kernels();
  // As float32, the last panels filled up.
  const int64_t max_outputs = kMaxBytes / (depth * 4) - 2 * weight.table->panel;
  if (num_outputs > max_outputs)
    refuse("PackedWeight", "num_outputs",
           "at most " + std::to_string(max_outputs) + " of depth " + std::to_string(depth),
           std::to_string(num_outputs));
  const WeightArena::Piece piece = take_from(arena, weight.num_bytes());
  weight.memory = piece.memory;
  weight.view.data = piece.data;
  return weight;
}

PackArgs check_source(const OwnedWeight& weight, const Array& source, int64_t first_output) {
  constexpr auto kOp = "PackedWeight.pack";
  PackArgs args;
  args.weight = weight.view;
  args.first_output = first_output;
  args.source_dtype = check_rows(kOp, source, weight.view.depth);
  args.source = source.data();
  args.num_rows = static_cast<int64_t>(source.shape(0));
  check_range(kOp, weight, first_output, args.num_rows);
  return args;
}

// A slice of the rows. Those of two items may share a vector: pack() leaves other lanes alone.
void pack_item(const void* bound, int64_t item, void*) {
  const auto& [table, whole] = *static_cast<const std::pair<const Kernels*, PackArgs>*>(bound);
  const int64_t row_bytes = whole.weight.depth * (whole.source_dtype == Dtype::kFloat32 ? 4 : 2);
  const int64_t begin = item * kPackItemRows;
  PackArgs args = whole;
  args.source = static_cast<const char*>(whole.source) + begin * row_bytes;
  args.first_output += begin;
  args.num_rows = std::min(kPackItemRows, whole.num_rows - begin);
  table->pack(args);
}

void pack(OwnedWeight& weight, const Array& source, int64_t first_output, Team* team) {
  const std::pair<const Kernels*, PackArgs> bound{weight.table,
                                                  check_source(weight, source, first_output)};
  const int64_t num_items = (bound.second.num_rows + kPackItemRows - 1) / kPackItemRows;
  const nb::gil_scoped_release no_gil;
  if (team == nullptr) return weight.table->pack(bound.second);
  const Phase phase{num_items, pack_item, &bound};
  team->run(&phase, 1);
}

nb::object unpack(const OwnedWeight& weight, int64_t first_output, int64_t num_rows) {
  check_range("PackedWeight.unpack", weight, first_output, num_rows);
  const Output out = make_output(Dtype::kFloat32, num_rows, weight.view.depth);
  const nb::gil_scoped_release no_gil;
  weight.table->unpack(weight.view, first_output, num_rows, static_cast<float*>(out.data));
  return out.array;
}

nb::list buffers(const OwnedWeight& weight) {
  nb::list arrays;
  arrays.append(bytes_of(weight.memory, weight.view.data, weight.num_bytes()));
  return arrays;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (int i = 0, count = num_available_isas(); i < count; ++i) names.push_back(available_isa(i));
  return names;
}

}  // namespace

WeightArena::Piece WeightArena::alone(int64_t num_bytes) {
  auto memory = std::make_shared<Memory>(num_bytes, true);
  return {memory, memory->data()};
}

WeightArena::Piece WeightArena::take(int64_t num_bytes) {
  if (num_bytes > kArenaBytes / 2) return alone(num_bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (memory_ == nullptr || num_taken_ + num_bytes > kArenaBytes) {
    memory_ = std::make_shared<Memory>(kArenaBytes, true);
    num_taken_ = 0;
  }
  void* const data = static_cast<char*>(memory_->data()) + num_taken_;
  num_taken_ += (num_bytes + 63) / 64 * 64;
  return {memory_, data};
}

void bind_weights(nb::module_& m) {
  m.def("isa", [] { return std::string(kernels().isa); });
  m.def("available_isas", &available_isas, "Instruction sets this CPU runs, best first.");
  m.def("set_isa", [](const std::string& name) { set_isa(name.c_str()); }, nb::arg("name"),
        "Chooses the kernels, for weights and caches made from now on.");

  m.attr("KERNEL_REVISION") = kKernelRevision;

  nb::class_<WeightArena>(m, "WeightArena", "Where the weights of a model lie side by side.")
      .def(nb::init<>());
  nb::class_<OwnedWeight>(m, "PackedWeight", "A matrix [num_outputs, depth] as products read it.")
      .def("__init__",
           [](OwnedWeight* self, const std::string& dtype, int64_t num_outputs, int64_t depth,
              bool is_paired, WeightArena* arena) {
             new (self) OwnedWeight(make_weight(dtype, num_outputs, depth, is_paired, arena));
           },
           nb::arg("dtype"), nb::arg("num_outputs"), nb::arg("depth"),
           nb::arg("is_paired") = false, nb::arg("arena").none() = nb::none(),
           "In memory of its own, or in an arena.")
      .def("pack", &pack, nb::arg("source"), nb::arg("first_output"),
           nb::arg("team").none() = nb::none(),
           "Takes rows of the matrix, float32, float16 or uint16 (bfloat16 bits).")
      .def("unpack", &unpack, nb::arg("first_output"), nb::arg("num_rows"),
           "The same rows as float32.")
      .def("buffers", &buffers, "The packed bytes.")
      .def_prop_ro("dtype", [](const OwnedWeight& w) { return dtype_name(w.view.dtype); })
      .def_prop_ro("num_outputs", [](const OwnedWeight& w) { return w.view.num_outputs; })
      .def_prop_ro("depth", [](const OwnedWeight& w) { return w.view.depth; })
      .def_prop_ro("is_paired", [](const OwnedWeight& w) { return w.view.is_paired; })
      .def_prop_ro("num_bytes", [](const OwnedWeight& w) { return w.num_bytes(); })
      .def_prop_ro("input_dtype", [](const OwnedWeight& w) { return dtype_name(w.input_dtype()); },
                   "What the left side of a product with it must be.");
}

}  // namespace streamkv
