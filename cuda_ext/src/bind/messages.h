// Messages and seconds as Python has them: what channel.cpp and runner.cpp share.
#pragma once

#include <nanobind/nanobind.h>
#include <stdint.h>

#include <algorithm>
#include <chrono>
#include <string_view>

namespace streamkv {

inline std::string_view view(const nanobind::bytes& bytes) {
  return {bytes.c_str(), bytes.size()};
}

inline nanobind::bytes to_bytes(std::string_view message) {
  return nanobind::bytes(message.data(), message.size());
}

inline std::chrono::nanoseconds to_nanoseconds(double seconds) {
  constexpr double kLongest = 1e6;  // so that a deadline can't overflow
  const double waited = seconds > 0.0 ? std::min(seconds, kLongest) : 0.0;  // NaN: not at all
  return std::chrono::nanoseconds(static_cast<int64_t>(waited * 1e9));
}

}  // namespace streamkv
