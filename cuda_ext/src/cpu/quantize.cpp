#include "streamkv/quantize.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <limits>

#include "streamkv/formats.h"

namespace streamkv {
namespace {

constexpr int kBlock = 32;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// --- float16 ------------------------------------------------------------------------------------

constexpr uint16_t kHalfNaN = 0x7e00;
constexpr float kLeastHalf = 0x1p-24f;
// Of the largest number of a block, what is no loss. Normal float16 numbers are wrong by a 2^-11th
// at most, which makes less of it than this; and 8 bits may be as bad as 4.
constexpr float kTolerated4 = 0x1p-9f, kTolerated8 = 0x1p-6f;

// To the nearest, ties to even; what is too large or not a number becomes NaN.
uint16_t to_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x477ff000) return kHalfNaN;  // 65520 and more round to infinity
  if (magnitude < 0x38800000)  // below 2^-14: whole numbers of 2^-24, rounded by an addition
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(rintf(fabsf(x) * 0x1p24f)));
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

float from_half(uint16_t half) {
  const uint32_t sign = uint32_t{half} << 16 & 0x80000000, magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return kNaN;
  const uint32_t shifted = magnitude << 13;  // 2^112 too small
  float x;
  memcpy(&x, &shifted, sizeof(x));
  x *= 0x1p112f;
  return sign != 0 ? -x : x;
}

// With all of its digits.
bool is_normal(uint16_t half) {
  const int exponent = half & 0x7c00;
  return exponent != 0 && exponent != 0x7c00;
}

void put_half(uint8_t* out, uint16_t half) { memcpy(out, &half, sizeof(half)); }

// Numbers [first, + count) of a row.
void read_floats(const void* x, Dtype dtype, int64_t first, int64_t count, float* out) {
  if (dtype == Dtype::kFloat32) {
    memcpy(out, static_cast<const float*>(x) + first, count * sizeof(float));
    return;
  }
  const auto* halves = static_cast<const uint16_t*>(x) + first;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t widened = uint32_t{halves[i]} << 16;
    if (dtype == Dtype::kFloat16) out[i] = from_half(halves[i]);
    else memcpy(out + i, &widened, sizeof(widened));
  }
}

// --- a block in vectors -------------------------------------------------------------------------
// Sums have one order, whatever the compiler makes of the vectors.

typedef float Vector __attribute__((vector_size(16)));
constexpr int kVectors = kBlock / 4;

struct Block {
  Vector part[kVectors];
};

float sum(Vector x) { return (x[0] + x[2]) + (x[1] + x[3]); }

// To the nearest whole number, ties to even; |x| < 2^22.
template <class T>
T round_even(T x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  return (x + kRound) - kRound;
}

Vector clamp(Vector x, float low, float high) {
  const Vector lowest = Vector{} + low, highest = Vector{} + high;
  x = x < lowest ? lowest : x;
  return x > highest ? highest : x;
}

struct Extent {
  float low, high, largest;  // `largest` by magnitude, with its sign
};

Extent extent_of(const Block& x) {
  Vector low = x.part[0], high = x.part[0];
  for (int i = 1; i < kVectors; ++i) {
    low = x.part[i] < low ? x.part[i] : low;
    high = x.part[i] > high ? x.part[i] : high;
  }
  const float least = std::min({low[0], low[1], low[2], low[3]});
  const float most = std::max({high[0], high[1], high[2], high[3]});
  return {least, most, most > -least ? most : least};
}

float mean_of(const Block& x) {
  Vector total = {};
  for (const Vector& part : x.part) total += part;
  return sum(total) / kBlock;
}

bool is_finite(const Block& x) {
  Vector zeros = {};
  for (const Vector& part : x.part) zeros += part * 0.0f;
  return sum(zeros) == 0.0f;
}

// Whole numbers that stand for a block's: round((x - minimum) * factor) inside a range.
struct Levels {
  float minimum, factor, low, high;
  Vector operator()(Vector x) const { return clamp(round_even((x - minimum) * factor), low, high); }
};

// All zero where the scale is zero or not a number.
Levels levels_of(float scale, float minimum, float low, float high) {
  if (!(fabsf(scale) > 0.0f)) return {0.0f, 0.0f, low, high};
  return {minimum, 1.0f / scale, low, high};
}

// Of levels l: sums of l, l * l, and x * l.
struct LevelSums {
  float l, ll, xl;
};

LevelSums sum_levels(const Block& x, const Levels& levels) {
  Vector l_sum = {}, ll_sum = {}, xl_sum = {};
  for (const Vector& part : x.part) {
    const Vector l = levels(part);
    l_sum += l;
    ll_sum += l * l;
    xl_sum += part * l;
  }
  return {sum(l_sum), sum(ll_sum), sum(xl_sum)};
}

// The squared error of levels times scale plus minimum.
float error_of(const Block& x, const Levels& levels, float scale, float minimum) {
  Vector total = {};
  for (const Vector& part : x.part) {
    const Vector error = part - (levels(part) * scale + minimum);
    total += error * error;
  }
  return sum(total);
}

// What a block lost by its scale and minimum being float16: its error (root of the mean square) if
// that is much more than with float32, else 0. `error` is the sum of squares of what is written,
// `ideal` with float32; `tolerated` is a share of the largest number.
float lost_error(float error, float ideal, float largest, float tolerated) {
  if (!(error <= std::numeric_limits<float>::max())) return std::numeric_limits<float>::infinity();
  if (fabsf(largest) < kLeastHalf) return fabsf(largest);  // squares might vanish
  const float found = sqrtf(error / kBlock);
  return found > 2.0f * sqrtf(ideal / kBlock) + tolerated * fabsf(largest) ? found : 0.0f;
}

// --- Q4_0 ---------------------------------------------------------------------------------------

// Where in the levels -8 to 7 the largest number of a block is put. (Of Gaussian numbers, the
// squared error is 10 % less than of -8 alone; of Q4_1 below 19 % less.)
constexpr float kLargestLevels[] = {-8.0f, -8.4f, -8.8f, -7.6f, -7.2f};
constexpr int kRefits = 2;

// For levels l the best scale is sum(x l) / sum(l l), and the error what is left of sum(x x) after
// sum(x l)^2 / sum(l l).
float find_scale(const Block& x, float largest) {
  float best_gain = -1.0f, scale = 0.0f;
  for (const float level : kLargestLevels) {
    const LevelSums sums = sum_levels(x, {0.0f, level / largest, -8.0f, 7.0f});
    if (sums.ll == 0.0f || sums.xl * sums.xl <= best_gain * sums.ll) continue;
    best_gain = sums.xl * sums.xl / sums.ll;
    scale = sums.xl / sums.ll;
  }
  for (int i = 0; i < kRefits; ++i) {
    const LevelSums sums = sum_levels(x, levels_of(scale, 0.0f, -8.0f, 7.0f));
    if (sums.ll != 0.0f) scale = sums.xl / sums.ll;
  }
  return scale;
}

// The low four bits of the first 16, then in the high ones those of the last 16.
void put_nibbles(const Block& x, const Levels& levels, float offset, uint8_t* out) {
  for (int i = 0; i < kVectors / 2; ++i) {
    const Vector low = levels(x.part[i]) + offset;
    const Vector high = levels(x.part[i + kVectors / 2]) + offset;
    for (int lane = 0; lane < 4; ++lane)
      *out++ = static_cast<uint8_t>(static_cast<int>(low[lane]) |
                                    static_cast<int>(high[lane]) << 4);
  }
}

// Returns what is lost.
float quantize_q4_0(const Block& x, uint8_t* out) {
  const float largest = extent_of(x).largest;
  const float found = fabsf(largest) < kLeastHalf ? 0.0f : find_scale(x, largest);
  uint16_t best = kHalfNaN;
  float least_error = std::numeric_limits<float>::infinity();
  for (const float scale : {largest / -8.0f, found}) {
    const uint16_t half = to_half(scale);
    const float rounded = from_half(half);
    const float error = error_of(x, levels_of(rounded, 0.0f, -8.0f, 7.0f), rounded, 0.0f);
    if (!(error < least_error)) continue;
    least_error = error;
    best = half;
  }
  put_half(out, best);
  put_nibbles(x, levels_of(from_half(best), 0.0f, -8.0f, 7.0f), 8.0f, out + 2);
  if (is_normal(best)) return 0.0f;
  const float plain = largest / -8.0f;
  const float ideal = error_of(x, levels_of(plain, 0.0f, -8.0f, 7.0f), plain, 0.0f);
  return lost_error(least_error, ideal, largest, kTolerated4);
}

// --- Q4_1 ---------------------------------------------------------------------------------------

// How many levels the range of a block is given, and where its middle is put.
constexpr float kRangeLevels[] = {15.0f, 15.8f, 16.6f, 17.4f};
constexpr float kMiddleLevels[] = {7.2f, 7.8f};

struct Line {
  float scale, minimum;
};

// The least squares for levels l: x has the mean 0.
Line fit_line(const LevelSums& sums) {
  const float spread = sums.ll - sums.l * sums.l / kBlock;
  const float scale = spread > 0.0f ? sums.xl / spread : 0.0f;
  return {scale, -scale * sums.l / kBlock};
}

// x has the mean 0.
Line find_line(const Block& x, const Extent& extent) {
  float best_gain = -1.0f;
  Line line = {};
  const float middle = 0.5f * (extent.low + extent.high), range = extent.high - extent.low;
  for (const float range_levels : kRangeLevels)
    for (const float middle_level : kMiddleLevels) {
      const float scale = range / range_levels;
      const LevelSums sums =
          sum_levels(x, levels_of(scale, middle - middle_level * scale, 0.0f, 15.0f));
      const Line fit = fit_line(sums);
      if (fit.scale * sums.xl <= best_gain) continue;  // what it takes off the error
      best_gain = fit.scale * sums.xl;
      line = fit;
    }
  for (int i = 0; i < kRefits; ++i)
    line = fit_line(sum_levels(x, levels_of(line.scale, line.minimum, 0.0f, 15.0f)));
  return line;
}

struct HalfLine {
  uint16_t scale, minimum;
  Line value() const { return {from_half(scale), from_half(minimum)}; }
  Levels levels() const { return levels_of(value().scale, value().minimum, 0.0f, 15.0f); }
};

// Returns what is lost.
float quantize_q4_1(const Block& x, uint8_t* out) {
  const Extent extent = extent_of(x);
  const float mean = mean_of(x);
  Block centred;
  for (int i = 0; i < kVectors; ++i) centred.part[i] = x.part[i] - mean;
  Line found = {0.0f, 0.0f};
  if (extent.high - extent.low >= kLeastHalf)
    found = find_line(centred, {extent.low - mean, extent.high - mean, 0.0f});
  const Line lines[] = {{(extent.high - extent.low) / 15.0f, extent.low},
                        {found.scale, found.minimum + mean}};
  HalfLine best = {kHalfNaN, kHalfNaN};
  float least_error = std::numeric_limits<float>::infinity();
  for (const Line& line : lines) {
    const HalfLine half = {to_half(line.scale), to_half(line.minimum)};
    const auto [scale, minimum] = half.value();
    const float error = error_of(x, half.levels(), scale, minimum);
    if (!(error < least_error)) continue;
    least_error = error;
    best = half;
  }
  put_half(out, best.scale);
  put_half(out + 2, best.minimum);
  put_nibbles(x, best.levels(), 0.0f, out + 4);
  if (is_normal(best.scale)) return 0.0f;
  const auto [scale, minimum] = lines[0];
  const float ideal = error_of(x, levels_of(scale, minimum, 0.0f, 15.0f), scale, minimum);
  return lost_error(least_error, ideal, extent.largest, kTolerated4);
}

// --- 8 bits -------------------------------------------------------------------------------------

// As many levels as fit in a number of them, none if their scale is too small to divide by.
float factor_of(float levels, float largest) {
  const float factor = levels / largest;
  return factor <= std::numeric_limits<float>::max() ? factor : 0.0f;
}

// Ties away from zero, as is usual for Q8_0.
int round_away(float x) {
  const float magnitude = fabsf(x);
  const int whole = static_cast<int>(magnitude);
  const int rounded = whole + (magnitude - static_cast<float>(whole) >= 0.5f);
  return x < 0.0f ? -rounded : rounded;
}

// Returns what is lost.
float quantize_q8_0(const Block& x, uint8_t* out) {
  const float largest = extent_of(x).largest;
  const float scale = fabsf(largest) / 127.0f, factor = factor_of(1.0f, scale);
  const uint16_t half = to_half(scale);
  put_half(out, half);
  for (int i = 0; i < kBlock; ++i)
    out[2 + i] = static_cast<uint8_t>(round_away(x.part[i / 4][i % 4] * factor));
  if (is_normal(half)) return 0.0f;
  const Levels levels = levels_of(scale, 0.0f, -127.0f, 127.0f);
  return lost_error(error_of(x, levels, from_half(half), 0.0f), error_of(x, levels, scale, 0.0f),
                    largest, kTolerated8);
}

// action(values, index of the first, how many) for up to kBlock numbers of a row after another.
template <class Action>
void each_piece(const void* x, Dtype dtype, int64_t depth, Action action) {
  float piece[kBlock];
  for (int64_t k = 0; k < depth; k += kBlock) {
    const int64_t count = std::min<int64_t>(kBlock, depth - k);
    read_floats(x, dtype, k, count, piece);
    action(piece, k, count);
  }
}

QuantizeReport quantize_int8(const void* x, Dtype dtype, int64_t depth, uint8_t* out) {
  float largest = 0.0f, zeros = 0.0f;
  each_piece(x, dtype, depth, [&](const float* values, int64_t, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      largest = std::max(largest, fabsf(values[i]));
      zeros += values[i] * 0.0f;
    }
  });
  const bool finite = zeros == 0.0f;
  const float scale = finite ? largest / 127.0f : kNaN;
  const float factor = finite ? factor_of(127.0f, largest) : 0.0f;
  memcpy(out, &scale, sizeof(scale));
  each_piece(x, dtype, depth, [&](const float* values, int64_t k, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      out[4 + k + i] = static_cast<uint8_t>(
          finite ? static_cast<int>(round_even(values[i] * factor)) : 0);
  });
  return {finite ? largest : 0.0f, 0.0f};
}

QuantizeReport quantize_block(WeightFormat format, const float* x, uint8_t* out) {
  Block block;
  memcpy(&block, x, sizeof(block));
  if (!is_finite(block)) {  // NaNs for scale and minimum
    memset(out, 0, source_row_bytes(format, kBlock));
    put_half(out, kHalfNaN);
    if (format == WeightFormat::kQ4_1) put_half(out + 2, kHalfNaN);
    return {};
  }
  const float largest = fabsf(extent_of(block).largest);
  if (format == WeightFormat::kQ4_0) return {largest, quantize_q4_0(block, out)};
  if (format == WeightFormat::kQ4_1) return {largest, quantize_q4_1(block, out)};
  return {largest, quantize_q8_0(block, out)};
}

}  // namespace

bool can_quantize(WeightFormat format) {
  return format == WeightFormat::kInt8 || format == WeightFormat::kQ8_0 ||
         format == WeightFormat::kQ4_0 || format == WeightFormat::kQ4_1;
}

void QuantizeReport::add(const QuantizeReport& other) {
  largest = std::max(largest, other.largest);
  lost_error = std::max(lost_error, other.lost_error);
}

QuantizeReport quantize_row(WeightFormat format, const void* x, Dtype dtype, int64_t depth,
                            void* out) {
  auto* bytes = static_cast<uint8_t*>(out);
  if (format == WeightFormat::kInt8) return quantize_int8(x, dtype, depth, bytes);
  const int64_t block_bytes = source_row_bytes(format, kBlock);
  QuantizeReport report;
  each_piece(x, dtype, depth, [&](const float* values, int64_t k, int64_t) {
    report.add(quantize_block(format, values, bytes + k / kBlock * block_bytes));
  });
  return report;
}

}  // namespace streamkv
