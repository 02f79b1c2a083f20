// Kernels that compute rows from rows: embedding, rms_norm, quantize, head_rms_norm, rotary,
// select_rows.
#pragma once

#include "pack.h"
#include "quantized_rows.h"

namespace {

using streamkv::EmbeddingArgs;
using streamkv::HeadRmsNormArgs;
using streamkv::RmsNormArgs;
using streamkv::RotaryArgs;
using streamkv::SelectRowsArgs;

constexpr int64_t kItemElements = 1 << 14;     // of an item: about a microsecond of work,
constexpr int64_t kItemFarElements = 1 << 11;  // also where each lies in another line

// How many items of about `elements` a matrix makes, a row being the least.
inline int64_t num_row_items(int64_t num_rows, int64_t width, int64_t elements) {
  const int64_t items = divide_up(num_rows * width, elements);
  return items < num_rows ? items : num_rows;
}

// action(row) for each row of an item.
template <class Action>
inline void each_row(int64_t num_rows, int64_t items, int64_t item, Action action) {
  const Range rows = part_of(num_rows, items, item);
  for (int64_t row = rows.begin; row < rows.end; ++row) action(row);
}

// A row of `length`: whole(offset) for each whole vector, then rest(offset, count) for the rest.
template <class Whole, class Rest>
inline void along(int64_t length, Whole whole, Rest rest) {
  int64_t i = 0;
  for (; i + kWidth <= length; i += kWidth) whole(i);
  if (i < length) rest(i, length - i);
}

int64_t embedding_num_items(const EmbeddingArgs& args, int) {
  return num_row_items(args.num_tokens, args.weight.depth, kItemFarElements);
}

void embedding_run(const EmbeddingArgs& args, int64_t item, void*) {
  const int64_t hidden = args.weight.depth;
  each_row(args.num_tokens, embedding_num_items(args, 1), item, [&](int64_t token) {
    read_lane(find_lane(args.weight, args.token_ids[token]), args.weight.dtype, hidden,
              args.out + token * hidden);
  });
}

// The order of additions is fixed by the length alone.
inline float sum_of_squares(const float* x, int64_t length) {
  constexpr int kChains = 4;
  vfloat sums[kChains] = {};
  const auto add = [](vfloat v, vfloat& sum) { sum = fma(v, v, sum); };
  int64_t i = 0;
  for (; i + kChains * kWidth <= length; i += kChains * kWidth)
    repeat<kChains>([&](auto c) { add(load(x + i + c.value * kWidth), sums[c.value]); });
  along(
      length - i, [&](int64_t j) { add(load(x + i + j), sums[0]); },
      [&](int64_t j, int64_t n) { add(load_some(x + i + j, n), sums[1]); });
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// What a row is multiplied by, but for the weight.
inline vfloat rms_scale(const float* x, int64_t length, float eps) {
  const float mean_square = sum_of_squares(x, length) / (float)length;
  return broadcast(1.0f / __builtin_sqrtf(mean_square + eps));
}

// `out` may be `x`.
template <class E>
inline void rms_norm_row(const float* x, const float* weight, int64_t length, float eps, E* out) {
  const vfloat scale = rms_scale(x, length, eps);
  along(
      length, [&](int64_t i) { store(out + i, load(x + i) * scale * load(weight + i)); },
      [&](int64_t i, int64_t n) {
        store_some(out + i, load_some(x + i, n) * scale * load_some(weight + i, n), n);
      });
}

inline void rms_norm_row(const float* x, const float* weight, int64_t length, float eps,
                         InputGroup* out) {
  const vfloat scale = rms_scale(x, length, eps);
  quantize_row(
      length, out, [&](int64_t i) { return load(x + i) * scale * load(weight + i); },
      [&](int64_t i, int64_t n) { return load_some(x + i, n) * scale * load_some(weight + i, n); });
}

int64_t rms_norm_num_items(const RmsNormArgs& args, int) {
  return num_row_items(args.num_rows, args.hidden, kItemElements);
}

void rms_norm_run(const RmsNormArgs& args, int64_t item, void*) {
  const int64_t hidden = args.hidden;
  each_row(args.num_rows, rms_norm_num_items(args, 1), item, [&](int64_t row) {
    const auto write_to = [&](auto* out) {
      rms_norm_row(args.x + row * hidden, args.weight, hidden, args.eps, out);
    };
    if (args.out_dtype == Dtype::kFloat32) write_to((float*)args.out + row * hidden);
    else if (args.out_dtype == Dtype::kBFloat16) write_to((bf16*)args.out + row * hidden);
    else write_to((InputGroup*)args.out + row * row_groups(hidden));
  });
}

int64_t quantize_num_items(const QuantizeArgs& args, int) {
  return num_row_items(args.num_rows, args.width, kItemElements);
}

void quantize_run(const QuantizeArgs& args, int64_t item, void*) {
  each_row(args.num_rows, quantize_num_items(args, 1), item, [&](int64_t row) {
    const float* x = args.x + row * args.width;
    quantize_row(
        args.width, args.out + row * row_groups(args.width),
        [&](int64_t i) { return load(x + i); },
        [&](int64_t i, int64_t n) { return load_some(x + i, n); });
  });
}

inline int64_t qkv_width(const HeadRmsNormArgs& args) {
  return (args.num_heads + 2 * args.num_kv_heads) * args.head_dim;
}

int64_t head_rms_norm_num_items(const HeadRmsNormArgs& args, int) {
  return num_row_items(args.num_tokens, qkv_width(args), kItemElements);
}

void head_rms_norm_run(const HeadRmsNormArgs& args, int64_t item, void*) {
  const int64_t head_dim = args.head_dim, width = qkv_width(args);
  const int64_t keys = args.num_heads * head_dim, values = keys + args.num_kv_heads * head_dim;
  each_row(args.num_tokens, head_rms_norm_num_items(args, 1), item, [&](int64_t token) {
    const float* x = args.qkv + token * width;
    float* out = args.out + token * width;
    const auto norm = [&](int64_t begin, int64_t end, const float* weight) {
      for (int64_t at = begin; at < end; at += head_dim)
        rms_norm_row(x + at, weight, head_dim, args.eps, out + at);
    };
    norm(0, keys, args.q_weight);
    norm(keys, values, args.k_weight);
    if (out != x) memcpy(out + values, x + values, (width - values) * sizeof(float));
  });
}

// Element i of the first half and of the second are a point that turns by the i-th angle.
inline void rotate_head(const float* x, const float* cos, const float* sin, float* out,
                        int64_t half) {
  const auto put = [](vfloat a, vfloat b, vfloat c, vfloat s, vfloat& first, vfloat& second) {
    first = a * c - b * s;
    second = b * c + a * s;
  };
  vfloat first, second;
  along(
      half,
      [&](int64_t i) {
        put(load(x + i), load(x + half + i), load(cos + i), load(sin + i), first, second);
        store(out + i, first);
        store(out + half + i, second);
      },
      [&](int64_t i, int64_t n) {
        put(load_some(x + i, n), load_some(x + half + i, n), load_some(cos + i, n),
            load_some(sin + i, n), first, second);
        store_some(out + i, first, n);
        store_some(out + half + i, second, n);
      });
}

inline int64_t rotary_width(const RotaryArgs& args) {
  return (args.num_rotated + args.num_copied) * args.head_dim;
}

int64_t rotary_num_items(const RotaryArgs& args, int) {
  return num_row_items(args.num_tokens, rotary_width(args), kItemElements);
}

void rotary_run(const RotaryArgs& args, int64_t item, void*) {
  const int64_t head_dim = args.head_dim, half = head_dim / 2, width = rotary_width(args);
  const int64_t rotated = args.num_rotated * head_dim;
  each_row(args.num_tokens, rotary_num_items(args, 1), item, [&](int64_t token) {
    const float* x = args.qkv + token * width;
    float* out = args.out + token * width;
    const float* cos = args.cos_sin + args.positions[token] * head_dim;
    for (int64_t at = 0; at < rotated; at += head_dim)
      rotate_head(x + at, cos, cos + half, out + at, half);
    if (out != x) memcpy(out + rotated, x + rotated, (width - rotated) * sizeof(float));
  });
}

int64_t select_rows_num_items(const SelectRowsArgs& args, int) {
  return num_row_items(args.num_rows, args.width, kItemElements);
}

void select_rows_run(const SelectRowsArgs& args, int64_t item, void*) {
  each_row(args.num_rows, select_rows_num_items(args, 1), item, [&](int64_t row) {
    memcpy(args.out + row * args.width, args.x + args.rows[row] * args.width,
           args.width * sizeof(float));
  });
}

}  // namespace
