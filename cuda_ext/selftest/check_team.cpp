// The team of threads: each item once, phases in order, and the caller back.
#include <atomic>

#include "selftest.h"

namespace streamkv::selftest {

namespace {

struct Counted {
  std::vector<std::atomic<int>>* counts;
  const std::atomic<int>* before;  // of the phase before: all of it has ended
  int64_t num_before;
  std::atomic<int>* ended;
  std::atomic<int>* num_wrong;
};

void run_counted(const void* args, int64_t item, void*) {
  const Counted& phase = *static_cast<const Counted*>(args);
  if (phase.before != nullptr && phase.before->load() != phase.num_before) ++*phase.num_wrong;
  ++(*phase.counts)[item];
  ++*phase.ended;
}

void check_phases(Report& report, int num_threads, const std::vector<int64_t>& sizes) {
  Team team(num_threads);
  for (int round = 0; round < 50; ++round) {
    const size_t num_phases = sizes.size();
    std::vector<std::vector<std::atomic<int>>> counts;
    std::vector<std::atomic<int>> ended(num_phases);
    std::atomic<int> num_wrong{0};
    std::vector<Counted> args(num_phases);
    std::vector<Phase> phases(num_phases);
    for (const int64_t size : sizes) counts.emplace_back(size);
    for (size_t i = 0; i < num_phases; ++i) {
      args[i] = {&counts[i], i > 0 ? &ended[i - 1] : nullptr, i > 0 ? sizes[i - 1] : 0, &ended[i],
                 &num_wrong};
      phases[i] = {sizes[i], run_counted, &args[i]};
    }
    team.run(phases.data(), static_cast<int64_t>(num_phases));
    bool holds = num_wrong == 0;
    for (const auto& phase : counts)
      for (const std::atomic<int>& count : phase) holds = holds && count == 1;
    report.expect(holds, std::to_string(num_threads) + " threads: each item once, in its phase");
  }
}

}  // namespace

void check_team(Report& report) {
  for (const int num_threads : {1, 2, 5}) {
    check_phases(report, num_threads, {1, 7, 0, 100, 1, 1, 0, 3});
    check_phases(report, num_threads, std::vector<int64_t>(120, 2));
  }
}

}  // namespace streamkv::selftest
