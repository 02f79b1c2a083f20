// Rows of quantized blocks as files have them, made of random bits, and what they say, read by
// plain loops.
#pragma once

#include <memory>
#include <string>
#include <utility>
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

// A weight packed from blocks, one for each part, in pieces as a loader brings them.
struct TestQuantized {
  std::vector<Blocks> parts;
  std::vector<std::unique_ptr<Guarded>> memory;
  QuantizedWeight view;

  TestQuantized(std::vector<Blocks> blocks, bool is_paired, int64_t piece_rows = 64);
  bool is_intact() const;
  std::string name() const;
  // The output's part, and its place there.
  std::pair<const Blocks*, int64_t> find(int64_t output) const;
};

}  // namespace streamkv::selftest
