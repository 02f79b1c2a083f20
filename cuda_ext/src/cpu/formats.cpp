#include "streamkv/formats.h"

#include <string.h>

namespace streamkv {
namespace {

struct Format {
  const char* name;
  int64_t depth, bytes;  // of a block
};

constexpr Format kFormats[kNumWeightFormats] = {
    {"int8", 1, 1},     {"Q4_0", 32, 18},    {"Q4_1", 32, 20},
    {"Q5_0", 32, 22},   {"Q5_1", 32, 24},    {"Q8_0", 32, 34},
    {"Q4_K", 256, 144}, {"Q5_K", 256, 176},  {"Q6_K", 256, 210},
};

const Format& of(WeightFormat format) { return kFormats[static_cast<int>(format)]; }

}  // namespace

const char* format_name(WeightFormat format) { return of(format).name; }

bool parse_format(const char* name, WeightFormat* format) {
  for (int i = 0; i < kNumWeightFormats; ++i)
    if (strcmp(kFormats[i].name, name) == 0) {
      *format = static_cast<WeightFormat>(i);
      return true;
    }
  return false;
}

int64_t block_depth(WeightFormat format) { return of(format).depth; }

int64_t source_row_bytes(WeightFormat format, int64_t depth) {
  if (format == WeightFormat::kInt8) return static_cast<int64_t>(sizeof(float)) + depth;
  return depth / of(format).depth * of(format).bytes;
}

int64_t input_row_bytes(Dtype dtype, int64_t width) {
  if (dtype == Dtype::kInt8)
    return (width + kInputGroup - 1) / kInputGroup * static_cast<int64_t>(sizeof(InputGroup));
  return width * (dtype == Dtype::kFloat32 ? 4 : 2);
}

}  // namespace streamkv
