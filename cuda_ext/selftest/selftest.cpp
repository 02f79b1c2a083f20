#include "selftest.h"

#include <math.h>
#include <stdio.h>

#include <algorithm>

namespace streamkv::selftest {

namespace {

constexpr int64_t kGuardBytes = 128;
constexpr unsigned char kGuard = 0xff;
constexpr int64_t kMaxPrinted = 20;

}  // namespace

uint64_t Random::bits() {
  uint64_t z = state_ += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

float Random::uniform() {
  return static_cast<float>(static_cast<double>(bits() >> 40) * 0x1p-23 - 1.0);
}

std::vector<float> Random::uniforms(int64_t n) {
  std::vector<float> numbers(n);
  for (float& number : numbers) number = uniform();
  return numbers;
}

std::vector<int32_t> Random::indices(int64_t n, int64_t limit) {
  std::vector<int32_t> numbers(n);
  for (int32_t& number : numbers) number = static_cast<int32_t>(below(limit));
  return numbers;
}

void Report::expect(bool holds, const std::string& what) {
  ++num_checks_;
  if (holds) return;
  if (++num_failures_ <= kMaxPrinted) printf("%s: FAILED: %s\n", isa_, what.c_str());
  if (num_failures_ == kMaxPrinted) printf("%s: further failures are only counted\n", isa_);
}

void Report::expect_near(const float* got, const std::vector<double>& expected,
                         const std::vector<double>& tolerance, const std::string& what) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = fabs(static_cast<double>(got[i]) - expected[i]);
    if (error <= tolerance[i]) continue;  // not so for a NaN
    char text[160];
    snprintf(text, sizeof(text), ": number %zu is %.9g, expected %.9g within %.3g", i,
             static_cast<double>(got[i]), expected[i], tolerance[i]);
    return expect(false, what + text);
  }
  expect(true, what);
}

Guarded::Guarded(int64_t num_bytes)
    : memory_(num_bytes + 2 * kGuardBytes + 64, kGuard), num_bytes_(num_bytes) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(memory_.data()) + kGuardBytes;
  begin_ = memory_.data() + kGuardBytes + (64 - first % 64) % 64;
}

bool Guarded::is_intact() const {
  const auto is_guard = [](unsigned char byte) { return byte == kGuard; };
  const unsigned char* end = begin_ + num_bytes_;
  return std::all_of(memory_.data(), memory_.data() + (begin_ - memory_.data()), is_guard) &&
         std::all_of(end, memory_.data() + memory_.size(), is_guard);
}

float from_bf16(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x;
  memcpy(&x, &word, sizeof(x));
  return x;
}

uint16_t to_bf16(float x) {  // finite
  uint32_t word;
  memcpy(&word, &x, sizeof(word));
  const uint32_t rest = word & 0xffff, kept = word >> 16;
  const bool up = rest > 0x8000 || (rest == 0x8000 && kept % 2 == 1);
  return static_cast<uint16_t>(kept + up);
}

float from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double magnitude = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                           : exponent == 0 ? ldexp(fraction, -24)
                                           : ldexp(1024 + fraction, exponent - 25);
  return static_cast<float>((bits & 0x8000) != 0 ? -magnitude : magnitude);
}

std::vector<float> rounded_to_bf16(std::vector<float> x) {
  for (float& number : x) number = from_bf16(to_bf16(number));
  return x;
}

std::vector<float> read_numbers(const void* data, Dtype dtype, int64_t n) {
  std::vector<float> numbers(n);
  for (int64_t i = 0; i < n; ++i) {
    if (dtype == Dtype::kFloat32) {
      numbers[i] = static_cast<const float*>(data)[i];
    } else {
      const uint16_t bits = static_cast<const uint16_t*>(data)[i];
      numbers[i] = dtype == Dtype::kBFloat16 ? from_bf16(bits) : from_half(bits);
    }
  }
  return numbers;
}

int64_t element_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

double relative_error(Dtype dtype) { return dtype == Dtype::kFloat32 ? 0x1p-24 : 0x1p-8; }

Team& three_threads() {
  static Team team(3);
  return team;
}

void* poisoned_scratch() {
  static Guarded scratch(kScratchBytes);
  memset(scratch.as<char>(), 0xff, kScratchBytes);
  return scratch.as<void>();
}

}  // namespace streamkv::selftest
