// A persistent team of threads that computes phases, one after the other: whoever is free claims
// the next item. Which thread runs an item decides no bit of its result.
//
// The caller works too. Workers touch no Python. Between phases threads watch briefly, then sleep;
// without work they sleep. A thread that the system has taken off its core holds up the others only
// while it is inside an item, and a late one never blocks the caller's return. All threads compute
// with the standard's rounding and denormals, the caller too while it is in here.
#pragma once

#include <stdint.h>

#include <memory>

namespace streamkv {

struct Phase {
  int64_t num_items;  // below 2^24
  // `scratch`: kScratchBytes (kernels.h) of the thread's own. No exception may leave an item.
  void (*run)(const void* args, int64_t item, void* scratch);
  const void* args;
};

constexpr int64_t kMaxThreads = 4096;  // of a team

class Team {
 public:
  // The caller included; the others start here. std::invalid_argument beyond 1 to kMaxThreads,
  // std::runtime_error if the system grants no more threads.
  explicit Team(int64_t num_threads);
  ~Team();  // ends and joins them
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int num_threads() const;

  // Runs phases[0], then phases[1], ...: a phase begins when each item of the one before has
  // ended. Returns when the last has. One caller at a time. phase_ns: null, or [num_phases], the
  // wall time of each is added to it.
  void run(const Phase* phases, int64_t num_phases, int64_t* phase_ns = nullptr);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace streamkv
