// The CPU kernels, compiled once per instruction set: STREAMKV_ISA names the table made here.
//
// All code is in an anonymous namespace, and only compiler intrinsics and plain C are used, so that
// the linker has no function to merge with another instruction set's (see cpu_kernels.h).
#include "streamkv/cpu_kernels.h"

#include "attention.h"
#include "vec.h"

namespace {

using namespace streamkv;

// A row of `length`: whole(offset) for each whole vector, then rest(offset, count) for what is left.
template <class Whole, class Rest>
inline void along(int64_t length, Whole whole, Rest rest) {
  int64_t i = 0;
  for (; i + kWidth <= length; i += kWidth) whole(i);
  if (i < length) rest(i, length - i);
}

template <class E>
void add_row(const E* x, const E* y, E* out, int64_t length) {
  along(
      length, [&](int64_t i) { store(out + i, load(x + i) + load(y + i)); },
      [&](int64_t i, int64_t n) {
        store_some(out + i, load_some(x + i, n) + load_some(y + i, n), n);
      });
}

template <class E>
void rms_norm_row(const E* x, const E* weight, E* out, int64_t length, float eps) {
  vfloat squares = {};
  along(
      length,
      [&](int64_t i) {
        const vfloat v = load(x + i);
        squares = fma(v, v, squares);
      },
      [&](int64_t i, int64_t n) {
        const vfloat v = load_some(x + i, n);
        squares = fma(v, v, squares);
      });
  const float mean_square = sum(squares) / (float)length;
  const vfloat scale = broadcast(1.0f / __builtin_sqrtf(mean_square + eps));
  along(
      length, [&](int64_t i) { store(out + i, load(x + i) * scale * load(weight + i)); },
      [&](int64_t i, int64_t n) {
        store_some(out + i, load_some(x + i, n) * scale * load_some(weight + i, n), n);
      });
}

template <class E>
void rms_norm(const RmsNormArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * args.hidden;
    const E* x = (const E*)args.x + at;
    if (args.residual != nullptr) {
      E* sum = (E*)args.new_residual + at;
      add_row(x, (const E*)args.residual + at, sum, args.hidden);
      x = sum;
    }
    rms_norm_row(x, (const E*)args.weight, (E*)args.normed + at, args.hidden, args.eps);
  }
}

template <class E>
void rotate_head(const E* x, const float* cos, const float* sin, E* out, int64_t half) {
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

template <class E>
void rotary(const RotaryArgs& args, int64_t begin, int64_t end) {
  const int64_t head_dim = args.head_dim, half = head_dim / 2;
  const int64_t width = (args.num_rotated + args.num_copied) * head_dim;
  for (int64_t token = begin; token < end; ++token) {
    const E* x = (const E*)args.qkv + token * width;
    E* out = (E*)args.out + token * width;
    const float* cos = args.cos_sin + args.positions[token] * head_dim;
    for (int64_t head = 0; head < args.num_rotated; ++head)
      rotate_head(x + head * head_dim, cos, cos + half, out + head * head_dim, half);
    const int64_t rotated = args.num_rotated * head_dim;
    memcpy(out + rotated, x + rotated, args.num_copied * head_dim * sizeof(E));
  }
}

inline vfloat silu(vfloat x) {
  const vfloat e = exp_nonpositive(x < 0.0f ? x : -x);  // e^-|x|: never overflows
  const vfloat numerator = x < 0.0f ? x * e : x;
  return numerator / (e + 1.0f);
}

template <class E>
void silu_mul(const SiluMulArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const E* gate = (const E*)args.gate_up + row * 2 * args.inner;
    const E* up = gate + args.inner;
    E* out = (E*)args.out + row * args.inner;
    along(
        args.inner, [&](int64_t i) { store(out + i, silu(load(gate + i)) * load(up + i)); },
        [&](int64_t i, int64_t n) {
          store_some(out + i, silu(load_some(gate + i, n)) * load_some(up + i, n), n);
        });
  }
}

// The table's entries: one per kernel, choosing the element type.
void run_rms_norm(const RmsNormArgs& args, int64_t begin, int64_t end) {
  args.dtype == Dtype::kFloat32 ? rms_norm<float>(args, begin, end)
                                : rms_norm<bf16>(args, begin, end);
}

void run_rotary(const RotaryArgs& args, int64_t begin, int64_t end) {
  args.dtype == Dtype::kFloat32 ? rotary<float>(args, begin, end)
                                : rotary<bf16>(args, begin, end);
}

void run_silu_mul(const SiluMulArgs& args, int64_t begin, int64_t end) {
  args.dtype == Dtype::kFloat32 ? silu_mul<float>(args, begin, end)
                                : silu_mul<bf16>(args, begin, end);
}

bool run_attention_tile(const AttentionArgs& args, int64_t row, int64_t tile, int64_t kv_head,
                        float* scratch) {
  return args.dtype == Dtype::kFloat32
             ? attention_tile<float>(args, row, tile, kv_head, scratch)
             : attention_tile<bf16>(args, row, tile, kv_head, scratch);
}

}  // namespace

#define STREAMKV_JOIN(a, b) a##b
#define STREAMKV_TABLE(isa) STREAMKV_JOIN(kKernels_, isa)
#define STREAMKV_QUOTE(isa) #isa
#define STREAMKV_NAME(isa) STREAMKV_QUOTE(isa)

namespace streamkv {

extern const CpuKernels STREAMKV_TABLE(STREAMKV_ISA);
const CpuKernels STREAMKV_TABLE(STREAMKV_ISA) = {
    STREAMKV_NAME(STREAMKV_ISA), run_rms_norm, run_rotary, run_silu_mul, run_attention_tile,
};

}  // namespace streamkv
