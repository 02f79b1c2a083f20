#include "streamkv/channel.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/eventfd.h>
#endif

#include <stdexcept>
#include <system_error>
#include <utility>

namespace streamkv {

// --- MessageRing --------------------------------------------------------------------------------
// Sequentially consistent, because whoever pushes looks next whether the other one sleeps, and
// whoever goes to sleep looks next whether something was pushed.

void MessageRing::push(std::string&& message) {
  const uint64_t place = num_pushed_.load(std::memory_order_relaxed);
  slots_[place % kMaxMessages] = std::move(message);
  num_pushed_.store(place + 1);
}

bool MessageRing::pop(std::string& message) {
  const uint64_t place = num_popped_.load(std::memory_order_relaxed);
  if (num_pushed_.load() == place) return false;
  message = std::exchange(slots_[place % kMaxMessages], {});
  num_popped_.store(place + 1);
  return true;
}

bool MessageRing::is_empty() const { return num_pushed_.load() == num_popped_.load(); }

// --- Bell ---------------------------------------------------------------------------------------

Bell::Bell() {
#ifdef __linux__
  read_fd_ = write_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (read_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
#else
  int fds[2];
  if (pipe(fds) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  for (const int fd : fds) {
    fcntl(fd, F_SETFL, O_NONBLOCK);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
  }
  read_fd_ = fds[0];
  write_fd_ = fds[1];
#endif
}

Bell::~Bell() {
  close(read_fd_);
  if (write_fd_ != read_fd_) close(write_fd_);
}

void Bell::ring() {
  const uint64_t one = 1;  // what an eventfd takes; for a pipe any bytes do
  while (write(write_fd_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }  // otherwise it is full: it is ringing already
}

void Bell::silence() {
  uint64_t count;
  while (read(read_fd_, &count, sizeof(count)) < 0 && errno == EINTR) {
  }
}

// --- Channel ------------------------------------------------------------------------------------

void Channel::submit(std::string_view message) {
  if (is_closed()) throw std::runtime_error("the channel is closed");
  if (num_in_flight_ == kMaxMessages)
    throw std::runtime_error("expected at most " + std::to_string(kMaxMessages) +
                             " steps without an answer; take the results first");
  std::string step(message);  // may throw, and nothing has happened then
  ++num_in_flight_;
  steps_.push(std::move(step));
  if (is_asleep_.load()) wake();
}

std::vector<std::string> Channel::take() {
  std::vector<std::string> results;
  results.reserve(kMaxMessages);  // may throw, and nothing is lost then
  // In this order: what comes after the bell was silenced and before `has_rung_` is cleared has
  // not rung, and is taken here.
  bell_.silence();
  has_rung_.store(false);
  for (std::string message; results_.pop(message);) results.push_back(std::move(message));
  num_in_flight_ -= static_cast<int64_t>(results.size());
  return results;
}

Received Channel::receive(std::string& message, std::chrono::nanoseconds timeout) {
  if (!is_ready()) {
    std::unique_lock<std::mutex> lock(mutex_);
    is_asleep_.store(true);
    woken_.wait_for(lock, timeout, [this] { return is_ready(); });
    is_asleep_.store(false);
  }
  if (is_closed()) return Received::kClosed;
  if (!steps_.pop(message)) return Received::kTimeout;
  ++num_unanswered_;
  return Received::kMessage;
}

void Channel::reply(std::string&& message) {
  if (num_unanswered_ == 0) throw std::runtime_error("expected a step before its answer");
  --num_unanswered_;
  results_.push(std::move(message));
  if (!has_rung_.exchange(true)) bell_.ring();
}

void Channel::close() {
  is_closed_.store(true);
  wake();
}

void Channel::wake() {
  // With the mutex once in our hands the other one sleeps, or has seen what there is.
  { const std::lock_guard<std::mutex> lock(mutex_); }
  woken_.notify_one();
}

}  // namespace streamkv
