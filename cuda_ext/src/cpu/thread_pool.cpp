#include "streamkv/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "streamkv/cpu_kernels.h"

namespace streamkv {
namespace {

// Long enough to meet the next kernel of a step, short enough to leave the core to others.
constexpr std::chrono::microseconds kSpin{5};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

template <class Condition>
bool spin_until(Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (condition()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return condition();
}

class ThreadPool {
 public:
  int size() const { return size_.load(std::memory_order_relaxed); }

  void resize(int count) {
    const std::lock_guard<std::mutex> caller(caller_mutex_);
    size_.store(count, std::memory_order_relaxed);
  }

  // False if another thread's call holds the pool.
  bool try_run(int64_t num_items, void (*item)(void*, int64_t), void* context) {
    const std::unique_lock<std::mutex> caller(caller_mutex_, std::try_to_lock);
    if (!caller.owns_lock()) return false;
    hire();
    open(num_items, item, context);
    work();
    close();
    return true;
  }

 private:
  void hire() {
    for (; num_hired_ < size() - 1; ++num_hired_)
      std::thread(&ThreadPool::serve, this, num_hired_).detach();
  }

  void open(int64_t num_items, void (*item)(void*, int64_t), void* context) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      item_ = item;
      context_ = context;
      num_items_ = num_items;
      next_.store(0, std::memory_order_relaxed);
      is_open_ = true;
      call_.fetch_add(1, std::memory_order_release);
    }
    opened_.notify_all();
  }

  void work() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < num_items_;)
      item_(context_, i);
  }

  // No worker enters after this; those inside finish the item they have.
  void close() {
    std::unique_lock<std::mutex> lock(mutex_);
    is_open_ = false;
    if (num_inside_.load() == 0) return;
    lock.unlock();
    if (spin_until([&] { return num_inside_.load(std::memory_order_acquire) == 0; })) return;
    lock.lock();
    left_.wait(lock, [&] { return num_inside_.load() == 0; });
  }

  [[noreturn]] void serve(int index) {
    uint64_t seen = 0;
    for (;;) {
      spin_until([&] { return call_.load(std::memory_order_acquire) != seen; });
      std::unique_lock<std::mutex> lock(mutex_);
      opened_.wait(lock, [&] { return call_.load() != seen; });
      seen = call_.load();
      if (!is_open_ || index >= size() - 1) continue;
      num_inside_.fetch_add(1);
      lock.unlock();
      work();
      lock.lock();
      if (num_inside_.fetch_sub(1) == 1) left_.notify_one();
    }
  }

  std::mutex caller_mutex_;  // held by the one caller that has the pool
  std::atomic<int> size_{1};
  int num_hired_ = 0;

  // The call in progress: written by its caller under mutex_, read by workers that came in under it.
  std::mutex mutex_;
  std::condition_variable opened_, left_;
  std::atomic<uint64_t> call_{0};
  bool is_open_ = false;
  std::atomic<int> num_inside_{0};
  void (*item_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t num_items_ = 0;
  std::atomic<int64_t> next_{0};
};

ThreadPool& pool() {
  static ThreadPool* const pool = new ThreadPool;  // outlives its threads at exit
  return *pool;
}

struct ScratchDeleter {
  void operator()(float* scratch) const {
    ::operator delete[](scratch, std::align_val_t{64});
  }
};

}  // namespace

int num_threads() { return pool().size(); }

void set_num_threads(int count) { pool().resize(count); }

float* thread_scratch() {
  static thread_local std::unique_ptr<float[], ScratchDeleter> scratch;
  if (scratch == nullptr)
    scratch.reset(static_cast<float*>(
        ::operator new[](kScratchFloats * sizeof(float), std::align_val_t{64})));
  return scratch.get();
}

void run_items(int64_t num_items, bool parallel, void (*item)(void* context, int64_t i),
               void* context) {
  if (parallel && num_items > 1 && num_threads() > 1 &&
      pool().try_run(num_items, item, context))
    return;
  for (int64_t i = 0; i < num_items; ++i) item(context, i);
}

}  // namespace streamkv
