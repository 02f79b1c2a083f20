// Float rows to rows of quantized blocks as checkpoints have them. The same numbers give the same
// bytes on every machine.
#pragma once

#include <stdint.h>

#include "streamkv/kernels.h"

namespace streamkv {

// Whether quantize_row makes it: kInt8, kQ8_0, kQ4_0 and kQ4_1.
bool can_quantize(WeightFormat format);

// What became of rows, over blocks whose numbers are finite.
struct QuantizeReport {
  float largest = 0.0f;     // magnitude
  float lost_error = 0.0f;  // the largest error (root of the mean square in a block) where a scale
                            // is beyond what float16 holds, or too small for it; 0: nowhere
  void add(const QuantizeReport& other);
};

// `x` is float32, bfloat16 or float16; `out` has source_row_bytes. kInt8 and kQ8_0 round to the
// nearest; kQ4_0 and kQ4_1 look for the scale (and minimum) of each block with the least squared
// error. Where a number isn't finite, or a scale too large for float16, the scale becomes NaN:
// products with it fail and are seen to.
QuantizeReport quantize_row(WeightFormat format, const void* x, Dtype dtype, int64_t depth,
                            void* out);

}  // namespace streamkv
