// How the threads meet.
//
// A phase is open while its ticket counts items left; the ticket also carries the phase's number,
// so that claiming an item by compare-exchange fails for whoever looked at another phase. A thread
// that claimed items hands them in when none is left, and the thread that hands in the last opens
// the next phase itself, caller or not: nobody waits for a thread that holds no item, even the
// caller, and a run goes on while the system has taken the caller off its core.
#include "streamkv/team.h"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "streamkv/kernels.h"
#include "streamkv/memory.h"
#include "team_thread.h"

namespace streamkv {
namespace {

using Clock = std::chrono::steady_clock;

// A ticket: the phase's number over the items left. 2^40 phases are years of work.
constexpr int kItemBits = 24;
constexpr uint64_t kMaxItems = (uint64_t{1} << kItemBits) - 1;

uint64_t items_left(uint64_t ticket) { return ticket & kMaxItems; }

uint64_t next_ticket(uint64_t ticket, int64_t num_items) {
  return (ticket | kMaxItems) + 1 + static_cast<uint64_t>(num_items);
}

struct alignas(64) Thread {
  std::atomic<uint32_t> is_asleep{0};  // set by itself, cleared by whoever wakes it
  Watch phase_watch;                   // for the next phase of a run
  Watch run_watch;                     // for the next run
  Turn turn;
  std::atomic<int> core{-1};  // where it was last seen
  Memory scratch{kScratchBytes};
};

}  // namespace

class Team::Impl {
 public:
  explicit Impl(int64_t num_threads);
  ~Impl();

  int num_threads() const { return static_cast<int>(threads_.size()); }
  void run(const Phase* phases, int64_t num_phases, int64_t* phase_ns);

 private:
  void start_workers();
  void end_workers();
  void serve(Thread& self);
  bool has_work() const { return items_left(ticket_.load(std::memory_order_seq_cst)) != 0; }
  bool is_over() const { return is_over_.load(std::memory_order_acquire); }
  void advance(Thread& self);
  void open(const Phase& phase);
  void work(Thread& self);
  void take_time(int64_t phase_index);
  void await_phase(Thread& self);
  void await_run(Thread& self);
  void leave_shared_core(Thread& self);
  template <class Condition>
  void sleep_until(Thread& self, Condition condition);
  bool wake(Thread& thread);
  void wake_one();

  // What everybody watches, in one cache line. The phase's fields are written only while no item
  // is out, so whoever claims one has read those that belong to it.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> num_out_{0};  // items of the phase not yet handed in
  std::atomic<int64_t> num_items_{0};
  std::atomic<void (*)(const void*, int64_t, void*)> run_{nullptr};
  std::atomic<const void*> args_{nullptr};
  std::atomic<bool> is_over_{true};  // no run is going on
  std::atomic<bool> is_ending_{false};
  std::atomic<int32_t> num_asleep_{0};

  // Of the run going on; touched only by the caller before it and then by who opens a phase.
  alignas(64) const Phase* phases_ = nullptr;
  int64_t num_phases_ = 0;
  int64_t next_phase_ = 0;
  int64_t* phase_ns_ = nullptr;
  Clock::time_point phase_began_;

  const Cores cores_;
  std::vector<Thread> threads_;  // [0] is the caller
  std::vector<std::thread> workers_;
};

Team::Impl::Impl(int64_t num_threads) : threads_(num_threads) {
  try {
    start_workers();
  } catch (...) {
    end_workers();
    throw;
  }
}

Team::Impl::~Impl() { end_workers(); }

void Team::Impl::start_workers() {
  const SignalsBlocked for_them;
  for (size_t i = 1; i < threads_.size(); ++i)
    try {
      workers_.emplace_back([this, i] { serve(threads_[i]); });
    } catch (const std::system_error& error) {
      throw std::runtime_error("Team: can't start new thread, " + std::to_string(i + 1) + " of " +
                               std::to_string(threads_.size()) + ": " + error.what());
    }
}

void Team::Impl::end_workers() {
  is_ending_.store(true, std::memory_order_seq_cst);
  for (Thread& thread : threads_) wake(thread);
  for (std::thread& worker : workers_) worker.join();
}

void Team::Impl::serve(Thread& self) {
  const StandardFloats floats;
  while (!is_ending_.load(std::memory_order_acquire)) {
    if (has_work())
      work(self);
    else if (is_over())
      await_run(self);
    else
      await_phase(self);
  }
}

void Team::Impl::run(const Phase* phases, int64_t num_phases, int64_t* phase_ns) {
  for (int64_t i = 0; i < num_phases; ++i)
    if (phases[i].num_items > static_cast<int64_t>(kMaxItems))
      throw std::invalid_argument("Team: num_items expected at most " + std::to_string(kMaxItems) +
                                  ", got " + std::to_string(phases[i].num_items));
  const StandardFloats floats;
  phases_ = phases;
  num_phases_ = num_phases;
  next_phase_ = 0;
  phase_ns_ = phase_ns;
  if (phase_ns != nullptr) phase_began_ = Clock::now();
  is_over_.store(false, std::memory_order_relaxed);
  Thread& self = threads_[0];
  self.core.store(Cores::current(), std::memory_order_relaxed);
  advance(self);
  while (!is_over()) {
    if (has_work())
      work(self);
    else
      await_phase(self);
  }
}

// Opens the next phase that has enough to share; computes smaller ones at once.
void Team::Impl::advance(Thread& self) {
  while (next_phase_ < num_phases_) {
    const Phase& phase = phases_[next_phase_++];
    if (phase.num_items > 1 && threads_.size() > 1) return open(phase);
    for (int64_t item = 0; item < phase.num_items; ++item)
      phase.run(phase.args, item, self.scratch.data());
    take_time(next_phase_ - 1);
  }
  is_over_.store(true, std::memory_order_seq_cst);
  wake(threads_[0]);
}

void Team::Impl::open(const Phase& phase) {
  run_.store(phase.run, std::memory_order_relaxed);
  args_.store(phase.args, std::memory_order_relaxed);
  num_items_.store(phase.num_items, std::memory_order_relaxed);
  num_out_.store(phase.num_items, std::memory_order_relaxed);
  const uint64_t ticket = ticket_.load(std::memory_order_relaxed);
  ticket_.store(next_ticket(ticket, phase.num_items), std::memory_order_seq_cst);
}

void Team::Impl::work(Thread& self) {
  // Each thread that finds enough for another wakes one, before it holds an item itself.
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  if (items_left(ticket) > 1 && num_asleep_.load(std::memory_order_seq_cst) > 0) {
    wake_one();
    ticket = ticket_.load(std::memory_order_acquire);
  }
  int64_t num_done = 0;
  while (items_left(ticket) != 0) {
    const auto run = run_.load(std::memory_order_relaxed);
    const void* args = args_.load(std::memory_order_relaxed);
    const int64_t num_items = num_items_.load(std::memory_order_relaxed);
    if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire))
      continue;
    run(args, num_items - static_cast<int64_t>(items_left(ticket)), self.scratch.data());
    ++num_done;
    ticket = ticket_.load(std::memory_order_acquire);
  }
  if (num_done == 0) return;
  if (num_out_.fetch_sub(num_done, std::memory_order_acq_rel) != num_done) return;
  take_time(next_phase_ - 1);
  advance(self);
}

void Team::Impl::take_time(int64_t phase_index) {
  if (phase_ns_ == nullptr) return;
  const auto now = Clock::now();
  phase_ns_[phase_index] += std::chrono::nanoseconds(now - phase_began_).count();
  phase_began_ = now;
}

void Team::Impl::await_phase(Thread& self) {
  const auto condition = [this] { return has_work() || is_over(); };
  self.turn.offer();
  if (self.phase_watch.until(condition)) return;
  leave_shared_core(self);
  sleep_until(self, condition);
}

void Team::Impl::await_run(Thread& self) {
  const auto is_needed = [this] { return has_work() || is_ending_.load(); };
  if (self.run_watch.until([&] { return is_needed() || !is_over(); })) return;
  leave_shared_core(self);
  sleep_until(self, is_needed);
}

// The system may keep two threads of the team on one core though another core is idle, or busy with
// what matters less. Then the one watches in vain while the other can't run: a worker leaves. (The
// caller's thread is not ours to move.)
void Team::Impl::leave_shared_core(Thread& self) {
  self.core.store(Cores::current(), std::memory_order_relaxed);
  if (&self == &threads_[0] || num_threads() > cores_.count()) return;
  bool is_shared = false;
  Cores free = cores_;
  for (const Thread& other : threads_) {
    if (&other == &self) continue;
    const int core = other.core.load(std::memory_order_relaxed);
    is_shared |= core == self.core.load(std::memory_order_relaxed);
    if (core >= 0) free.remove(core);
  }
  if (!is_shared) return;
  free.move_this_thread_here();
  self.core.store(Cores::current(), std::memory_order_relaxed);
}

// Both sides write, then look at what the other wrote: one of them sees it.
template <class Condition>
void Team::Impl::sleep_until(Thread& self, Condition condition) {
  num_asleep_.fetch_add(1, std::memory_order_seq_cst);
  self.is_asleep.store(1, std::memory_order_seq_cst);
  if (condition()) {
    if (self.is_asleep.exchange(0) == 1) num_asleep_.fetch_sub(1);
    return;
  }
  while (self.is_asleep.load(std::memory_order_acquire) != 0) self.is_asleep.wait(1);
}

// False if it was awake.
bool Team::Impl::wake(Thread& thread) {
  if (thread.is_asleep.load(std::memory_order_seq_cst) == 0) return false;
  if (thread.is_asleep.exchange(0) == 0) return false;
  num_asleep_.fetch_sub(1);
  thread.is_asleep.notify_one();
  return true;
}

void Team::Impl::wake_one() {
  for (Thread& thread : threads_)
    if (wake(thread)) return;
}

Team::Team(int64_t num_threads) {
  if (num_threads < 1 || num_threads > kMaxThreads)
    throw std::invalid_argument("Team: num_threads expected 1 to " + std::to_string(kMaxThreads) +
                                ", got " + std::to_string(num_threads));
  impl_ = std::make_unique<Impl>(num_threads);
}

Team::~Team() = default;

int Team::num_threads() const { return impl_->num_threads(); }

void Team::run(const Phase* phases, int64_t num_phases, int64_t* phase_ns) {
  impl_->run(phases, num_phases, phase_ns);
}

}  // namespace streamkv
