// Rows of a quantized weight as float32, just as the file means them: the embedding, and unpacking.
#pragma once

#include "elementwise.h"
#include "quantized_layout.h"

namespace {

using streamkv::QuantizedEmbeddingArgs;

// A group's 32 bytes of one output, offset included, as the layout's planes have them.
template <int kBits>
inline void read_bytes(const uint8_t* values, int64_t output, uint8_t bytes[kGroupDepth]) {
  const auto word = [&](int64_t plane) {
    uint32_t x;
    memcpy(&x, values + plane * kQuadBytes + 4 * output, sizeof(x));
    return x;
  };
  for (int q = 0; q < kGroupQuads; ++q) {
    uint32_t quad;
    if (kBits == 8) quad = word(q);
    else quad = (word(q / 2) >> (q % 2 * 4)) & 0x0f0f0f0fu;
    if (kBits == 5) quad |= ((word(4) >> q) & 0x01010101u) << 4;
    if (kBits == 6) quad |= ((word(4 + q / 4) >> (q % 4 * 2)) & 0x03030303u) << 4;
    memcpy(bytes + 4 * q, &quad, sizeof(quad));
  }
}

inline float read_half(const uint8_t* halves, int64_t index) {
  uint16_t bits;
  memcpy(&bits, halves + 2 * index, sizeof(bits));
  return half_to_float(broadcast_word(bits))[0];
}

// Scales of a group's two halves, and its minimum.
struct GroupScales {
  float scales[2], minimum;
};

template <WeightFormat kFormat>
inline GroupScales read_scales(const uint8_t* super, const uint8_t* at, int64_t output) {
  if constexpr (is_super(kFormat)) {
    const float scale = read_half(super, output);
    const float first = (int8_t)at[output], second = (int8_t)at[kQuantizedPanel + output];
    if constexpr (!has_minima(kFormat)) return {{scale * first, scale * second}, 0.0f};
    const float minimum = read_half(super + kHalfBytes, output) * second;
    return {{scale * first, scale * first}, -minimum};
  } else {
    const uint8_t* halves = at + value_bytes(kFormat);
    const float scale = read_half(halves, output);
    const float minimum = has_minima(kFormat) ? read_half(halves + kHalfBytes, output) : 0;
    return {{scale, scale}, minimum};
  }
}

// One output's first `depth` values of a group. Each product and each sum is rounded on its own.
template <WeightFormat kFormat>
inline void read_group(const uint8_t* values, int64_t output, const GroupScales& scales,
                       int64_t depth, float* out) {
  uint8_t bytes[kGroupDepth];
  read_bytes<value_bits(kFormat)>(values, output, bytes);
  float x[kGroupDepth];
  for (int64_t i = 0; i < kGroupDepth; ++i) {
    const int8_t value = bytes[i] - byte_offset(kFormat);
    x[i] = (float)value * scales.scales[i / (kGroupDepth / 2)];
    if (has_minima(kFormat)) x[i] += scales.minimum;
  }
  memcpy(out, x, depth * sizeof(float));
}

template <WeightFormat kFormat>
void read_row(const QuantizedPart& part, int64_t depth, int64_t output, float* out) {
  const int64_t panel = output / kQuantizedPanel, lane = output % kQuantizedPanel;
  const uint8_t* begin = panel_data(part, depth, panel);
  GroupScales scales = {};
  if (kFormat == WeightFormat::kInt8)
    scales.scales[0] = scales.scales[1] = output_scales(part, depth, panel)[lane];
  for (int64_t group = 0; group < num_groups(depth); ++group) {
    const uint8_t* at = begin + group_start(kFormat, group);
    const uint8_t* super = begin + super_start(kFormat, group / kSuperGroups);
    if (kFormat != WeightFormat::kInt8) scales = read_scales<kFormat>(super, at, lane);
    const int64_t first = group * kGroupDepth, count = at_most(depth - first, kGroupDepth);
    read_group<kFormat>(at + values_start(kFormat), lane, scales, count, out + first);
  }
}

inline void read_output(const QuantizedWeight& weight, int64_t output, float* out) {
  const QuantizedPart* part = weight.parts;
  for (; output >= part->num_outputs; ++part) output -= part->num_outputs;
  with_format(part->format, [&](auto format) {
    read_row<format.value>(*part, weight.depth, output, out);
  });
}

void quantized_unpack(const QuantizedWeight& weight, int64_t first_output, int64_t num_rows,
                      float* out) {
  for (int64_t row = 0; row < num_rows; ++row)
    read_output(weight, first_output + row, out + row * weight.depth);
}

int64_t quantized_embedding_num_items(const QuantizedEmbeddingArgs& args, int) {
  return num_row_items(args.num_tokens, args.weight.depth, kItemFarElements);
}

void quantized_embedding_run(const QuantizedEmbeddingArgs& args, int64_t item, void*) {
  each_row(args.num_tokens, quantized_embedding_num_items(args, 1), item, [&](int64_t token) {
    read_output(args.weight, args.token_ids[token], args.out + token * args.weight.depth);
  });
}

}  // namespace
