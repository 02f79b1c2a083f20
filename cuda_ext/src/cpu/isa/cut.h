// Whole numbers: how work is cut into parts.
#pragma once

#include <stdint.h>

namespace {

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// One of `parts` parts of n, as even as they come.
inline Range part_of(int64_t n, int64_t parts, int64_t part) {
  return {n * part / parts, n * (part + 1) / parts};
}

// The same of rows, cut where a tile ends.
inline Range tiled_part_of(int64_t rows, int64_t tile_height, int64_t parts, int64_t part) {
  const int64_t tiles = divide_up(rows, tile_height);
  const Range range = part_of(tiles, parts, part);
  return {rows * range.begin / tiles, rows * range.end / tiles};
}

}  // namespace
