// What one step computes, as plain arrays of int32. Built by rows.h, read by every op.
//
// T tokens, B rows, R rows that want logits. Whoever builds one has checked it: ids, slots,
// positions and block ids are in range, so kernels read them unchecked.
#pragma once

#include <stdint.h>

namespace streamkv {

struct Batch {
  int64_t num_tokens;      // T
  int64_t num_rows;        // B
  int64_t num_logit_rows;  // R
  int64_t max_blocks;      // width of block_tables

  const int32_t* token_ids;     // [T]
  const int32_t* positions;     // [T] position of each token in its sequence
  const int32_t* slots;         // [T] where its KV goes: block_id * block_size + offset in block
  const int32_t* query_start;   // [B + 1] row b owns tokens query_start[b] .. query_start[b + 1] - 1
  const int32_t* context_lens;  // [B] tokens in the row's context after this step
  const int32_t* block_tables;  // [B, max_blocks] unused entries are 0
  const int32_t* logit_rows;    // [R] tokens whose hidden state wants logits
};

}  // namespace streamkv
