// MaskBoard: which tokens grammars allow next, where sampling finds it: a bitmask for each slot.
//
// Who follows an answer writes the words of its slot, then publishes for which position they hold;
// the device looks for a slot and a position, and may wait for them. Positions only grow: once one
// is published, nobody waits for those before it. The mutex guards all but the words: those are the
// writer's until `publish` and the device's from then on, until the writer has seen the token that
// was chosen by them. Threads may take turns at writing a slot's words, if they pass them on under
// a lock of theirs.
#pragma once

#include <stdint.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

namespace streamkv {

// One that the device looks for.
struct WantedMask {
  int64_t slot;
  int64_t position;
  const int32_t* words = nullptr;  // once it was found
};

class MaskBoard {
 public:
  using Clock = std::chrono::steady_clock;

  explicit MaskBoard(int64_t vocab_size);  // std::invalid_argument

  int64_t vocab_size() const { return vocab_size_; }
  int64_t num_words() const { return num_words_; }

  // Any thread. std::invalid_argument for a slot that was not added, or was removed.
  int64_t add();  // the one that was freed last, or a new one; nothing is published
  void remove(int64_t slot);
  int32_t* words(int64_t slot);  // [num_words], which stay where they are
  void publish(int64_t slot, int64_t position);  // nothing happens if a later one was
  bool has(int64_t slot) const;

  // Fills in the words of those that are published, once nothing is left to wait for or the
  // deadline has passed. For one thread at a time, the device's.
  void find(WantedMask* wanted, int64_t num_wanted, Clock::time_point deadline);

 private:
  struct Slot {
    std::unique_ptr<int32_t[]> words;
    int64_t published = -1;  // the position
    int64_t awaited = -1;    // the position that `find` waits for
    bool is_used = false;
  };

  bool is_used(int64_t slot) const;
  Slot& used(int64_t slot);
  void end_wait(Slot& slot);
  int64_t look(WantedMask* wanted, int64_t num_wanted);

  const int64_t vocab_size_, num_words_;
  mutable std::mutex mutex_;
  std::condition_variable all_published_;
  std::vector<Slot> slots_;
  std::vector<int64_t> free_;  // has room for all of them
  int64_t num_awaited_ = 0;
};

}  // namespace streamkv
