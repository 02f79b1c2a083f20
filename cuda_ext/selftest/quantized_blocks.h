// Rows of quantized blocks as files have them, made of random bits, and what they say, read by
// plain loops.
#pragma once

#include <vector>

#include "selftest.h"

namespace streamkv::selftest {

enum class Filling { kRandom, kLeast, kGreatest };  // of the values' bits

struct Blocks {
  WeightFormat format;
  int64_t num_outputs, depth;
  std::vector<uint8_t> bytes;  // [num_outputs, row_bytes]
  // [num_outputs, depth]: a number is level * scale + minimum; exact in double precision.
  std::vector<int> levels;
  std::vector<float> scales, minima;
  std::vector<float> values;  // the same in float32, each operation rounded

  Blocks(Random& random, WeightFormat format, int64_t num_outputs, int64_t depth,
         Filling filling = Filling::kRandom);
  int64_t row_bytes() const { return static_cast<int64_t>(bytes.size()) / num_outputs; }
};

}  // namespace streamkv::selftest
