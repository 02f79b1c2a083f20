// The way from the event loop to the device thread and back: messages of bytes in two rings.
//
// One thread submits and takes, another receives and replies; neither needs the interpreter while
// it waits. Results ring a file descriptor that the loop watches: it becomes readable once for all
// that have come since the last `take`. Each message is answered once, in order, so bounding those
// on their way bounds both rings.
#pragma once

#include <stdint.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace streamkv {

constexpr int64_t kMaxMessages = 16;  // on their way; an engine keeps two or three

// One thread pushes, another pops; whoever pushes knows that there is room.
class MessageRing {
 public:
  void push(std::string&& message);
  bool pop(std::string& message);  // false: empty
  bool is_empty() const;

 private:
  std::array<std::string, kMaxMessages> slots_;
  alignas(64) std::atomic<uint64_t> num_pushed_{0};
  alignas(64) std::atomic<uint64_t> num_popped_{0};
};

// A descriptor that another thread makes readable.
class Bell {
 public:
  Bell();  // std::system_error
  ~Bell();
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;

  int fd() const { return read_fd_; }
  void ring();
  void silence();

 private:
  int read_fd_, write_fd_;  // the same for an eventfd
};

enum class Received { kMessage, kTimeout, kClosed };

class Channel {
 public:
  // The loop's side. Throws std::runtime_error if kMaxMessages are on their way or it is closed.
  void submit(std::string_view message);
  std::vector<std::string> take();  // all results that have come; never waits
  int fd() const { return bell_.fd(); }

  // The device's side. What was submitted before `close` and not received is dropped.
  Received receive(std::string& message, std::chrono::nanoseconds timeout);
  void reply(std::string&& message);  // std::runtime_error if nothing is to be answered

  // Any thread; idempotent.
  void close();
  bool is_closed() const { return is_closed_.load(); }

 private:
  bool is_ready() const { return is_closed() || !steps_.is_empty(); }
  void wake();

  MessageRing steps_, results_;
  Bell bell_;
  int64_t num_in_flight_ = 0;   // the loop's
  int64_t num_unanswered_ = 0;  // the device's
  std::atomic<bool> has_rung_{false};
  std::atomic<bool> is_closed_{false};

  // Only to sleep: `is_asleep_` is set under the mutex, and then what was pushed is looked at.
  std::mutex mutex_;
  std::condition_variable woken_;
  std::atomic<bool> is_asleep_{false};
};

}  // namespace streamkv
