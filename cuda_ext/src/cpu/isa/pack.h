// How a packed weight is laid out, and how it gets there.
//
// Panel p holds outputs [p * kPanel, + kPanel) (of the gates or of the ups, by turns, if the weight
// is paired). For each pair of depths a panel has 2 * kPanel elements: float32 by depth, then
// output; bfloat16 by output, then depth, so that a word is the two depths of one output.
#pragma once

#include "cut.h"
#include "streamkv/kernels.h"
#include "vec.h"

namespace {

using streamkv::Dtype;
using streamkv::PackArgs;
using streamkv::PackedWeight;

// Rows and vectors of a product's tile: its accumulators, the weights of one depth and what is
// broadcast fit in the registers.
#if defined(__AVX512F__)
constexpr int kTileHeight = 12, kPanelVectors = 2;  // of 32
#elif defined(__AVX2__)
constexpr int kTileHeight = 6, kPanelVectors = 2;  // of 16
#elif defined(__SSE4_1__)
constexpr int kTileHeight = 4, kPanelVectors = 2;  // of 16; a product needs one of its own
#else
constexpr int kTileHeight = 6, kPanelVectors = 4;  // of 32
#endif
constexpr int64_t kPanel = kPanelVectors * kWidth;

#if defined(__AVX512BF16__)
constexpr Dtype kBf16Inputs = Dtype::kBFloat16;
#else
constexpr Dtype kBf16Inputs = Dtype::kFloat32;
#endif

inline int64_t element_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

inline int64_t panel_bytes(const PackedWeight& weight) {
  return kPanel * weight.depth * element_bytes(weight.dtype);
}

// Panels of all outputs, or of the gates, which the ups have as many of.
inline int64_t num_panels(const PackedWeight& weight) {
  const int64_t outputs = weight.is_paired ? weight.num_outputs / 2 : weight.num_outputs;
  return divide_up(outputs, kPanel);
}

inline int64_t packed_bytes(const PackedWeight& weight) {
  return num_panels(weight) * panel_bytes(weight) * (weight.is_paired ? 2 : 1);
}

// Where an output's panel begins, and which lane of it the output is. Outputs that follow one
// another lie in the same panel until the lane is kPanel - 1 or the gates end.
struct Lane {
  char* panel;
  int64_t index;
};

inline Lane find_lane(const PackedWeight& weight, int64_t output) {
  const int64_t gates = weight.is_paired ? weight.num_outputs / 2 : weight.num_outputs;
  const int64_t is_up = output >= gates;
  if (is_up) output -= gates;
  int64_t panel = output / kPanel;
  if (weight.is_paired) panel = 2 * panel + is_up;
  return {(char*)weight.data + panel * panel_bytes(weight), output % kPanel};
}

// Depths [2 * pair, + 2) of the outputs of vector `lane` / kWidth.
inline void put_pair(char* panel, Dtype dtype, int64_t pair, int64_t lane, vfloat even,
                     vfloat odd) {
  if (dtype == Dtype::kFloat32) {
    float* at = (float*)panel + pair * 2 * kPanel + lane;
    store(at, even);
    store(at + kPanel, odd);
  } else {
    store_words((uint32_t*)panel + pair * kPanel + lane, to_words(even, odd));
  }
}

// Four words of kWidth rows are 2 pairs of float32 or 4 of the narrow types; `limit` is where the
// depth ends.
inline void put_words(const PackArgs& args, const vuint words[4], int64_t pair, int64_t limit,
                      Lane lane) {
  for (int w = 0; w < 4; ++w) {
    if (args.source_dtype == Dtype::kFloat32) {
      if (w % 2 == 0 && pair < limit)
        put_pair(lane.panel, args.weight.dtype, pair++, lane.index, (vfloat)words[w],
                 (vfloat)words[w + 1]);
    } else if (pair < limit) {
      const bool is_half = args.source_dtype == Dtype::kFloat16;
      const vfloat even = is_half ? half_to_float(words[w] & 0xffffu) : even_of(words[w]);
      const vfloat odd = is_half ? half_to_float(words[w] >> 16) : odd_of(words[w]);
      put_pair(lane.panel, args.weight.dtype, pair++, lane.index, even, odd);
    }
  }
}

// kWidth rows into kWidth lanes. 16 bytes of each row at a time, transposed; the last ones through
// a copy that ends with zeros.
inline void pack_vector(const PackArgs& args, int64_t row, Lane lane) {
  const int64_t row_bytes = args.weight.depth * element_bytes(args.source_dtype);
  const int64_t limit = args.weight.depth / 2;
  const int64_t pairs = 8 / element_bytes(args.source_dtype);
  const char* rows[kWidth];
  for (int i = 0; i < kWidth; ++i) rows[i] = (const char*)args.source + (row + i) * row_bytes;
  vuint words[4];
  int64_t at = 0, pair = 0;
  for (; at + 16 <= row_bytes; at += 16, pair += pairs) {
    transpose_words(rows, at, words);
    put_words(args, words, pair, limit, lane);
  }
  if (at == row_bytes) return;
  char rest[kWidth][16] = {};
  for (int i = 0; i < kWidth; ++i) {
    memcpy(rest[i], rows[i] + at, row_bytes - at);
    rows[i] = rest[i];
  }
  transpose_words(rows, 0, words);
  put_words(args, words, pair, limit, lane);
}

inline float read_element(const void* source, Dtype dtype, int64_t index) {
  if (dtype == Dtype::kFloat32) return ((const float*)source)[index];
  const uint32_t bits = ((const uint16_t*)source)[index];
  const vuint word = broadcast_word(bits);
  return dtype == Dtype::kFloat16 ? half_to_float(word)[0] : even_of(word)[0];
}

// One row into one lane, for vectors that other calls fill too.
inline void pack_lane(const PackArgs& args, int64_t row, Lane lane) {
  const int64_t depth = args.weight.depth;
  for (int64_t k = 0; k < depth; k += 2) {
    const float even = read_element(args.source, args.source_dtype, row * depth + k);
    const float odd = read_element(args.source, args.source_dtype, row * depth + k + 1);
    if (args.weight.dtype == Dtype::kFloat32) {
      float* at = (float*)lane.panel + k * kPanel + lane.index;
      at[0] = even;
      at[kPanel] = odd;
    } else {
      ((uint32_t*)lane.panel)[k / 2 * kPanel + lane.index] =
          to_words(broadcast(even), broadcast(odd))[0];
    }
  }
}

// Whole vectors where the rows cover them: other calls may be filling the lanes beside.
inline void pack(const PackArgs& args) {
  const PackedWeight& weight = args.weight;
  const int64_t gates = weight.is_paired ? weight.num_outputs / 2 : weight.num_outputs;
  for (int64_t row = 0; row < args.num_rows;) {
    const int64_t output = args.first_output + row;
    const Lane lane = find_lane(weight, output);
    const int64_t end = output < gates ? gates : weight.num_outputs;
    const bool is_whole = lane.index % kWidth == 0 && row + kWidth <= args.num_rows &&
                          output + kWidth <= end;
    is_whole ? pack_vector(args, row, lane) : pack_lane(args, row, lane);
    row += is_whole ? kWidth : 1;
  }
}

// One output's weights, as float32 [depth].
inline void read_lane(Lane lane, Dtype dtype, int64_t depth, float* out) {
  if (dtype == Dtype::kFloat32) {
    const float* at = (const float*)lane.panel + lane.index;
    for (int64_t k = 0; k < depth; ++k) out[k] = at[k * kPanel];
    return;
  }
  const uint32_t* at = (const uint32_t*)lane.panel + lane.index;
  for (int64_t k = 0; k < depth; k += 2) {
    const uint32_t word = at[k / 2 * kPanel], bits[2] = {word << 16, word & 0xffff0000u};
    memcpy(out + k, bits, sizeof(bits));
  }
}

inline void unpack(const PackedWeight& weight, int64_t first_output, int64_t num_rows, float* out) {
  for (int64_t row = 0; row < num_rows; ++row)
    read_lane(find_lane(weight, first_output + row), weight.dtype, weight.depth,
              out + row * weight.depth);
}

}  // namespace
