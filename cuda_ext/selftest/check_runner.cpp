// A runner without memory: each step gets an answer, whichever allocation fails.
#include <stdlib.h>

#include <new>
#include <string>

#include "selftest.h"
#include "streamkv/runner.h"

namespace {

thread_local int64_t num_allocations_left = -1;  // negative: any number

}  // namespace

void* operator new(size_t num_bytes) {
  if (num_allocations_left == 0) throw std::bad_alloc();
  if (num_allocations_left > 0) --num_allocations_left;
  void* memory = malloc(num_bytes > 0 ? num_bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void operator delete(void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }

namespace streamkv::selftest {

namespace {

// An id and a copy to host memory; an unknown magic makes the step fail with a long message.
std::string step_message(int64_t step_id, const char* magic) {
  std::string message(magic);
  message.append(4, '\0');
  message.append(reinterpret_cast<const char*>(&step_id), sizeof(step_id));
  const int32_t counts_and_copy[8] = {0, 0, 1, 0, 5, static_cast<int32_t>(CopyKind::kOut), 0, 0};
  message.append(reinterpret_cast<const char*>(counts_and_copy), sizeof(counts_and_copy));
  return message;
}

int64_t id_of(const std::string& output) {
  int64_t step_id = -1;
  memcpy(&step_id, output.data() + kOutputStepIdAt, sizeof(step_id));
  return step_id;
}

bool ends_with(const std::string& output, const std::string& error) {
  return output.size() >= error.size() &&
         output.compare(output.size() - error.size(), error.size(), error) == 0;
}

}  // namespace

void check_runner(Report& report) {
  Team team(1);
  KvCache cache = KvCache::allocate(Dtype::kFloat32, 1, 1, 1, 1, 16, 1);
  const RunnerLimits limits{1, 1, 1, 1, 0, std::chrono::nanoseconds(0)};
  Runner runner(nullptr, team, cache, 0, limits, nullptr);
  const std::string message = step_message(7, "SKI3");
  const std::string good = runner.step(message);
  report.expect(id_of(good) == 7, "the id of a step with memory");
  bool has_failed = false, has_worked = false;
  for (int64_t num_allocations = 0; num_allocations < 20; ++num_allocations) {
    const std::string next = step_message(num_allocations, "SKI3");
    std::string output;
    bool threw = false;
    num_allocations_left = num_allocations;
    try {
      output = runner.step(next);
    } catch (const std::exception&) {
      threw = true;
    }
    num_allocations_left = -1;
    const std::string name = std::to_string(num_allocations) + " allocations: ";
    report.expect(!threw && output.size() >= good.size(), name + "an answer");
    if (threw || output.size() < good.size()) continue;
    report.expect(id_of(output) == num_allocations, name + "its id");
    const bool failed = output.size() > good.size();
    report.expect(!failed || ends_with(output, "out of memory"), name + "what went wrong");
    (failed ? has_failed : has_worked) = true;
    report.expect(runner.step(message).size() == good.size(), name + "the step after it");
  }
  report.expect(has_failed && has_worked, "allocations: some too few, some enough");
  const std::string wrong = runner.step(step_message(7, "????"));
  report.expect(ends_with(wrong, "is the other side of this version?"), "the words of an error");
}

}  // namespace streamkv::selftest
