// Products with quantized weights: items of some rows of inputs and some panels, made of tiles.
#pragma once

#include "matmul.h"
#include "quantized_rows.h"
#include "quantized_tile.h"

namespace {

using streamkv::QuantizedMatmulArgs;

// Up to so many rows an item takes as many weights as for one; for more it takes fewer.
constexpr int64_t kFewRows = 4;
// Items that a thread has at least: one that comes late leaves something to the others.
constexpr int64_t kMinLaneItems = 2;
// Rows of an item end where tiles do; as many as stay in the second-level cache (matmul.h).
constexpr int64_t kQuantizedHeight = dot_height(4);

// Panels that are computed together: one, or one of the gates and one of the ups.
inline int64_t num_units(const QuantizedWeight& weight) {
  int64_t units = 0;
  const int64_t parts = weight.is_paired ? 1 : weight.num_parts;
  for (int64_t i = 0; i < parts; ++i)
    units += divide_up(weight.parts[i].num_outputs, kQuantizedPanel);
  return units;
}

// Items that follow one another lie in different lanes, as many as there are threads: one that
// takes them by turns with the others goes on in its lane, where it has fetched ahead before.
struct QuantizedCut {
  int64_t num_units, row_parts, unit_parts;
  int64_t lanes;  // unit_parts is a multiple of it
};

inline QuantizedCut cut_quantized_matmul(const QuantizedMatmulArgs& args) {
  const QuantizedWeight& weight = args.weight;
  const int64_t row_bytes = num_groups(weight.depth) * sizeof(InputGroup);
  const int64_t near_rows = at_least(kItemInputBytes / row_bytes, kQuantizedHeight);
  const int64_t item_rows = at_most(near_rows, tuning.quantized.item_tiles * kQuantizedHeight);
  QuantizedCut cut;
  cut.num_units = num_units(weight);
  cut.row_parts = divide_up(args.num_rows, item_rows);
  const int64_t rows = divide_up(args.num_rows, cut.row_parts);
  const int64_t panel = quantized_panel_bytes(weight.parts[0].format, weight.depth);
  const int64_t unit = panel * (weight.is_paired ? 2 : 1) * at_least(rows / kFewRows, 1);
  const int64_t item_units = at_least((tuning.quantized.item_kib << 10) / unit, 1);
  const int64_t parts = divide_up(cut.num_units, item_units);
  cut.lanes = at_least(at_most(args.num_threads, cut.num_units / kMinLaneItems), 1);
  const int64_t lane_units = cut.num_units / cut.lanes;
  const int64_t lane_items = at_least(divide_up(parts, cut.lanes), kMinLaneItems);
  cut.unit_parts = at_most(lane_items, lane_units) * cut.lanes;
  return cut;
}

inline Range rows_of(const QuantizedMatmulArgs& args, const QuantizedCut& cut, int64_t item) {
  return tiled_part_of(args.num_rows, kQuantizedHeight, cut.row_parts, item / cut.unit_parts);
}

inline Range units_of(const QuantizedCut& cut, int64_t item) {
  const int64_t index = item % cut.unit_parts, lane = index % cut.lanes;
  const int64_t part = lane * (cut.unit_parts / cut.lanes) + index / cut.lanes;
  return part_of(cut.num_units, cut.unit_parts, part);
}

int64_t quantized_matmul_num_items(const QuantizedMatmulArgs& args, int) {
  if (args.num_rows == 0) return 0;
  const QuantizedCut cut = cut_quantized_matmul(args);
  return cut.row_parts * cut.unit_parts;
}

// Some rows of a product while an item computes them.
struct QuantizedStrip {
  const QuantizedMatmulArgs* args;
  Range rows;
  SpreadBuffer* buffer;
  float* sums;  // [unit, rows, kQuantizedPanel]
};

// All rows of the strip times the same groups of a panel, in tiles.
template <class Kind, int kMaxHeight>
inline void multiply_rows(const QuantizedStrip& strip, Range groups, QuantizedTile& tile,
                          float* sums) {
  const int64_t rows = strip.rows.size();
  tile.x_stride = num_groups(strip.args->weight.depth) * sizeof(InputGroup);
  tile.num_groups = groups.size();
  for (int64_t row = 0; row < rows;) {
    const int64_t height = first_height(rows - row, kMaxHeight), end = row + height;
    tile.x = (const char*)strip.args->x + (strip.rows.begin + row) * tile.x_stride +
             groups.begin * sizeof(InputGroup);
    tile.sums = sums + row * kQuantizedPanel;
    tile.ahead_groups = {groups.size() * row / rows, groups.size() * end / rows};
    tile.next_x = end < rows ? height * tile.x_stride  // or the first one's, of the next groups
                             : groups.size() * (int64_t)sizeof(InputGroup) - row * tile.x_stride;
    multiply_of<Kind, kMaxHeight>(height)(tile);
    row = end;
  }
}

inline void scale_outputs(const float* scales, int64_t rows, float* sums) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < kQuantizedPanel; i += kWidth) {
      float* at = sums + r * kQuantizedPanel + i;
      store(at, load(at) * load(scales + i));
    }
}

template <WeightFormat kFormat>
void sum_quantized_panel(const QuantizedStrip& strip, const QuantizedPart& part, int64_t panel,
                         float* sums) {
  constexpr int kBits = value_bits(kFormat), kHeight = dot_height(kBits);
  constexpr Source kPacked = kBits != 4          ? Source::kSpread
                             : is_super(kFormat) ? Source::kPackedValues
                                                 : Source::kPackedGroups;
  using Packed = TileKind<scaling_of(kFormat), dot_bits(kBits), kPacked>;
  using Spread = TileKind<scaling_of(kFormat), dot_bits(kBits), Source::kSpread>;
  const int64_t depth = strip.args->weight.depth, all = num_groups(depth);
  const int64_t rows = strip.rows.size();
  const bool is_one_tile = rows <= kHeight;
  const int64_t blocks = divide_up(all, kSuperGroups);  // whole super-blocks where there are any
  for (int64_t block = 0; block < blocks; ++block) {
    const Range groups = part_of(all, blocks, block);
    QuantizedTile tile;
    tile.offset = byte_offset(kFormat);
    tile.is_first = block == 0;
    if (is_one_tile && kBits == 4) {
      tile.weights = spread_packed<kFormat>(part, depth, panel, groups.begin, groups.size(),
                                            *strip.buffer);
      tile.ahead = tuning.quantized.ahead_bytes;
      multiply_rows<Packed, kHeight>(strip, groups, tile, sums);
    } else {
      tile.weights = spread<kFormat>(part, depth, panel, groups.begin, groups.size(),
                                     *strip.buffer);
      const uint8_t* next = panel_data(part, depth, panel) + group_start(kFormat, groups.end);
      tile.ahead = is_one_tile && kBits == 8 ? tuning.quantized.ahead_bytes
                                            : next - tile.weights.values;
      multiply_rows<Spread, kHeight>(strip, groups, tile, sums);
    }
  }
  if (kFormat == WeightFormat::kInt8)
    scale_outputs(output_scales(part, depth, panel), strip.rows.size(), sums);
}

inline void sum_panel(const QuantizedStrip& strip, const QuantizedPart& part, int64_t panel,
                      float* sums) {
  with_format(part.format, [&](auto format) {
    sum_quantized_panel<format.value>(strip, part, panel, sums);
  });
}

// A vector of a row that ends in it or ended before.
inline vfloat load_left(const float* p, int64_t left) { return load_part(p, at_least(left, 0)); }

// out = sums + bias + residual for `left` outputs from `output` on.
void finish_quantized(const QuantizedStrip& strip, int64_t output, int64_t left) {
  const QuantizedMatmulArgs& args = *strip.args;
  for (int64_t r = 0; r < strip.rows.size(); ++r)
    for (int64_t i = 0; i < at_most(left, kQuantizedPanel); i += kWidth) {
      const int64_t at = (strip.rows.begin + r) * args.weight.num_outputs + output + i;
      vfloat y = load(strip.sums + r * kQuantizedPanel + i);
      if (args.bias != nullptr) y += load_part(args.bias + output + i, left - i);
      if (args.residual != nullptr) y += load_part(args.residual + at, left - i);
      store_part((float*)args.out + at, y, left - i);
    }
}

// silu(gate) * up for a row's 32 outputs of two panels, `left` of which there are.
inline void gate_row(const QuantizedStrip& strip, int64_t row, int64_t output, int64_t left,
                     vfloat out[kGroupVectors]) {
  const float *bias = strip.args->bias, *sums = strip.sums + row * kQuantizedPanel;
  const int64_t outputs = strip.args->weight.num_outputs / 2;
  for (int v = 0; v < kGroupVectors; ++v) {
    const int64_t i = v * kWidth;
    vfloat gate = load(sums + i), up = load(sums + strip.rows.size() * kQuantizedPanel + i);
    if (bias != nullptr) {
      gate += load_left(bias + output + i, left - i);
      up += load_left(bias + outputs + output + i, left - i);
    }
    out[v] = silu(gate) * up;
  }
}

// The outputs of a unit are just one group of inputs of the next product.
void finish_gated(const QuantizedStrip& strip, int64_t unit) {
  const QuantizedMatmulArgs& args = *strip.args;
  const int64_t outputs = args.weight.num_outputs / 2, output = unit * kQuantizedPanel;
  const int64_t left = outputs - output;
  for (int64_t r = 0; r < strip.rows.size(); ++r) {
    const int64_t row = strip.rows.begin + r;
    vfloat y[kGroupVectors];
    gate_row(strip, r, output, left, y);
    if (args.out_dtype == Dtype::kInt8) {
      quantize_group(y, (InputGroup*)args.out + row * row_groups(outputs) + unit);
      continue;
    }
    for (int64_t i = 0; i < at_most(left, kQuantizedPanel); i += kWidth) {
      const int64_t at = row * outputs + output + i;
      if (args.out_dtype == Dtype::kFloat32)
        store_part((float*)args.out + at, y[i / kWidth], left - i);
      else
        store_part((bf16*)args.out + at, y[i / kWidth], left - i);
    }
  }
}

// A unit of a weight that isn't paired: the panel of one of its parts.
void linear_unit(const QuantizedStrip& strip, int64_t unit) {
  const QuantizedPart* part = strip.args->weight.parts;
  int64_t output = 0;
  for (int64_t panels; unit >= (panels = divide_up(part->num_outputs, kQuantizedPanel)); ++part) {
    unit -= panels;
    output += part->num_outputs;
  }
  sum_panel(strip, *part, unit, strip.sums);
  finish_quantized(strip, output + unit * kQuantizedPanel,
                   part->num_outputs - unit * kQuantizedPanel);
}

void gated_unit(const QuantizedStrip& strip, int64_t unit) {
  const QuantizedPart* parts = strip.args->weight.parts;
  sum_panel(strip, parts[0], unit, strip.sums);
  sum_panel(strip, parts[1], unit, strip.sums + strip.rows.size() * kQuantizedPanel);
  finish_gated(strip, unit);
}

void quantized_matmul_run(const QuantizedMatmulArgs& args, int64_t item, void* scratch) {
  const QuantizedCut cut = cut_quantized_matmul(args);
  const Range units = units_of(cut, item);
  SpreadBuffer* buffer = (SpreadBuffer*)scratch;
  const QuantizedStrip strip = {&args, rows_of(args, cut, item), buffer, (float*)(buffer + 1)};
  for (int64_t unit = units.begin; unit < units.end; ++unit)
    args.weight.is_paired ? gated_unit(strip, unit) : linear_unit(strip, unit);
}

}  // namespace
