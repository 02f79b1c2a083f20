// A tile of a product with quantized weights: a few rows of inputs times a panel, over some groups.
//
// Each group's sums are whole numbers, kept in registers. At its end they become float32 and are
// added to the output's one accumulator, group after group: tiles of any height, over any groups,
// give the same bits.
#pragma once

#include "quantized_dot.h"
#include "quantized_spread.h"

namespace {

using streamkv::InputGroup;

// What a tile reads of what was spread out, and what as it lies in the weight, to be widened in
// flight: values of 4 bits, two quads in a vector, and float16 scales and minima behind them.
enum class Source { kSpread, kPackedValues, kPackedGroups };

// What a tile is compiled for.
template <Scaling kHow, int kDotBits, Source kFrom>
struct TileKind {
  static constexpr Scaling kScaling = kHow;
  static constexpr bool kIsPacked = kFrom != Source::kSpread;
  static constexpr bool kHasHalves = kFrom == Source::kPackedGroups;
  using ByteDot = Dot<kDotBits>;
  // Sums start at what makes good for the bytes' offset; those with minima have none.
  static constexpr bool kHasStart = kHow != Scaling::kGroupMin && !ByteDot::kTakesOffset;
  static constexpr int kHalves = kHow == Scaling::kHalfGroup ? 2 : 1;  // with a scale of their own
};

// Rows of a tile, and vectors of its outputs: the whole sums, the weights of a quad and what is
// broadcast fit in the registers.
constexpr int kSliceVectors = 2;
constexpr int kSliceOutputs = kSliceVectors * kWidth;
constexpr int kSlices = kQuantizedPanel / kSliceOutputs;  // of a panel, one after another

constexpr int dot_height(int bits) {
#if defined(__AVX512F__)
  return kSumsWords || bits == 4 ? 12 : 8;  // of 32
#elif defined(__ARM_NEON)
  return bits > 0 ? 8 : 0;  // of 32
#else
  return kSumsWords || bits == 4 ? 6 : 4;  // of 16
#endif
}

// Tiles as high as this fetch the next one's inputs: many rows lie in the second-level cache.
constexpr int kRowsFetchInputs = 6;

struct QuantizedTile {
  const char* x;         // row 0 at the first group
  int64_t x_stride;      // bytes
  SpreadGroups weights;  // as far as they are spread out
  int64_t num_groups;
  int32_t offset;        // of the bytes
  float* sums;           // [rows, kQuantizedPanel]
  bool is_first;         // sums begin at zero
  int64_t next_x;        // bytes to the inputs of the next tile, to be fetched meanwhile
  int64_t ahead;         // bytes from weights that are read to those to be fetched meanwhile,
  Range ahead_groups;    // during these groups
};

inline vuint load_quad(const void* at) {
  uint32_t quad;
  memcpy(&quad, at, sizeof(quad));
  return broadcast_word(quad);
}

// The rows of inputs, at a group's depths.
template <int kRows>
class InputRows {
 public:
  explicit InputRows(const QuantizedTile& tile) : stride_(tile.x_stride) {
    each<kPointers>([&](int i) { x_[i] = opaque(tile.x + 3 * i * stride_); });
  }
  const char* operator[](int row) const { return x_[row / 3] + row % 3 * stride_; }
  // The group that began so many bytes before.
  const InputGroup& group(int row, int bytes) const {
    return *(const InputGroup*)((*this)[row] - bytes);
  }
  void advance(int bytes) {
    each<kPointers>([&](int i) { x_[i] += bytes; });
  }

 private:
  // Three rows to a pointer: few enough to stay in registers.
  static constexpr int kPointers = (kRows + 2) / 3;
  static const char* opaque(const char* p) {  // the compiler can't derive it from another one
    asm("" : "+r"(p));
    return p;
  }
  const char* x_[kPointers];
  int64_t stride_;
};

// A value for each of a slice's vectors of outputs, in each row.
template <class V, int kRows>
using SliceOf = V[kRows][kSliceVectors];

// action(row, vector) for each of them.
template <int kRows, class Action>
__attribute__((always_inline)) inline void each_output(Action action) {
  each<kRows * kSliceVectors>([&](int i) __attribute__((always_inline)) {
    action(i / kSliceVectors, i % kSliceVectors);
  });
}

// Two quads of a slice's weights, [vector][quad]; what lies `ahead` of them is fetched.
template <class Kind>
using TwoQuads = typename Kind::ByteDot::Weights[kSliceVectors][2];

template <class Kind>
__attribute__((always_inline)) inline void load_quads(const uint8_t* values, int64_t ahead,
                                                      TwoQuads<Kind>& out) {
  using ByteDot = typename Kind::ByteDot;
  each<kSliceVectors>([&](int v) __attribute__((always_inline)) {
    const uint8_t* at = values + v * sizeof(vuint);
    const bool kIsNewLine = v * sizeof(vuint) % 64 == 0;
    if (kIsNewLine) prefetch(at + ahead);
    const vuint first = load_words(at);
    if constexpr (Kind::kIsPacked) {
      out[v][0] = ByteDot::prepare(first & 0x0f0f0f0fu);
      out[v][1] = ByteDot::prepare(shift_bytes<-4>(first) & 0x0f0f0f0fu);
    } else {
      if (kIsNewLine) prefetch(at + ahead + kQuadBytes);
      out[v][0] = ByteDot::prepare(first);
      out[v][1] = ByteDot::prepare(load_words(at + kQuadBytes));
    }
  });
}

template <class Kind, int kRows>
__attribute__((always_inline)) inline void add_quads(const InputRows<kRows>& x,
                                                     const TwoQuads<Kind>& weights,
                                                     SliceOf<vint, kRows>& sums) {
  using ByteDot = typename Kind::ByteDot;
  constexpr int kRun = ByteDot::kRun;
  each<2 / kRun>([&](int run) __attribute__((always_inline)) {
    each<kRows>([&](int r) __attribute__((always_inline)) {
      vuint inputs[2];
      for (int i = 0; i < kRun; ++i)
        inputs[i] = load_quad(x[r] + 4 * (run * kRun + i));
      for (int v = 0; v < kSliceVectors; ++v) {
        vint& sum = sums[r][v];
        sum = ByteDot::add(sum, weights[v] + run * kRun, inputs);
      }
    });
  });
}

// Minus the sums of the first halves of the inputs, [groups, rows].
template <int kRows>
using HalfSums = int32_t[kSuperGroups][kRows];

inline int32_t negative_half_sum(const InputGroup& group) {
#if defined(__SSE4_1__)
  const __m128i bytes = _mm_loadu_si128((const __m128i*)group.values);
  const __m128i sums =
      _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return 16 * 128 - _mm_cvtsi128_si32(sums) - _mm_extract_epi16(sums, 4);
#else
  return -vaddlvq_s8(vld1q_s8(group.values));
#endif
}

template <int kRows>
inline void sum_halves(const QuantizedTile& tile, HalfSums<kRows>& out) {
  for (int row = 0; row < kRows; ++row) {
    const InputGroup* x = (const InputGroup*)(tile.x + row * tile.x_stride);
    for (int64_t g = 0; g < tile.num_groups; ++g) out[g][row] = negative_half_sum(x[g]);
  }
}

// The float32 sums of a slice: in registers as long as they fit beside the whole ones.
template <int kRows>
struct Totals {
#if defined(__AVX512F__) || defined(__ARM_NEON)
  static constexpr int kRegisters = 32;
#else
  static constexpr int kRegisters = 16;
#endif
  static constexpr bool kIsKept = 2 * kRows * kSliceVectors + 8 <= kRegisters;
  float* at;
  vfloat kept[kIsKept ? kRows : 1][kSliceVectors];

  Totals(float* stored, bool is_first) : at(stored) {
    each_output<kRows>([&](int r, int v) __attribute__((always_inline)) {
      if (is_first) set(r, v, vfloat{});
      else if (kIsKept) set(r, v, load(place(r, v)));
    });
  }
  float* place(int r, int v) const {
    return at + r * kQuantizedPanel + v * kWidth;
  }
  vfloat get(int r, int v) const {
    if constexpr (kIsKept) return kept[r][v];
    else return load(place(r, v));
  }
  void set(int r, int v, vfloat x) {
    if constexpr (kIsKept) kept[r][v] = x;
    else store(place(r, v), x);
  }
  void next_group() {
    if constexpr (!kIsKept) asm("" : "+r"(at));  // what was stored is loaded again, not copied
  }
  void end() {
    if constexpr (kIsKept)
      each_output<kRows>([&](int r, int v) { store(place(r, v), kept[r][v]); });
  }
};

// What makes good for the offset of the weights in the sums of a group or, if that has scales of
// its own, a half of it.
template <class Kind, int kHalf>
inline vint start_of(const QuantizedTile& tile, const InputGroup& x, int32_t half_sum) {
  if (!Kind::kHasStart) return vint{};
  const int32_t sum = Kind::kHalves == 1 ? x.negative_sum
                      : kHalf == 0       ? half_sum
                                         : x.negative_sum - half_sum;
  return (vint)broadcast_word((uint32_t)(sum * tile.offset));
}

// Where a slice's weights of a group lie.
struct SliceWeights {
  const uint8_t* values;
  const float* scales;
  const float* minima;
  const half* halves;  // kHasHalves: scales, then minima
};

// The scales and minima of a slice's outputs, as far as there are any.
template <class Kind>
struct SliceScales {
  static constexpr bool kHasScales = Kind::kScaling != Scaling::kOutput;
  static constexpr bool kHasMinima = Kind::kScaling == Scaling::kGroupMin;
  vfloat scales[kSliceVectors], minima[kSliceVectors];

  SliceScales(const SliceWeights& from, int64_t ahead) {
    each<kSliceVectors>([&](int v) __attribute__((always_inline)) {
      const int kAt = v * kWidth;
      if constexpr (Kind::kHasHalves) {
        scales[v] = load(from.halves + kAt);
        if (kHasMinima) minima[v] = load(from.halves + kQuantizedPanel + kAt);
      } else {
        if (kHasScales) scales[v] = load(from.scales + kAt);
        if (kHasMinima) minima[v] = load(from.minima + kAt);
      }
    });
    if (Kind::kHasHalves) prefetch((const uint8_t*)from.halves + ahead);
    if (Kind::kHasHalves && kHasMinima)
      prefetch((const uint8_t*)(from.halves + kQuantizedPanel) + ahead);
  }
};

// A group, or the half of it that has scales of its own: x and weights go on behind it.
template <class Kind, int kRows, int kHalf>
__attribute__((always_inline)) inline void multiply_part(const QuantizedTile& tile,
                                                         int64_t ahead, const int32_t* half_sums,
                                                         InputRows<kRows>& x, SliceWeights& weights,
                                                         Totals<kRows>& totals) {
  using ByteDot = typename Kind::ByteDot;
  constexpr int kDepths = kGroupDepth / Kind::kHalves;
  const auto start = [&](int r, int done) {
    return start_of<Kind, kHalf>(tile, x.group(r, kHalf * kDepths + done), half_sums[r]);
  };
  SliceOf<vint, kRows> sums;
  each_output<kRows>([&](int r, int v) { sums[r][v] = ByteDot::begin(start(r, 0)); });
  for (int depth = 0; depth < kDepths; depth += 8) {
    TwoQuads<Kind> quads;
    load_quads<Kind>(weights.values, ahead, quads);
    add_quads<Kind, kRows>(x, quads, sums);
    x.advance(8);
    weights.values += Kind::kIsPacked ? kQuadBytes : 2 * kQuadBytes;
  }
  const SliceScales<Kind> of(weights, ahead);
  each_output<kRows>([&](int r, int v) __attribute__((always_inline)) {
    const InputGroup& input = x.group(r, (kHalf + 1) * kDepths);
    const vint sum = ByteDot::end(sums[r][v], start(r, kDepths));
    vfloat scale = broadcast(input.scale);
    if (of.kHasScales) scale *= of.scales[v];
    vfloat total = fma(__builtin_convertvector(sum, vfloat), scale, totals.get(r, v));
    if (of.kHasMinima) total = fma(of.minima[v], broadcast(input.scaled_sum), total);
    totals.set(r, v, total);
  });
  weights.scales += kQuantizedPanel;
}

template <class Kind, int kRows>
__attribute__((always_inline)) inline void multiply_slice(const QuantizedTile& tile,
                                                          const HalfSums<kRows>& half_sums,
                                                          int slice) {
  constexpr int64_t kValueBytes = kGroupBytes / (Kind::kIsPacked ? 2 : 1);
  const SpreadGroups& from = tile.weights;
  const int outputs = slice * kSliceOutputs;
  SliceWeights weights = {from.values + outputs * 4, from.scales + outputs, from.minima + outputs,
                          (const half*)(from.values + kValueBytes) + outputs};
  InputRows<kRows> x(tile);
  Totals<kRows> totals(tile.sums + outputs, tile.is_first);
  for (int64_t g = 0; g < tile.num_groups; ++g) {
    const bool is_ahead = g >= tile.ahead_groups.begin && g < tile.ahead_groups.end;
    const int64_t ahead = is_ahead ? tile.ahead : 0;
    repeat<Kind::kHalves>([&](auto half) __attribute__((always_inline)) {
      multiply_part<Kind, kRows, half.value>(tile, ahead, half_sums[g], x, weights, totals);
    });
    weights.values += from.stride - kValueBytes;
    weights.minima += kQuantizedPanel;
    weights.halves = (const half*)((const uint8_t*)weights.halves + from.stride);
    if (kRows >= kRowsFetchInputs && slice == 0)
      each<kRows>([&](int r) { prefetch(x[r] + tile.next_x); });
    x.advance(sizeof(InputGroup) - kGroupDepth);
    totals.next_group();
  }
  totals.end();
}

template <class Kind, int kRows>
void multiply_groups(const QuantizedTile& tile) {
  HalfSums<kRows> half_sums;
  if constexpr (Kind::kHasStart && Kind::kHalves > 1) sum_halves<kRows>(tile, half_sums);
  for (int slice = 0; slice < kSlices; ++slice)
    multiply_slice<Kind, kRows>(tile, half_sums, slice);
}

// How high the first of the tiles for so many rows is: as high as there are, and where two do, both
// much alike. The lower a tile, the more often weights are loaded for each product.
inline int64_t first_height(int64_t rows, int64_t max_height) {
  if (rows <= max_height) return rows;
  return rows <= 2 * max_height ? divide_up(rows, 2) : max_height;
}

// The function for tiles of such a height, from 1 to kMaxHeight.
using MultiplyGroups = void (*)(const QuantizedTile&);
template <class Kind, int kMaxHeight>
inline MultiplyGroups multiply_of(int64_t height) {
  if constexpr (kMaxHeight > 1) {
    if (height < kMaxHeight) return multiply_of<Kind, kMaxHeight - 1>(height);
  }
  return multiply_groups<Kind, kMaxHeight>;
}

}  // namespace
