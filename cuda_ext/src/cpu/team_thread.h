// What a thread of a team needs of the system: watching before sleeping, its floating-point mode,
// a core of its own. Included by team.cpp alone.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>

#include <algorithm>
#include <cfenv>
#include <chrono>

namespace streamkv {
namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");  // `yield` returns at once on most cores
#endif
}

// Watching before sleeping: waking a thread takes longer than most phases, but a thread that
// watches takes its core from others. So it watches longer where that succeeds, shorter where it
// fails: on a busy machine what it waits for is often not running.
class Watch {
 public:
  template <class Condition>
  bool until(Condition condition) {
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + limit_;
    do {
      for (int i = 0; i < 8; ++i) {
        if (condition()) {
          limit_ = std::min<std::chrono::nanoseconds>(2 * limit_, kMax);
          return true;
        }
        relax();
      }
    } while (Clock::now() < deadline);
    limit_ = std::max<std::chrono::nanoseconds>(limit_ / 2, kMin);
    return condition();
  }

 private:
  static constexpr std::chrono::microseconds kMin{2}, kMax{50};
  std::chrono::nanoseconds limit_ = kMax;
};

// A core shared with another process changes hands every few milliseconds. Offering it before that,
// at moments when the thread holds no item, keeps it from being taken in the middle of one, with
// the others waiting. Where nobody else wants the core it costs a fraction of a microsecond.
class Turn {
 public:
  void offer() {
    const auto now = std::chrono::steady_clock::now();
    if (now - began_ < std::chrono::milliseconds(1)) return;
    sched_yield();
    began_ = std::chrono::steady_clock::now();
  }

 private:
  std::chrono::steady_clock::time_point began_;
};

// Denormals and rounding as the standard has them: other libraries in the process may have set
// them otherwise for some threads, and a result's bits must not depend on who computed it.
class StandardFloats {
 public:
  StandardFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~StandardFloats() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
};

// Signals are for the threads of the program around: one that arrives at a worker wakes nobody
// there. Threads started while this lives block them all.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// The cores that the process may use. Other systems than Linux have no such choice: no cores.
class Cores {
 public:
#if defined(__linux__)
  Cores() {
    CPU_ZERO(&set_);
    sched_getaffinity(0, sizeof set_, &set_);
  }
  int count() const { return CPU_COUNT(&set_); }
  void remove(int core) { CPU_CLR(core, &set_); }
  void move_this_thread_here() const {
    if (count() > 0) pthread_setaffinity_np(pthread_self(), sizeof set_, &set_);
  }
  static int current() { return sched_getcpu(); }

 private:
  cpu_set_t set_;
#else
  int count() const { return 0; }
  void remove(int) {}
  void move_this_thread_here() const {}
  static int current() { return -1; }
#endif
};

}  // namespace
}  // namespace streamkv
