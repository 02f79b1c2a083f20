// Blocks as GGUF has them, repacked into panels (quantized_layout.h).
//
// 32 rows at a time, a block of each: copied beside one another, filled up with zeros, then turned
// into quads of kWidth outputs at once. What reads a block (`read_quads`, `copy_scales`) knows its
// format, what writes a group (`put_quads`) only how many bits a value has.
#pragma once

#include "quantized_layout.h"
#include "vec.h"

namespace {

using streamkv::kSuperBlock;
using streamkv::QuantizedPackArgs;

// Of a row in the source.
struct SourceBlock {
  int64_t depth, bytes;
};

constexpr SourceBlock source_block(WeightFormat f) {
  switch (f) {
    case WeightFormat::kQ4_0: return {kGroupDepth, 2 + 16};
    case WeightFormat::kQ4_1: return {kGroupDepth, 4 + 16};
    case WeightFormat::kQ5_0: return {kGroupDepth, 2 + 4 + 16};
    case WeightFormat::kQ5_1: return {kGroupDepth, 4 + 4 + 16};
    case WeightFormat::kQ8_0: return {kGroupDepth, 2 + 32};
    case WeightFormat::kQ4_K: return {kSuperBlock, 4 + 12 + 128};
    case WeightFormat::kQ5_K: return {kSuperBlock, 4 + 12 + 32 + 128};
    case WeightFormat::kQ6_K: return {kSuperBlock, 128 + 64 + 16 + 2};
    default: return {kGroupDepth, 32};  // kInt8: behind the row's scale
  }
}

constexpr int64_t source_row_bytes(WeightFormat f, int64_t depth) {
  if (f == WeightFormat::kInt8) return 4 + depth;
  return depth / source_block(f).depth * source_block(f).bytes;
}

// The same block of 32 rows.
constexpr int64_t kStagedBytes = 224;  // the greatest block, and what is read past its end
struct Staged {
  alignas(64) char bytes[kQuantizedPanel][kStagedBytes];
};

// Words [0, 4) from `offset` on in kWidth staged rows.
inline void read_words(const Staged& staged, int64_t row, int64_t offset, vuint words[4]) {
  const char* rows[kWidth];
  for (int i = 0; i < kWidth; ++i) rows[i] = staged.bytes[row + i];
  transpose_words(rows, offset, words);
}

// The bits d of a word's low four become the bits 4 of its bytes d.
inline vuint fifth_bits(vuint x) { return (((x & 0xfu) * 0x00204081u) & 0x01010101u) << 4; }

// Quads of the blocks of 32 depths: the first 16 are low halves, the others high ones.
template <WeightFormat kFormat>
inline void read_simple(const Staged& staged, int64_t row, vuint quads[8]) {
  constexpr int64_t kHighAt = has_minima(kFormat) ? 4 : 2;
  constexpr int64_t kValuesAt = source_block(kFormat).bytes - 16;
  vuint low[4], high[4];
  read_words(staged, row, kValuesAt, low);
  if (value_bits(kFormat) == 5) read_words(staged, row, kHighAt, high);
  for (int q = 0; q < 8; ++q) {
    quads[q] = (q < 4 ? low[q] : low[q - 4] >> 4) & 0x0f0f0f0fu;
    if (value_bits(kFormat) == 5) quads[q] |= fifth_bits(high[0] >> (4 * q));
  }
}

// Quads of a group of a super-block, whose 32 values lie in one half of as many bytes.
template <WeightFormat kFormat>
inline void read_super(const Staged& staged, int64_t row, int64_t group, vuint quads[8]) {
  constexpr bool kSix = kFormat == WeightFormat::kQ6_K, kFive = kFormat == WeightFormat::kQ5_K;
  constexpr int64_t kLowAt = kSix ? 0 : kFive ? 48 : 16, kHighAt = kSix ? 128 : 16;
  // Q6_K: two halves of 128 depths, in each first the low halves of two groups, then the high ones.
  const int64_t chunk = kSix ? group / 4 * 2 + group % 2 : group / 2;
  const bool is_high = (kSix ? group / 2 : group) % 2 != 0;
  for (int part = 0; part < 2; ++part) {
    vuint low[4], high[4];
    read_words(staged, row, kLowAt + chunk * 32 + part * 16, low);
    if (kSix) read_words(staged, row, kHighAt + group / 4 * 32 + part * 16, high);
    if (kFive) read_words(staged, row, kHighAt + part * 16, high);
    for (int q = 0; q < 4; ++q) {
      vuint& quad = quads[4 * part + q];
      quad = (is_high ? low[q] >> 4 : low[q]) & 0x0f0f0f0fu;
      if (kSix) quad |= ((high[q] >> (group % 4 * 2)) & 0x03030303u) << 4;
      if (kFive) quad |= ((high[q] >> group) & 0x01010101u) << 4;
    }
  }
}

template <WeightFormat kFormat>
inline void read_quads(const Staged& staged, int64_t row, int64_t group, vuint quads[8]) {
  if constexpr (value_bits(kFormat) == 8) {
    constexpr int64_t kValuesAt = kFormat == WeightFormat::kQ8_0 ? 2 : 0;
    read_words(staged, row, kValuesAt, quads);
    read_words(staged, row, kValuesAt + 16, quads + 4);
    for (int q = 0; q < 8; ++q) quads[q] ^= kByteOffset * 0x01010101u;
  } else if constexpr (is_super(kFormat)) {
    read_super<kFormat>(staged, row, group, quads);
  } else {
    read_simple<kFormat>(staged, row, quads);
  }
}

// Values of kWidth outputs into a group's planes, from output `row` of the panel on.
template <int kBits>
inline void put_quads(const vuint quads[8], int64_t row, uint8_t* values) {
  uint8_t* at = values + 4 * row;
  if constexpr (kBits == 8) {
    for (int q = 0; q < 8; ++q) store_words(at + q * kQuadBytes, quads[q]);
    return;
  }
  vuint high[2] = {};
  for (int q = 0; q < 8; ++q) {
    const vuint above = (quads[q] >> 4) & 0x03030303u;
    if (q % 2 == 0)
      store_words(at + q / 2 * kQuadBytes,
                  (quads[q] & 0x0f0f0f0fu) | (quads[q + 1] & 0x0f0f0f0fu) << 4);
    if (kBits == 5) high[0] |= above << q;
    if (kBits == 6) high[q / 4] |= above << (q % 4 * 2);
  }
  for (int plane = 0; plane < kBits - 4; ++plane)
    store_words(at + (4 + plane) * kQuadBytes, high[plane]);
}

// The 6-bit scale (from 0) or minimum (from 4) of a group of Q4_K and Q5_K, whose 12 bytes hold the
// low six bits of four groups, then their four high bits beside the low ones of four others.
inline uint8_t super_scale(const uint8_t* packed, int64_t group, bool is_minimum) {
  const int64_t from = is_minimum ? 4 : 0;
  if (group < 4) return packed[group + from] & 63;
  const uint8_t low = is_minimum ? packed[group + 4] >> 4 : packed[group + 4] & 15;
  return low | (packed[group - 4 + from] >> 6 << 4);
}

inline void copy_half(const char* from, int64_t row, uint8_t* to) { memcpy(to + 2 * row, from, 2); }

// One row's scales of a group. `super` is where its super-block begins, `at` the group.
template <WeightFormat kFormat>
inline void copy_scales(const char* block, int64_t row, int64_t group, uint8_t* super,
                        uint8_t* at) {
  if constexpr (kFormat == WeightFormat::kQ6_K) {
    if (group == 0) copy_half(block + 208, row, super);
    at[row] = block[192 + 2 * group];
    at[kQuantizedPanel + row] = block[192 + 2 * group + 1];
  } else if constexpr (is_super(kFormat)) {
    if (group == 0) copy_half(block, row, super);
    if (group == 0) copy_half(block + 2, row, super + kHalfBytes);
    at[row] = super_scale((const uint8_t*)block + 4, group, false);
    at[kQuantizedPanel + row] = super_scale((const uint8_t*)block + 4, group, true);
  } else if constexpr (kFormat != WeightFormat::kInt8) {
    copy_half(block, row, at + value_bytes(kFormat));
    if (has_minima(kFormat)) copy_half(block + 2, row, at + value_bytes(kFormat) + kHalfBytes);
  }
}

// Block `index` of `num_rows` rows, zeros in the others and behind the end of depth.
template <WeightFormat kFormat>
inline void stage(const char* rows, int64_t num_rows, int64_t depth, int64_t index, Staged& to) {
  constexpr int64_t kBytes = source_block(kFormat).bytes;
  const int64_t row_bytes = source_row_bytes(kFormat, depth);
  const int64_t at = (kFormat == WeightFormat::kInt8 ? 4 : 0) + index * kBytes;
  const int64_t left = at_most(row_bytes - at, kBytes);
  for (int64_t row = 0; row < kQuantizedPanel; ++row) {
    const int64_t bytes = row < num_rows ? left : 0;
    if (bytes == kBytes) memcpy(to.bytes[row], rows + row * row_bytes + at, kBytes);
    else memset(to.bytes[row], 0, kBytes);
    if (bytes < kBytes && bytes > 0) memcpy(to.bytes[row], rows + row * row_bytes + at, bytes);
  }
}

// Up to 32 rows into a panel.
template <WeightFormat kFormat>
void pack_panel(const QuantizedPart& part, int64_t depth, int64_t panel, const char* rows,
                int64_t num_rows) {
  constexpr int64_t kBlockGroups = source_block(kFormat).depth / kGroupDepth;
  uint8_t* begin = panel_data(part, depth, panel);
  Staged staged;
  memset(&staged, 0, sizeof(staged));
  for (int64_t block = 0; block < num_groups(depth) / kBlockGroups; ++block) {
    stage<kFormat>(rows, num_rows, depth, block, staged);
    for (int64_t i = 0; i < kBlockGroups; ++i) {
      uint8_t* at = begin + group_start(kFormat, block * kBlockGroups + i);
      uint8_t* super = begin + super_start(kFormat, block);
      for (int64_t row = 0; row < kQuantizedPanel; ++row)
        copy_scales<kFormat>(staged.bytes[row], row, i, super, at);
      for (int64_t row = 0; row < kQuantizedPanel; row += kWidth) {
        vuint quads[8];
        read_quads<kFormat>(staged, row, i, quads);
        put_quads<value_bits(kFormat)>(quads, row, at + values_start(kFormat));
      }
    }
  }
  if (kFormat != WeightFormat::kInt8) return;
  float* scales = output_scales(part, depth, panel);
  memset(scales, 0, kQuantizedPanel * sizeof(float));
  for (int64_t row = 0; row < num_rows; ++row)
    memcpy(scales + row, rows + row * source_row_bytes(kFormat, depth), sizeof(float));
}

// Whole panels; the last rows of a part fill up theirs.
void quantized_pack(const QuantizedPackArgs& args) {
  const int64_t row_bytes = source_row_bytes(args.part.format, args.depth);
  for (int64_t row = 0; row < args.num_rows; row += kQuantizedPanel) {
    const int64_t panel = (args.first_output + row) / kQuantizedPanel;
    const int64_t num_rows = at_most(args.num_rows - row, kQuantizedPanel);
    with_format(args.part.format, [&](auto format) {
      pack_panel<format.value>(args.part, args.depth, panel,
                               (const char*)args.source + row * row_bytes, num_rows);
    });
  }
}

int64_t quantized_packed_bytes(WeightFormat format, int64_t num_outputs, int64_t depth) {
  return divide_up(num_outputs, kQuantizedPanel) * quantized_panel_bytes(format, depth);
}

}  // namespace
