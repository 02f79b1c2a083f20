// What Python's Batch promises, checked against a cache.
#pragma once

#include "streamkv/batch.h"
#include "streamkv/kernels.h"

namespace streamkv {

// std::invalid_argument unless each slot and each block of each context is in the cache.
void check_slots(const char* op, const int32_t* slots, int64_t num_slots, const KvLayer& cache);
void check_contexts(const char* op, const Batch& batch, const KvLayer& cache);

}  // namespace streamkv
