#include "streamkv/mask_board.h"

#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "streamkv/token_mask.h"

namespace streamkv {
namespace {

constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();

int64_t checked(const char* what, int64_t value, int64_t low) {
  if (value < low || value > kLimit)
    throw std::invalid_argument(std::string("MaskBoard: ") + what + ": expected " +
                                std::to_string(low) + " to " + std::to_string(kLimit) + ", got " +
                                std::to_string(value));
  return value;
}

}  // namespace

MaskBoard::MaskBoard(int64_t vocab_size)
    : vocab_size_(checked("vocab_size", vocab_size, 1)), num_words_(num_mask_words(vocab_size)) {}

int64_t MaskBoard::add() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) {
    auto words = std::make_unique<int32_t[]>(num_words_);
    free_.reserve(slots_.size() + 1);
    slots_.push_back({std::move(words)});
    free_.push_back(static_cast<int64_t>(slots_.size()) - 1);
  }
  const int64_t slot = free_.back();
  free_.pop_back();
  slots_[slot].is_used = true;
  slots_[slot].published = -1;
  return slot;
}

void MaskBoard::remove(int64_t slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Slot& found = used(slot);
  found.is_used = false;
  if (found.awaited >= 0) end_wait(found);
  free_.push_back(slot);
}

int32_t* MaskBoard::words(int64_t slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used(slot).words.get();
}

void MaskBoard::publish(int64_t slot, int64_t position) {
  checked("position", position, 0);
  const std::lock_guard<std::mutex> lock(mutex_);
  Slot& found = used(slot);
  if (position <= found.published) return;
  found.published = position;
  if (found.awaited >= 0 && found.awaited <= position) end_wait(found);
}

bool MaskBoard::has(int64_t slot) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_used(slot);
}

void MaskBoard::find(WantedMask* wanted, int64_t num_wanted, Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (look(wanted, num_wanted) == num_wanted || deadline <= Clock::now()) return;
  for (int64_t i = 0; i < num_wanted; ++i) {
    if (wanted[i].words != nullptr || !is_used(wanted[i].slot)) continue;
    Slot& slot = slots_[wanted[i].slot];
    if (slot.published > wanted[i].position) continue;
    num_awaited_ += slot.awaited < 0;
    slot.awaited = wanted[i].position;
  }
  all_published_.wait_until(lock, deadline, [this] { return num_awaited_ == 0; });
  for (Slot& slot : slots_) slot.awaited = -1;
  num_awaited_ = 0;
  look(wanted, num_wanted);
}

// Under the mutex, as all that follow.
void MaskBoard::end_wait(Slot& slot) {
  slot.awaited = -1;
  if (--num_awaited_ == 0) all_published_.notify_one();
}

// How many are published.
int64_t MaskBoard::look(WantedMask* wanted, int64_t num_wanted) {
  int64_t num_found = 0;
  for (int64_t i = 0; i < num_wanted; ++i) {
    const bool is_there =
        is_used(wanted[i].slot) && slots_[wanted[i].slot].published == wanted[i].position;
    wanted[i].words = is_there ? slots_[wanted[i].slot].words.get() : nullptr;
    num_found += is_there;
  }
  return num_found;
}

bool MaskBoard::is_used(int64_t slot) const {
  return slot >= 0 && slot < static_cast<int64_t>(slots_.size()) && slots_[slot].is_used;
}

MaskBoard::Slot& MaskBoard::used(int64_t slot) {
  if (!is_used(slot))
    throw std::invalid_argument("MaskBoard: slot: expected one that was added, got " +
                                std::to_string(slot));
  return slots_[slot];
}

}  // namespace streamkv
