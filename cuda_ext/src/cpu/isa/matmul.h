// Matrix products: items of some rows of x and some panels of weights, made of tiles.
#pragma once

#include "matmul_tile.h"

namespace {

using streamkv::MatmulArgs;
using streamkv::tuning;

// Depths whose weights, widened, stay in the first-level cache while an item's tiles use them.
constexpr int64_t kBlockDepth = 256;
// Rows of x that stay in the second-level cache while the panels pass by.
constexpr int64_t kItemInputBytes = 5 << 18;

inline Dtype input_dtype(const PackedWeight& weight) {
  return weight.dtype == Dtype::kBFloat16 ? kBf16Inputs : Dtype::kFloat32;
}

// How a product is cut into items. Panels that are computed together, gate and up or one alone,
// are a unit.
struct MatmulCut {
  int64_t unit, num_units, row_parts, unit_parts;
};

inline MatmulCut cut_matmul(const MatmulArgs& args) {
  const PackedWeight& weight = args.weight;
  const int64_t row_bytes = weight.depth * element_bytes(input_dtype(weight));
  const int64_t near_tiles = kItemInputBytes / (row_bytes * kTileHeight);
  const int64_t item_tiles = at_least(at_most(near_tiles, tuning.floats.item_tiles), 1);
  MatmulCut cut;
  cut.unit = weight.is_paired ? 2 : 1;
  cut.num_units = num_panels(weight);
  cut.row_parts = divide_up(divide_up(args.num_rows, kTileHeight), item_tiles);
  const int64_t rows = divide_up(args.num_rows, cut.row_parts);
  const int64_t units = (tuning.floats.item_kib << 10) / (cut.unit * panel_bytes(weight) * rows);
  cut.unit_parts = divide_up(cut.num_units, at_least(units, 1));
  return cut;
}

inline Range rows_of(const MatmulArgs& args, const MatmulCut& cut, int64_t item) {
  return tiled_part_of(args.num_rows, kTileHeight, cut.row_parts, item / cut.unit_parts);
}

int64_t matmul_num_items(const MatmulArgs& args, int) {
  if (args.num_rows == 0) return 0;
  const MatmulCut cut = cut_matmul(args);
  return cut.row_parts * cut.unit_parts;
}

// Some rows of a product while an item computes them.
struct Strip {
  const MatmulArgs* args;
  Range rows;
  float* kept;  // [kBlockDepth, kPanel]
  float* sums;  // [unit, rows, kPanel]
};

// Rows (of the strip) and depths of a panel, as one tile.
inline ProductTile make_tile(const Strip& strip, Range rows, Range pairs, int64_t panel,
                             float* sums) {
  const PackedWeight& weight = strip.args->weight;
  const int64_t x_pair_bytes = 2 * element_bytes(input_dtype(weight));
  ProductTile tile;
  tile.x_stride = weight.depth / 2 * x_pair_bytes;
  tile.x = (const char*)strip.args->x + (strip.rows.begin + rows.begin) * tile.x_stride +
           pairs.begin * x_pair_bytes;
  tile.weights = (const char*)weight.data + panel * panel_bytes(weight) +
                 pairs.begin * 2 * kPanel * element_bytes(weight.dtype);
  tile.num_pairs = pairs.size();
  tile.kept = strip.kept;
  tile.sums = sums + rows.begin * kPanel;
  tile.is_first = pairs.begin == 0;
  return tile;
}

// One tile for all rows and depths.
template <Read kRead>
void sum_in_one_tile(const Strip& strip, int64_t panel, float* sums) {
  const Range rows = {0, strip.rows.size()}, pairs = {0, strip.args->weight.depth / 2};
  ProductTile tile = make_tile(strip, rows, pairs, panel, sums);
  tile.ahead = tile.weights + tuning.floats.ahead_bytes;
  tile.ahead_step = kLineBytes;
  multiply<kRead, at_least(pair_bytes<kRead>() / kLineBytes, 1)>(rows.size(), tile);
}

// One of the tiles that use the same weights, and its share in fetching those that come next.
template <Read kRead, int kHints>
inline void multiply_share(const Strip& strip, ProductTile& tile, Range rows, int64_t tiles,
                           int64_t index) {
  const int64_t pair = 2 * kPanel * element_bytes(strip.args->weight.dtype);
  tile.ahead = tile.weights + tile.num_pairs * pair * (tiles + index) / tiles;
  tile.ahead_step = pair / (tiles * kHints);
  if (kRead == Read::kFloats && pair != pair_bytes<kRead>())
    tile.weights = (const char*)tile.kept;
  multiply<kRead, kHints>(rows.size(), tile);
}

// Many rows: depth is cut, so that the weights are still near when the last tile reads them.
template <Read kFirst, Read kLater>
void sum_in_tiles(const Strip& strip, int64_t panel, float* sums) {
  constexpr int kHints = at_least(pair_bytes<kFirst>() / (2 * kLineBytes), 1);  // tiles >= 2
  const int64_t tiles = divide_up(strip.rows.size(), kTileHeight);
  const int64_t num_pairs = strip.args->weight.depth / 2;
  const int64_t blocks = divide_up(2 * num_pairs, kBlockDepth);
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t t = 0; t < tiles; ++t) {
      const Range rows = part_of(strip.rows.size(), tiles, t);
      const Range pairs = part_of(num_pairs, blocks, block);
      ProductTile tile = make_tile(strip, rows, pairs, panel, sums);
      t == 0 ? multiply_share<kFirst, kHints>(strip, tile, rows, tiles, t)
             : multiply_share<kLater, kHints>(strip, tile, rows, tiles, t);
    }
}

void sum_panel(const Strip& strip, int64_t panel, float* sums) {
#if defined(__AVX512BF16__)
  constexpr Read kAlone = Read::kWordsTimes, kFirst = kAlone, kLater = kAlone;
#else
  constexpr Read kAlone = Read::kWords, kFirst = Read::kWordsKept, kLater = Read::kFloats;
#endif
  const bool is_one_tile = strip.rows.size() <= kTileHeight;
  if (strip.args->weight.dtype == Dtype::kBFloat16)
    is_one_tile ? sum_in_one_tile<kAlone>(strip, panel, sums)
                : sum_in_tiles<kFirst, kLater>(strip, panel, sums);
  else
    is_one_tile ? sum_in_one_tile<Read::kFloats>(strip, panel, sums)
                : sum_in_tiles<Read::kFloats, Read::kFloats>(strip, panel, sums);
}

// A vector of a row that may end in it.
inline vfloat load_part(const float* p, int64_t n) {
  return n >= kWidth ? load(p) : load_some(p, n);
}

template <class E>
inline void store_part(E* p, vfloat x, int64_t n) {
  n >= kWidth ? store(p, x) : store_some(p, x, n);
}

// out = sums + bias + residual for the outputs of a panel.
void finish_linear(const Strip& strip, int64_t panel) {
  const MatmulArgs& args = *strip.args;
  const int64_t outputs = args.weight.num_outputs;
  for (int64_t r = 0; r < strip.rows.size(); ++r)
    for (int64_t v = 0; v < kPanelVectors; ++v) {
      const int64_t output = panel * kPanel + v * kWidth, left = outputs - output;
      if (left <= 0) break;
      const int64_t at = (strip.rows.begin + r) * outputs + output;
      vfloat y = load(strip.sums + r * kPanel + v * kWidth);
      if (args.bias != nullptr) y += load_part(args.bias + output, left);
      if (args.residual != nullptr) y += load_part(args.residual + at, left);
      store_part((float*)args.out + at, y, left);
    }
}

inline vfloat silu(vfloat x) {
  const vfloat e = exp_nonpositive(x < 0.0f ? x : -x);  // e^-|x|: never overflows
  const vfloat numerator = x < 0.0f ? x * e : x;
  return numerator / (e + 1.0f);
}

// out = silu(gate) * up for the outputs of two panels.
template <class E>
void finish_gated(const Strip& strip, int64_t unit) {
  const MatmulArgs& args = *strip.args;
  const int64_t outputs = args.weight.num_outputs / 2;
  const float* up_sums = strip.sums + strip.rows.size() * kPanel;
  for (int64_t r = 0; r < strip.rows.size(); ++r)
    for (int64_t v = 0; v < kPanelVectors; ++v) {
      const int64_t output = unit * kPanel + v * kWidth, left = outputs - output;
      if (left <= 0) break;
      vfloat gate = load(strip.sums + r * kPanel + v * kWidth);
      vfloat up = load(up_sums + r * kPanel + v * kWidth);
      if (args.bias != nullptr) {
        gate += load_part(args.bias + output, left);
        up += load_part(args.bias + outputs + output, left);
      }
      const int64_t at = (strip.rows.begin + r) * outputs + output;
      store_part((E*)args.out + at, silu(gate) * up, left);
    }
}

void finish(const Strip& strip, int64_t unit) {
  if (!strip.args->weight.is_paired)
    finish_linear(strip, unit);
  else if (strip.args->out_dtype == Dtype::kFloat32)
    finish_gated<float>(strip, unit);
  else
    finish_gated<bf16>(strip, unit);
}

void matmul_run(const MatmulArgs& args, int64_t item, void* scratch) {
  const MatmulCut cut = cut_matmul(args);
  const Range units = part_of(cut.num_units, cut.unit_parts, item % cut.unit_parts);
  float* const kept = (float*)scratch;
  const Strip strip = {&args, rows_of(args, cut, item), kept, kept + kBlockDepth * kPanel};
  for (int64_t unit = units.begin; unit < units.end; ++unit) {
    for (int64_t i = 0; i < cut.unit; ++i)
      sum_panel(strip, unit * cut.unit + i, strip.sums + i * strip.rows.size() * kPanel);
    finish(strip, unit);
  }
}

}  // namespace
