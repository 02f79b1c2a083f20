// streamkv._cpu.MaskBoard: see mask_board.h.
#include "streamkv/mask_board.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "messages.h"

namespace nb = nanobind;

namespace streamkv {
namespace {

// Keeps the board alive.
nb::object words(nb::handle self, int64_t slot) {
  auto& board = nb::cast<MaskBoard&>(self);
  const size_t shape[1] = {static_cast<size_t>(board.num_words())};
  const nb::ndarray<nb::numpy, int32_t> array(board.words(slot), 1, shape, self);
  return nb::steal(PyMemoryView_FromObject(nb::cast(array).ptr()));
}

std::vector<bool> find(MaskBoard& board, const std::vector<int64_t>& slots,
                       const std::vector<int64_t>& positions, double timeout_s) {
  if (slots.size() != positions.size())
    throw std::invalid_argument("MaskBoard: positions: expected " + std::to_string(slots.size()) +
                                ", one for each slot, got " + std::to_string(positions.size()));
  std::vector<WantedMask> wanted;
  for (size_t i = 0; i < slots.size(); ++i) wanted.push_back({slots[i], positions[i]});
  {
    const nb::gil_scoped_release no_gil;
    board.find(wanted.data(), static_cast<int64_t>(wanted.size()),
               MaskBoard::Clock::now() + to_nanoseconds(timeout_s));
  }
  std::vector<bool> found;
  for (const WantedMask& one : wanted) found.push_back(one.words != nullptr);
  return found;
}

}  // namespace

void bind_mask_board(nb::module_& m) {
  nb::class_<MaskBoard>(m, "MaskBoard", "Masks of grammars: protocol.MaskBoard.")
      .def(nb::init<int64_t>(), nb::arg("vocab_size"))
      .def_prop_ro("vocab_size", &MaskBoard::vocab_size)
      .def_prop_ro("num_words", &MaskBoard::num_words)
      .def("add", &MaskBoard::add)
      .def("remove", &MaskBoard::remove, nb::arg("slot"))
      .def("words", &words, nb::arg("slot"), "int32, to be written; they stay where they are.")
      .def("publish", &MaskBoard::publish, nb::arg("slot"), nb::arg("position"))
      .def("has", &MaskBoard::has, nb::arg("slot"))
      .def("find", &find, nb::arg("slots"), nb::arg("positions"), nb::arg("timeout_s"),
           "Which are published, once no other can be or so many seconds have passed. For one thread "
           "at a time.");
}

}  // namespace streamkv
