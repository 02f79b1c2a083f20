// How a panel of a quantized weight is laid out, and what its values are once they are spread out.
//
// A panel holds kQuantizedPanel outputs, depth slowest, all of it in the order in which products
// read it. Values are kept in quads: the bytes of four depths of one output, beside the same four
// depths of the next output. A group of 32 depths is 8 quads of each of the 32 outputs.
//
// Of each group, after one another:
//   K formats          32 (Q6_K: 2 * 32, by half group) scales of a byte each, then (but for Q6_K)
//                      32 minima of a byte each
//   kInt8, Q8_0        [8 quads][32 outputs][4] bytes, with kByteOffset added
//   4, 5 and 6 bits    [4][32 outputs][4] bytes: low halves of quads 0, 2, 4, 6, high ones of 1, 3,
//                      5, 7, the low four bits of the values
//   5 bits             [32 outputs][4] bytes: a fifth bit of each quad, the first quad's lowest
//   6 bits             [2][32 outputs][4] bytes: two bits for quads 0 to 3 and 4 to 7, the first
//                      quad's lowest
//   Q*_0, Q*_1         32 float16 scales, then (Q*_1) 32 float16 minima
// K formats begin each super-block of 8 groups with 32 float16 scales of scales, then (but for
// Q6_K) 32 of minima. kInt8 ends a panel with 32 float32 scales. All of these are multiples of 64
// bytes.
//
// A value is (byte - offset) * scale + minimum, the byte without the offset being what is stored in
// so many bits. Whoever multiplies has bytes and makes good for the offset once for a group.
#pragma once

#include "cut.h"
#include "streamkv/quantized.h"

namespace {

using streamkv::kQuantizedPanel;
using streamkv::QuantizedPart;
using streamkv::QuantizedWeight;
using streamkv::WeightFormat;

constexpr int64_t kGroupDepth = streamkv::kInputGroup;
constexpr int64_t kSuperGroups = streamkv::kSuperBlock / kGroupDepth;
constexpr int64_t kGroupQuads = kGroupDepth / 4;
constexpr int64_t kGroupBytes = kGroupDepth * kQuantizedPanel;  // spread out
constexpr int64_t kQuadBytes = 4 * kQuantizedPanel;             // of one quad of each output
constexpr int64_t kHalfBytes = 2 * kQuantizedPanel;             // of a float16 for each output

// Bytes are unsigned where the instruction multiplies unsigned by signed ones.
#if defined(__ARM_NEON)
constexpr int kByteOffset = 0;
#else
constexpr int kByteOffset = 128;
#endif

constexpr bool is_super(WeightFormat f) {
  return f == WeightFormat::kQ4_K || f == WeightFormat::kQ5_K || f == WeightFormat::kQ6_K;
}

constexpr int value_bits(WeightFormat f) {
  switch (f) {
    case WeightFormat::kQ4_0:
    case WeightFormat::kQ4_1:
    case WeightFormat::kQ4_K: return 4;
    case WeightFormat::kQ5_0:
    case WeightFormat::kQ5_1:
    case WeightFormat::kQ5_K: return 5;
    case WeightFormat::kQ6_K: return 6;
    default: return 8;
  }
}

constexpr bool has_minima(WeightFormat f) {
  return f == WeightFormat::kQ4_1 || f == WeightFormat::kQ5_1 || f == WeightFormat::kQ4_K ||
         f == WeightFormat::kQ5_K;
}

// What was added to a value to make a byte of it.
constexpr int byte_offset(WeightFormat f) {
  switch (f) {
    case WeightFormat::kInt8:
    case WeightFormat::kQ8_0: return kByteOffset;
    case WeightFormat::kQ4_0: return 8;
    case WeightFormat::kQ5_0: return 16;
    case WeightFormat::kQ6_K: return 32;
    default: return 0;
  }
}

// How whole sums of a group become float32.
enum class Scaling {
  kOutput,     // no scale but the input's; the output's is multiplied at the end
  kGroup,      // a scale for each output
  kGroupMin,   // and a minimum
  kHalfGroup,  // a scale for each output and each 16 depths
};

constexpr Scaling scaling_of(WeightFormat f) {
  if (f == WeightFormat::kInt8) return Scaling::kOutput;
  if (f == WeightFormat::kQ6_K) return Scaling::kHalfGroup;
  return has_minima(f) ? Scaling::kGroupMin : Scaling::kGroup;
}

// Of a group's values.
constexpr int64_t value_bytes(WeightFormat f) { return kGroupBytes * value_bits(f) / 8; }

// Of a group without what comes once in a super-block.
constexpr int64_t group_bytes(WeightFormat f) {
  const int64_t vectors = 1 + (has_minima(f) || f == WeightFormat::kQ6_K);  // of 32 scales
  if (f == WeightFormat::kInt8) return value_bytes(f);
  return value_bytes(f) + vectors * kQuantizedPanel * (is_super(f) ? 1 : 2);
}

// From a group's begin to its values.
constexpr int64_t values_start(WeightFormat f) { return is_super(f) ? 2 * kQuantizedPanel : 0; }

// What a super-block of a K format begins with.
constexpr int64_t super_bytes(WeightFormat f) {
  if (!is_super(f)) return 0;
  return kHalfBytes * (1 + has_minima(f));
}

constexpr int64_t num_groups(int64_t depth) { return divide_up(depth, kGroupDepth); }

// From the panel's begin to a group's.
constexpr int64_t group_start(WeightFormat f, int64_t group) {
  return group * group_bytes(f) + (group / kSuperGroups + 1) * super_bytes(f);
}

// From the panel's begin to the group before which a super-block's scales lie.
constexpr int64_t super_start(WeightFormat f, int64_t super) {
  return super * (kSuperGroups * group_bytes(f) + super_bytes(f));
}

constexpr int64_t quantized_panel_bytes(WeightFormat f, int64_t depth) {
  const int64_t groups = num_groups(depth);
  const int64_t supers = divide_up(groups, kSuperGroups);
  const int64_t end = f == WeightFormat::kInt8 ? kQuantizedPanel * 4 : 0;
  return groups * group_bytes(f) + supers * super_bytes(f) + end;
}

inline uint8_t* panel_data(const QuantizedPart& part, int64_t depth, int64_t panel) {
  return (uint8_t*)part.data + panel * quantized_panel_bytes(part.format, depth);
}

// Of kInt8: the panel's 32 scales.
inline float* output_scales(const QuantizedPart& part, int64_t depth, int64_t panel) {
  return (float*)(panel_data(part, depth, panel) + num_groups(depth) * group_bytes(part.format));
}

template <WeightFormat kFormat>
struct Format {
  static constexpr WeightFormat value = kFormat;
};

// action(Format<format>{}): what is compiled for each format is chosen here, once a panel.
template <class Action>
inline auto with_format(WeightFormat format, Action action) {
  switch (format) {
    case WeightFormat::kInt8: return action(Format<WeightFormat::kInt8>{});
    case WeightFormat::kQ4_0: return action(Format<WeightFormat::kQ4_0>{});
    case WeightFormat::kQ4_1: return action(Format<WeightFormat::kQ4_1>{});
    case WeightFormat::kQ5_0: return action(Format<WeightFormat::kQ5_0>{});
    case WeightFormat::kQ5_1: return action(Format<WeightFormat::kQ5_1>{});
    case WeightFormat::kQ8_0: return action(Format<WeightFormat::kQ8_0>{});
    case WeightFormat::kQ4_K: return action(Format<WeightFormat::kQ4_K>{});
    case WeightFormat::kQ5_K: return action(Format<WeightFormat::kQ5_K>{});
    default: return action(Format<WeightFormat::kQ6_K>{});
  }
}

// Some groups of a panel as a tile multiplies them.
struct SpreadGroups {
  const uint8_t* values;  // [8 quads][32 outputs][4], group after group
  int64_t stride;         // bytes from a group's values to the next's
  const float* scales;    // [num_groups][32]; kHalfGroup: [2 * num_groups][32]; kOutput: null
  const float* minima;    // [num_groups][32]; kGroupMin alone
};

// Where they lie if they don't lie in the weight so.
struct SpreadBuffer {
  alignas(64) uint8_t values[kSuperGroups * kGroupBytes];
  alignas(64) float scales[2 * kSuperGroups * kQuantizedPanel];
  alignas(64) float minima[kSuperGroups * kQuantizedPanel];
};

}  // namespace
