// streamkv._cpu.Runner: see runner.h.
#include "streamkv/runner.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "messages.h"

namespace nb = nanobind;

namespace streamkv {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check(bool is_right, const char* argument, const std::string& expected, int64_t got) {
  if (!is_right)
    throw std::invalid_argument(std::string("Runner: ") + argument + ": expected " + expected +
                                ", got " + std::to_string(got));
}

// A step is run without looking at its numbers again: what the rows let through must be in the
// program's tables, and in its logits.
void check_fits(const Program& program, const KvCache& cache, BufferId logits_buffer,
                int64_t max_model_len, int64_t vocab_size) {
  if (&program.cache() != &cache)
    throw std::invalid_argument("Runner: cache: expected the program's, got another");
  check(max_model_len <= program.max_positions(), "max_model_len",
        "at most the program's " + std::to_string(program.max_positions()) + " positions",
        max_model_len);
  check(vocab_size <= program.vocab_size(), "vocab_size",
        "at most the program's " + std::to_string(program.vocab_size()) + " tokens", vocab_size);
  const int64_t width = program.row_bytes(logits_buffer) / static_cast<int64_t>(sizeof(float));
  check(vocab_size == width, "vocab_size", "the logits' " + std::to_string(width), vocab_size);
}

void init(Runner* self, Program* program, Team& team, KvCache& cache, BufferId logits_buffer,
          int64_t num_rows, int64_t max_model_len, int64_t vocab_size, int64_t max_tokens,
          int64_t max_scored, MaskBoard* masks, double mask_wait_s) {
  if (program != nullptr)
    check_fits(*program, cache, logits_buffer, max_model_len, vocab_size);
  if (masks != nullptr)
    check(masks->vocab_size() == vocab_size, "masks",
          "a board of " + std::to_string(vocab_size) + " tokens", masks->vocab_size());
  new (self) Runner(program, team, cache, logits_buffer,
                    {num_rows, max_model_len, vocab_size, max_tokens, max_scored,
                     to_nanoseconds(mask_wait_s)},
                    masks);
}

nb::bytes step(Runner& runner, const nb::bytes& message) {
  std::string output;
  {
    const nb::gil_scoped_release no_gil;
    output = runner.step(view(message));
  }
  return to_bytes(output);
}

bool serve(Runner& runner, Channel& channel, double idle_timeout_s) {
  const nb::gil_scoped_release no_gil;
  return runner.serve(channel, to_nanoseconds(idle_timeout_s));
}

nb::object prepare(Runner& runner, const nb::bytes& message) {
  const BatchArrays* batch = runner.prepare(view(message));
  return batch == nullptr ? nb::none() : nb::cast(*batch, nb::rv_policy::copy);
}

nb::bytes sample(Runner& runner, const Logits& logits) {
  if (static_cast<int64_t>(logits.shape(1)) != runner.limits().vocab_size)
    throw std::invalid_argument("sample: expected logits of " +
                                std::to_string(runner.limits().vocab_size) + " tokens, got " +
                                std::to_string(logits.shape(1)));
  std::string output;
  {
    const nb::gil_scoped_release no_gil;
    output = runner.sample(logits.data(), static_cast<int64_t>(logits.shape(0)));
  }
  return to_bytes(output);
}

}  // namespace

void bind_runner(nb::module_& m) {
  nb::class_<Runner>(m, "Runner", "Steps as bytes in, outputs as bytes out.")
      .def("__init__", &init, nb::arg("program").none(), nb::arg("team"), nb::arg("cache"),
           nb::arg("logits_buffer"), nb::kw_only(), nb::arg("num_rows"), nb::arg("max_model_len"),
           nb::arg("vocab_size"), nb::arg("max_tokens"), nb::arg("max_scored") = 0,
           nb::arg("masks").none() = nb::none(), nb::arg("mask_wait_s") = 0.0,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 11>())
      .def("step", &step, nb::arg("step"), "One step; what goes wrong is `error` in the output.")
      .def("serve", &serve, nb::arg("channel"), nb::arg("idle_timeout_s"),
           "Answers steps. True: the channel was closed; False: none has come for so long.")
      .def("prepare", &prepare, nb::arg("step"),
           "The first half of a step: its Batch, or None if there is nothing to compute, for "
           "`sample` with no logits. ValueError: tell `fail`.")
      .def("sample", &sample, nb::arg("logits"), "The second half: from logits to the output.")
      .def("fail", [](Runner& runner, const std::string& error) {
             return to_bytes(runner.fail(error));
           },
           nb::arg("error"), "The output instead, if something went wrong between them.");
}

}  // namespace streamkv
