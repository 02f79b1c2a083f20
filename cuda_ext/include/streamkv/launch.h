// The CPU ops as callers see them: raw pointers to contiguous arrays, and their sizes.
//
// Each launcher checks what would make a kernel read or write outside its arrays (ids, slots,
// positions, lengths; std::invalid_argument names op, argument, expected and got), cuts the work
// into items, and runs them. Whether pointers match sizes and types is the caller's promise.
// Nothing allocates except the first call of a thread. Shapes as in streamkv/ops/kernels.py.
#pragma once

#include "streamkv/cpu_kernels.h"

namespace streamkv {

void launch_gather_rows(const char* op, const char* argument, const void* table, const int32_t* ids,
                        void* out, int64_t num_ids, int64_t num_rows, int64_t row_bytes);

void launch_rms_norm(const RmsNormArgs& args, int64_t num_rows);

void launch_rotary(const RotaryArgs& args, int64_t num_tokens, int64_t max_positions);

void launch_silu_mul(const SiluMulArgs& args, int64_t num_rows);

struct StoreKvArgs {
  const void* qkv;       // [tokens, qkv_bytes]
  void* layer_cache;     // this layer's K of block 0: [2, num_kv_heads, block_size, head_bytes]
  const int32_t* slots;  // [tokens]
  int64_t num_blocks;
  int64_t block_bytes;   // from one block to the next: all layers
  int64_t block_size;
  int64_t num_kv_heads;
  int64_t head_bytes;    // of one head of one token
  int64_t qkv_bytes;     // of one token
  int64_t q_bytes;       // of its Q heads, which come first
};

void launch_store_kv(const StoreKvArgs& args, int64_t num_tokens);

// Sets args.tile_queries.
void launch_paged_attention(AttentionArgs args, int64_t num_rows, int64_t num_tokens);

}  // namespace streamkv
