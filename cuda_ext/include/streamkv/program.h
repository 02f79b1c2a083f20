// A model's forward, recorded once: ops over buffers of an arena, run for a step of any shape.
//
// Buffers have a row per token or per row that wants logits; each of these extents has a region of
// its own. A buffer's place is counted in bytes per row: in a step with T tokens the buffer starts
// at place * T. So places planned once by liveness never overlap, whatever T is, and multiples of
// 64 stay aligned.
#pragma once

#include <stdint.h>

#include <memory>
#include <vector>

#include "streamkv/batch.h"
#include "streamkv/kernels.h"
#include "streamkv/kv_cache.h"
#include "streamkv/team.h"

namespace streamkv {

enum class Extent : int32_t { kTokens = 0, kLogitRows = 1 };

using BufferId = int;  // index in the order added; -1: none

class Program {
 public:
  // `cache` must outlive the program.
  explicit Program(KvCache& cache);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // `place` is a multiple of 64.
  BufferId add_buffer(Extent extent, int64_t row_bytes, int64_t place);

  // Each checks what it is given (std::invalid_argument: op, argument, expected, got). Weights,
  // norms, biases and tables must outlive the program. out_dtype: the type of inputs that `out`
  // then holds, whose row_bytes must be its. `out` may be `qkv` in add_head_rms_norm and add_rotary
  // and `residual` in add_linear (or lie at the same place); else it must not overlap what the op
  // reads.
  void add_embedding(const PackedWeight& weight, BufferId out);
  void add_embedding(const QuantizedWeight& weight, BufferId out);
  void add_rms_norm(BufferId x, const float* weight, int64_t hidden, float eps, BufferId out,
                    Dtype out_dtype);
  void add_linear(BufferId x, const PackedWeight& weight, const float* bias, BufferId residual,
                  BufferId out);
  void add_linear(BufferId x, const QuantizedWeight& weight, const float* bias, BufferId residual,
                  BufferId out);
  void add_linear_silu_mul(BufferId x, const PackedWeight& weight, const float* bias, BufferId out,
                           Dtype out_dtype);
  void add_linear_silu_mul(BufferId x, const QuantizedWeight& weight, const float* bias,
                           BufferId out, Dtype out_dtype);
  void add_quantize(BufferId x, int64_t width, BufferId out);
  void add_head_rms_norm(BufferId qkv, const float* q_weight, const float* k_weight, float eps,
                         int64_t num_heads, BufferId out);
  void add_rotary(BufferId qkv, const float* cos_sin, int64_t max_positions, int64_t num_heads,
                  BufferId out);
  void add_store_kv(BufferId qkv, int64_t layer, int64_t num_heads);
  void add_paged_attention(BufferId qkv, int64_t layer, int64_t num_heads, float scale,
                           BufferId out, Dtype out_dtype);
  void add_select_rows(BufferId x, BufferId out);

  int64_t num_ops() const;
  const KvCache& cache() const;

  // What token ids and positions of a step must stay below: the sizes of the tables they index.
  int64_t vocab_size() const;
  int64_t max_positions() const;

  // Takes the arena, once all buffers are added: the largest step. Committed lazily.
  void reserve(int64_t max_tokens, int64_t max_logit_rows);

  // Ops [first, last) of one step; ops with nothing to do are skipped. std::invalid_argument if
  // the step is larger than what was reserved. Whoever made the batch has checked it.
  void run(const Batch& batch, Team& team, int64_t first, int64_t last);

  // Where a buffer lies for the step that ran last, and its size there.
  void* buffer(BufferId id) const;
  int64_t num_rows(BufferId id) const;
  int64_t row_bytes(BufferId id) const;

  // As if a step with so many rows in the buffer's extent had run last: for whoever fills buffers
  // before running some of the ops.
  void set_num_rows(BufferId id, int64_t num_rows);

  // Nanoseconds spent in each op since it was switched on, and in how many runs.
  void profile(bool on);
  const std::vector<int64_t>& op_ns() const;
  int64_t num_profiled_runs() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace streamkv
