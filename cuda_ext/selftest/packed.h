// A weight packed from plain numbers, in pieces as a loader brings them.
#pragma once

#include <string>
#include <vector>

#include "selftest.h"

namespace streamkv::selftest {

struct TestWeight {
  std::vector<float> values;  // [num_outputs, depth], as the weight's type has them
  Guarded memory;
  PackedWeight view;

  // `source` is [num_outputs, depth] of source_dtype; packed in pieces of piece_rows.
  TestWeight(Dtype dtype, int64_t num_outputs, int64_t depth, bool is_paired, const void* source,
             Dtype source_dtype, int64_t piece_rows);
};

// Random numbers of any type: float32, or bits of the narrow ones.
std::vector<unsigned char> random_source(Random& random, Dtype dtype, int64_t n);
std::string name_of(Dtype dtype);

}  // namespace streamkv::selftest
