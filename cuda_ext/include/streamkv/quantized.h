// Quantized weights and the quantized inputs that products with them take: data and layout rules.
//
// Plain data only, as in kernels.h. A product of both is made of sums of whole numbers over groups
// of 32 depths, which are exact, and of one float32 accumulator for each output, to which the groups
// are added in the order of depth.
#pragma once

#include <stdint.h>

namespace streamkv {

// Named as in GGUF, whose blocks they are repacked from without loss; kInt8 is ours: whole numbers
// from -127 to 127 with one float32 scale for each output.
enum class WeightFormat : int32_t {
  kInt8 = 0,
  kQ4_0 = 1,
  kQ4_1 = 2,
  kQ5_0 = 3,
  kQ5_1 = 4,
  kQ8_0 = 5,
  kQ4_K = 6,
  kQ5_K = 7,
  kQ6_K = 8,
};
constexpr int kNumWeightFormats = 9;

// Depths of an input that share a scale: an input is values * scale. A row of inputs of width w is
// divide_up(w, kInputGroup) of these; values past its end are zero.
constexpr int64_t kInputGroup = 32;
struct InputGroup {
  int8_t values[kInputGroup];  // -127 to 127
  float scale;                 // the greatest magnitude / 127; NaN if any value wasn't finite
  int32_t negative_sum;        // -(the sum of values): what an offset of weights is made good with
  float scaled_sum;            // scale * (the sum of values): what minima of weights multiply
};
static_assert(sizeof(InputGroup) == 44, "rows of inputs are counted in bytes");

// Outputs in a panel, and depths whose scales K formats keep together, on every instruction set.
constexpr int64_t kQuantizedPanel = 32;
constexpr int64_t kSuperBlock = 256;

// Some outputs of one format: one checkpoint tensor of those that are stacked. Its panels follow
// one another, the last one filled up with zeros (see isa/quantized_layout.h).
struct QuantizedPart {
  const void* data;  // 64-byte aligned
  WeightFormat format;
  int64_t num_outputs;
};

// A matrix [num_outputs, depth]: its parts' outputs, one after another. `is_paired`: two parts of
// as many outputs, the gates and what they gate.
constexpr int64_t kMaxWeightParts = 4;
struct QuantizedWeight {
  QuantizedPart parts[kMaxWeightParts];
  int64_t num_parts;
  int64_t num_outputs;
  int64_t depth;  // a multiple of 32 for formats other than kInt8, of 256 for those ending in K
  bool is_paired;
};

struct QuantizedPackArgs {
  QuantizedPart part;    // where to; `data` is written
  int64_t depth;
  const void* source;    // [num_rows] rows of blocks as GGUF has them; kInt8: a float, then int8s
  int64_t first_output;  // of the part; a multiple of kQuantizedPanel
  int64_t num_rows;      // so is this, but for the last rows of the part
};

struct QuantizedEmbeddingArgs {
  const int32_t* token_ids;  // [num_tokens]
  QuantizedWeight weight;    // [vocab, hidden]
  float* out;                // [num_tokens, hidden]
  int64_t num_tokens;
};

}  // namespace streamkv
