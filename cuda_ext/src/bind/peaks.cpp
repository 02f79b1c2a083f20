// streamkv._cpu.peaks: how fast this machine is with the kernels' instruction set, all threads of a
// team together.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "streamkv/kernels.h"
#include "streamkv/memory.h"
#include "streamkv/team.h"

namespace nb = nanobind;

namespace streamkv {
namespace {

using Clock = std::chrono::steady_clock;
using Compute = int64_t (*)(int64_t num_rounds, float* out);

constexpr int64_t kRounds = 20'000;     // in an item: some 0.1 ms
constexpr int64_t kItemsPerThread = 8;  // so that a thread that comes late costs little
constexpr int64_t kReadStep = 512;      // reads come in whole steps of every instruction set
constexpr int64_t kAheadBytes[] = {0, 1024, 4096};  // prefetching, as kernels may

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Runs `phase` until so much time has passed; returns runs per second.
double rate(Team& team, const Phase& phase, double seconds) {
  team.run(&phase, 1);  // wakes the threads, fills the caches
  const auto start = Clock::now();
  int64_t num_runs = 0;
  double elapsed;
  do {
    team.run(&phase, 1);
    ++num_runs;
    elapsed = seconds_since(start);
  } while (elapsed < seconds);
  return static_cast<double>(num_runs) / elapsed;
}

double compute_rate(Team& team, Compute compute, double seconds) {
  if (compute == nullptr) return 0.0;
  const nb::gil_scoped_release no_gil;
  const Phase phase{team.num_threads() * kItemsPerThread,
                    [](const void* self, int64_t, void* scratch) {
                      auto* out = static_cast<float*>(scratch);
                      out[0] = 1.0f;
                      (*static_cast<const Compute*>(self))(kRounds, out);
                    },
                    &compute};
  float out[64] = {1.0f};
  const auto item_operations = static_cast<double>(compute(kRounds, out));
  return rate(team, phase, seconds) * static_cast<double>(phase.num_items) * item_operations;
}

double fma(Team& team, double seconds) {
  return compute_rate(team, kernels().peaks.fma, seconds);
}

double bf16_dot(Team& team, double seconds) {
  return compute_rate(team, kernels().peaks.bf16_dot, seconds);
}

double int8_dot(Team& team, double seconds) {
  return compute_rate(team, kernels().peaks.int8_dot, seconds);
}

struct Reading {
  const char* data;
  int64_t chunk_bytes, repeats, ahead_bytes;

  static void run(const void* self, int64_t item, void* scratch) {
    const auto& reading = *static_cast<const Reading*>(self);
    for (int64_t i = 0; i < reading.repeats; ++i)
      kernels().peaks.read(reading.data + item * reading.chunk_bytes, reading.chunk_bytes,
                           reading.ahead_bytes, static_cast<float*>(scratch));
  }
};

double read(Team& team, int64_t num_bytes, int64_t chunk_bytes, int64_t repeats, double seconds) {
  if (chunk_bytes < kReadStep || chunk_bytes % kReadStep != 0 || num_bytes < chunk_bytes ||
      repeats < 1)
    throw std::invalid_argument("read: expected chunk_bytes, a multiple of " +
                                std::to_string(kReadStep) +
                                " up to num_bytes, and repeats of at least 1, got " +
                                std::to_string(chunk_bytes) + ", " + std::to_string(num_bytes) +
                                " and " + std::to_string(repeats));
  const nb::gil_scoped_release no_gil;
  const Memory memory(num_bytes, /*huge_pages=*/true);
  std::memset(memory.data(), 1, static_cast<size_t>(num_bytes));
  double best = 0;
  for (const int64_t ahead_bytes : kAheadBytes) {
    const Reading reading{static_cast<const char*>(memory.data()), chunk_bytes, repeats,
                          ahead_bytes};
    const Phase phase{num_bytes / chunk_bytes, &Reading::run, &reading};
    const auto run_bytes =
        static_cast<double>(phase.num_items * chunk_bytes) * static_cast<double>(repeats);
    best = std::max(best, rate(team, phase, seconds / std::size(kAheadBytes)) * run_bytes);
  }
  return best;
}

}  // namespace

void bind_peaks(nb::module_& m) {
  nb::module_ peaks = m.def_submodule("peaks", "What the machine can do; times in seconds.");
  peaks.def("fma", &fma, nb::arg("team"), nb::arg("seconds"),
            "Operations per second of float32 multiply-adds (two operations each).");
  peaks.def("bf16_dot", &bf16_dot, nb::arg("team"), nb::arg("seconds"),
            "The same of bfloat16 dot products; 0 where these kernels have no instruction.");
  peaks.def("int8_dot", &int8_dot, nb::arg("team"), nb::arg("seconds"),
            "The same of products of bytes, as products with quantized weights make them.");
  peaks.def("read", &read, nb::arg("team"), nb::arg("num_bytes"), nb::arg("chunk_bytes"),
            nb::arg("repeats"), nb::arg("seconds"),
            "Bytes per second read from so much memory, each chunk by one thread so many times "
            "in a row; the best of several ways to prefetch.");
}

}  // namespace streamkv
