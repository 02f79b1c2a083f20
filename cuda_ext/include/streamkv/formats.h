// The names of quantized formats, and how many bytes rows of weights and of inputs take.
#pragma once

#include <stdint.h>

#include "streamkv/kernels.h"

namespace streamkv {

// By name as in GGUF, "Q4_0", or "int8". Returns false for any other.
const char* format_name(WeightFormat format);
bool parse_format(const char* name, WeightFormat* format);

// Depths that lie in one block: what a row's depth must be a multiple of.
int64_t block_depth(WeightFormat format);
// Of a row as files have it: blocks; kInt8: a float32 and the bytes.
int64_t source_row_bytes(WeightFormat format, int64_t depth);
// Of a row of so many inputs of a product.
int64_t input_row_bytes(Dtype dtype, int64_t width);

}  // namespace streamkv
