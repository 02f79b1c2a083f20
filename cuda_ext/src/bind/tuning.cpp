// streamkv._cpu's tuning of products, as a dict of whole numbers; see kernels.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "streamkv/kernels.h"

namespace nb = nanobind;

namespace streamkv {
namespace {

constexpr int64_t kLine = 64;  // bytes that a cache fetches

// A number of a tuning and what it may be. An item's sums must fit in the scratch memory: 64 tiles
// of a gate and what it gates take a fifth of it.
struct Field {
  const char* name;
  ProductTuning Tuning::* part;
  int64_t ProductTuning::* value;
  int64_t least, most, step;
};

constexpr Field kFields[] = {
    {"item_kib", &Tuning::quantized, &ProductTuning::item_kib, 1, 1 << 16, 1},
    {"item_tiles", &Tuning::quantized, &ProductTuning::item_tiles, 1, 64, 1},
    {"ahead", &Tuning::quantized, &ProductTuning::ahead_bytes, 0, 1 << 20, kLine},
    {"float_item_kib", &Tuning::floats, &ProductTuning::item_kib, 1, 1 << 16, 1},
    {"float_item_tiles", &Tuning::floats, &ProductTuning::item_tiles, 1, 64, 1},
    {"float_ahead", &Tuning::floats, &ProductTuning::ahead_bytes, 0, 1 << 20, kLine},
};

nb::dict as_dict(const Tuning& tuning) {
  nb::dict values;
  for (const Field& field : kFields) values[field.name] = tuning.*field.part.*field.value;
  return values;
}

const Field& find_field(const std::string& name) {
  std::string names;
  for (const Field& field : kFields) {
    if (name == field.name) return field;
    names += (names.empty() ? "" : ", ") + std::string(field.name);
  }
  throw std::invalid_argument("tuning: expected names among " + names + ", got '" + name + "'");
}

int64_t check_value(const Field& field, const nb::handle& given) {
  int64_t value;
  const bool is_whole = nb::isinstance<nb::int_>(given) && !nb::isinstance<nb::bool_>(given) &&
                        nb::try_cast(given, value);
  if (is_whole && value >= field.least && value <= field.most && value % field.step == 0)
    return value;
  const std::string kind =
      field.step == 1 ? "a whole number" : "a multiple of " + std::to_string(field.step);
  throw std::invalid_argument("tuning: " + std::string(field.name) + ": expected " + kind +
                              " from " + std::to_string(field.least) + " to " +
                              std::to_string(field.most) + ", got " + nb::repr(given).c_str());
}

void set_tuning_dict(const nb::dict& values) {
  Tuning wanted = kDefaultTuning;
  for (const auto [name, value] : values) {
    const Field& field = find_field(nb::str(name).c_str());
    wanted.*field.part.*field.value = check_value(field, value);
  }
  set_tuning(wanted);
}

}  // namespace

void bind_tuning(nb::module_& m) {
  m.def("tuning", [] { return as_dict(tuning); },
        "How products are cut and what they fetch ahead; no bit of a result depends on it.");
  m.def("default_tuning", [] { return as_dict(kDefaultTuning); });
  m.def("set_tuning", &set_tuning_dict, nb::arg("values"),
        "These, and the defaults for what isn't named. Not while any op runs.");
}

}  // namespace streamkv
