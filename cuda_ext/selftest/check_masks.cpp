// The mask board between two threads, and rows that are deferred for want of a mask.
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "selftest.h"
#include "streamkv/mask_board.h"
#include "streamkv/rows.h"
#include "streamkv/token_mask.h"

namespace streamkv::selftest {

namespace {

constexpr int64_t kVocab = 4000;
constexpr int64_t kSlots = 3;
constexpr int64_t kPositions = 300;

// One thread writes and publishes what the other has asked for; slots come and go meanwhile.
void check_board(Report& report) {
  MaskBoard board(kVocab);
  for (int64_t i = 0; i < kSlots; ++i) board.add();
  std::atomic<int64_t> asked{-1};
  std::atomic<bool> is_over{false};
  std::thread matcher([&] {
    for (int64_t position = 0; position < kPositions; ++position) {
      while (asked.load() < position) std::this_thread::yield();
      for (int64_t slot = 0; slot < kSlots; ++slot) {
        int32_t* words = board.words(slot);
        for (int64_t i = 0; i < board.num_words(); ++i)
          words[i] = static_cast<int32_t>(position * kSlots + slot);
        board.publish(slot, position);
      }
    }
  });
  std::thread others([&] {
    while (!is_over.load()) {
      const int64_t slot = board.add();
      board.publish(slot, 1);
      board.remove(slot);
    }
  });
  bool holds = true;
  std::vector<WantedMask> wanted;
  for (int64_t slot = 0; slot < kSlots; ++slot) wanted.push_back({slot, 0});
  for (int64_t position = 0; position < kPositions; ++position) {
    for (WantedMask& one : wanted) one.position = position;
    asked.store(position);
    board.find(wanted.data(), kSlots, MaskBoard::Clock::now() + std::chrono::minutes(1));
    for (const WantedMask& one : wanted) {
      holds = holds && one.words != nullptr;
      for (int64_t i = 0; holds && i < board.num_words(); ++i)
        holds = one.words[i] == static_cast<int32_t>(position * kSlots + one.slot);
    }
  }
  is_over.store(true);
  matcher.join();
  others.join();
  report.expect(holds, "masks are read as they were published");
  wanted[0].position = -2;
  board.find(wanted.data(), 1, MaskBoard::Clock::now() + std::chrono::milliseconds(1));
  report.expect(wanted[0].words == nullptr, "no mask of another position");
}

// What has been passed never comes: nobody waits for it, whenever it was passed.
void check_passed(Report& report) {
  MaskBoard board(8);
  const int64_t slot = board.add();
  const auto deadline = MaskBoard::Clock::now() + std::chrono::minutes(1);
  std::vector<WantedMask> wanted{{slot, 3}};
  std::thread matcher([&] { board.publish(slot, 5); });
  board.find(wanted.data(), 1, deadline);  // before or after it was passed
  matcher.join();
  board.publish(slot, 4);
  board.find(wanted.data(), 1, deadline);
  report.expect(wanted[0].words == nullptr && MaskBoard::Clock::now() < deadline,
                "no wait for a mask that has been passed");
  wanted[0].position = 5;
  board.find(wanted.data(), 1, deadline);
  report.expect(wanted[0].words != nullptr, "positions only grow");
}

// Deferred, sent ahead, asked again: the row has as many tokens as before.
void check_deferral(Report& report) {
  MaskBoard board(8);
  const int64_t slot = board.add();
  Rows rows({2, 20, 4, 8, 8, 16, 4}, &board);
  const int32_t token_ids[] = {1, 2, 3}, block_ids[] = {5, 6};
  StepInput first;
  RowAdded added{};
  added.row = 1;
  added.num_prompt_tokens = 3;
  added.token_ids = PackedInts(reinterpret_cast<const char*>(token_ids), 3);
  added.block_ids = PackedInts(reinterpret_cast<const char*>(block_ids), 2);
  added.sampling = {};
  added.sampling.top_p = added.sampling.repetition_penalty = 1.0;
  added.sampling.num_logprobs = -1;
  added.sampling.num_prompt_logprobs = 1;
  added.sampling.mask_slot = static_cast<int32_t>(slot);
  first.added.push_back(added);
  rows.apply(first);
  const auto batch = [&](int32_t start, int32_t count, int32_t ask) -> const BatchArrays& {
    const int32_t scheduled[] = {1, start, count, ask};
    return rows.batch(PackedInts(reinterpret_cast<const char*>(scheduled), 4));
  };
  const BatchArrays& prompt = batch(0, 3, kAskAll);
  report.expect(prompt.logit_rows == std::vector<int32_t>{2, 0, 1} && rows.scored().size() == 2 &&
                    rows.scored()[1].position == 2,
                "rows of logits: of the sample, then of the scores");
  rows.defer(rows.asking()[0]);
  batch(3, 1, kAskSample);
  report.expect(rows.asking()[0].is_void, "what was sent ahead is void");
  rows.defer(rows.asking()[0]);
  batch(2, 1, kAskSample);
  report.expect(!rows.asking()[0].is_void && rows.asking()[0].position == 3, "it asks again");
  rows.keep(rows.asking()[0], 7);
  report.expect(batch(3, 1, kAskSample).token_ids == std::vector<int32_t>{7} &&
                    !rows.asking()[0].is_void,
                "the token is kept");
}

}  // namespace

void check_masks(Report& report) {
  check_board(report);
  check_passed(report);
  check_deferral(report);
}

}  // namespace streamkv::selftest
