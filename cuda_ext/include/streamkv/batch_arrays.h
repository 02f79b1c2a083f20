// A Batch that owns its arrays: what Rows fills each step, and what Python's `Batch` is.
#pragma once

#include <stdint.h>

#include <vector>

#include "streamkv/batch.h"

namespace streamkv {

struct BatchArrays {
  std::vector<int32_t> token_ids, positions, slots;  // [T]
  std::vector<int32_t> query_start;                  // [B + 1]
  std::vector<int32_t> context_lens;                 // [B]
  std::vector<int32_t> block_tables;                 // [B, max_blocks]
  std::vector<int32_t> logit_rows;                   // [R]
  int64_t max_blocks = 0;

  // Valid until an array changes.
  Batch view() const {
    return {static_cast<int64_t>(token_ids.size()),
            static_cast<int64_t>(context_lens.size()),
            static_cast<int64_t>(logit_rows.size()),
            max_blocks,
            token_ids.data(),
            positions.data(),
            slots.data(),
            query_start.data(),
            context_lens.data(),
            block_tables.data(),
            logit_rows.data()};
  }
};

}  // namespace streamkv
