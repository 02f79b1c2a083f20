// What the checks are made of: numbers, guarded arrays, ways to run a kernel, and the verdict.
//
// The oracles are plain scalar loops in double precision, written here and sharing no code with the
// kernels. Every check also runs its kernel in several ways (items in turn, backwards with
// scratch full of NaNs and products cut otherwise, by a team) and wants the same bits.
#pragma once

#include <stdint.h>
#include <string.h>

#include <string>
#include <vector>

#include "streamkv/bound_kernel.h"
#include "streamkv/kernels.h"
#include "streamkv/team.h"

namespace streamkv::selftest {

// The same numbers on every machine (SplitMix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  float uniform();  // in [-1, 1)
  std::vector<float> uniforms(int64_t n);
  std::vector<int32_t> indices(int64_t n, int64_t limit);

 private:
  uint64_t state_;
};

// The verdict of one instruction set. Counts what holds, prints what doesn't.
class Report {
 public:
  explicit Report(const char* isa) : isa_(isa) {}
  void expect(bool holds, const std::string& what);
  // |got - expected| <= tolerance for each of n; one verdict.
  void expect_near(const float* got, const std::vector<double>& expected,
                   const std::vector<double>& tolerance, const std::string& what);
  int64_t num_checks() const { return num_checks_; }
  int64_t num_failures() const { return num_failures_; }

 private:
  const char* isa_;
  int64_t num_checks_ = 0, num_failures_ = 0;
};

// 64-byte aligned bytes, all 0xff (as float32 or bfloat16: NaNs), with more of them before and
// behind, which must stay so.
class Guarded {
 public:
  explicit Guarded(int64_t num_bytes);
  template <class T>
  T* as() {
    return static_cast<T*>(static_cast<void*>(begin_));
  }
  int64_t num_bytes() const { return num_bytes_; }
  bool is_intact() const;
  bool operator==(const Guarded& other) const {
    return num_bytes_ == other.num_bytes_ && memcmp(begin_, other.begin_, num_bytes_) == 0;
  }
  Guarded(const Guarded&) = delete;

 private:
  std::vector<unsigned char> memory_;
  unsigned char* begin_;
  int64_t num_bytes_;
};

float from_bf16(uint16_t bits);
uint16_t to_bf16(float x);  // to nearest, ties to even
float from_half(uint16_t bits);
std::vector<float> rounded_to_bf16(std::vector<float> x);
// n numbers of this type as float32.
std::vector<float> read_numbers(const void* data, Dtype dtype, int64_t n);
int64_t element_bytes(Dtype dtype);
double relative_error(Dtype dtype);  // of rounding to it

enum class Order { kForward, kBackward, kTeam };
constexpr Order kOrders[] = {Order::kForward, Order::kBackward, Order::kTeam};

// Small items, even of many rows, and short of what is fetched ahead.
constexpr Tuning kOtherTuning = {{2, 2, 64}, {3, 1, 0}};

// Runs each item once.
Team& three_threads();
void* poisoned_scratch();

template <class Args>
void run_kernel(const Kernel<Args>& kernel, const Args& args, Order order) {
  if (order == Order::kTeam) {
    BoundKernel<Args> bound{kernel, args};
    const Phase phase = bound.phase(three_threads().num_threads());
    three_threads().run(&phase, 1);
    return;
  }
  const bool is_forward = order == Order::kForward;
  set_tuning(is_forward ? kDefaultTuning : kOtherTuning);
  const int64_t num_items = kernel.num_items(args, is_forward ? 1 : 2);
  for (int64_t i = 0; i < num_items; ++i)
    kernel.run(args, is_forward ? i : num_items - 1 - i, poisoned_scratch());
  set_tuning(kDefaultTuning);
}

void check_packing(Report& report);
void check_products(Report& report);
void check_quantized(Report& report);
void check_elementwise(Report& report);
void check_attention(Report& report);
void check_masks(Report& report);
void check_runner(Report& report);
void check_sampling(Report& report);
void check_team(Report& report);

}  // namespace streamkv::selftest
