#include "streamkv/program.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "program_parts.h"
#include "streamkv/attention_planner.h"

namespace streamkv {

struct Program::Impl {
  explicit Impl(KvCache& cache) : cache(cache) {}

  KvCache& cache;
  Arena arena;
  std::vector<std::unique_ptr<Op>> ops;
  std::vector<Phase> phases;  // of the step, kept for its memory
  int64_t vocab_size = std::numeric_limits<int32_t>::max();
  int64_t max_positions = std::numeric_limits<int32_t>::max();

  AttentionPlanner planner;
  int64_t num_attention_heads = 0;  // of each attention; 0: there is none

  bool is_profiled = false;
  std::vector<int64_t> op_ns;
  int64_t num_profiled_runs = 0;

  template <class Args, class Place>
  void add(const Kernel<Args>& kernel, const Args& args, Place place) {
    ops.push_back(std::make_unique<PlacedOp<Args, Place>>(kernel, args, place));
  }

  // Q, K and V of one token, side by side.
  int64_t qkv_bytes(int64_t num_heads) const {
    return (num_heads + 2 * cache.num_kv_heads) * cache.head_dim * kFloatBytes;
  }

  int64_t check_num_heads(const char* op, int64_t num_heads) const {
    if (num_heads < 1 || num_heads > kMaxHeads || num_heads % cache.num_kv_heads != 0)
      refuse(op, "num_heads", "a multiple of the " + std::to_string(cache.num_kv_heads) +
             " KV heads up to " + std::to_string(kMaxHeads), std::to_string(num_heads));
    return num_heads;
  }

  // Of an op that may write over what it reads.
  void check_qkv_out(const char* op, BufferId qkv, int64_t num_heads, BufferId out) const {
    const OpBuffers buffers{op, arena};
    buffers.check("qkv", qkv, Extent::kTokens, qkv_bytes(num_heads));
    buffers.check("out", out, Extent::kTokens, qkv_bytes(num_heads));
    if (!buffers.are_one_place(qkv, out)) buffers.check_apart(out, {qkv});
  }

  template <class Weight>
  void add_embedding(const Weight& weight, BufferId out) {
    const OpBuffers buffers{"embedding", arena};
    buffers.check("out", out, Extent::kTokens, weight.depth * kFloatBytes);
    vocab_size = std::min(vocab_size, weight.num_outputs);
    auto args = no_args(embedding_kernel(weight));
    args.weight = weight;
    add(embedding_kernel(weight), args, [out](auto& args, const Step& step) {
      args.token_ids = step.batch.token_ids;
      step.place(args.out, out);
      args.num_tokens = step.num_rows(out);
    });
  }

  template <class Weight>
  void add_linear(BufferId x, const Weight& weight, const float* bias, BufferId residual,
                  BufferId out) {
    const OpBuffers buffers{"linear", arena};
    const int64_t out_bytes = weight.num_outputs * kFloatBytes;
    const Extent extent = buffers.check_product(x, weight, false);
    buffers.check("out", out, extent, out_bytes);
    buffers.check_apart(out, {x});
    if (residual != kNoBuffer) {
      buffers.check("residual", residual, extent, out_bytes);
      if (!buffers.are_one_place(residual, out)) buffers.check_apart(out, {residual});
    }
    add_product(x, weight, bias, residual, out, Dtype::kFloat32);
  }

  template <class Weight>
  void add_linear_silu_mul(BufferId x, const Weight& weight, const float* bias, BufferId out,
                           Dtype out_dtype) {
    const OpBuffers buffers{"linear_silu_mul", arena};
    const Extent extent = buffers.check_product(x, weight, true);
    buffers.check_inputs("out", out, extent, weight.num_outputs / 2, out_dtype);
    buffers.check_apart(out, {x});
    add_product(x, weight, bias, kNoBuffer, out, out_dtype);
  }

  template <class Weight>
  void add_product(BufferId x, const Weight& weight, const float* bias, BufferId residual,
                   BufferId out, Dtype out_dtype) {
    auto args = no_args(matmul_kernel(weight));
    args.weight = weight;
    args.bias = bias;
    args.out_dtype = out_dtype;
    add(matmul_kernel(weight), args, [x, residual, out](auto& args, const Step& step) {
      step.place(args.x, x);
      args.residual = nullptr;
      if (residual != kNoBuffer) step.place(args.residual, residual);
      step.place(args.out, out);
      args.num_rows = step.num_rows(x);
    });
  }

  KvLayer check_layer(const char* op, int64_t layer) const {
    if (layer < 0 || layer >= cache.num_layers)
      refuse(op, "layer", "0 to " + std::to_string(cache.num_layers - 1), std::to_string(layer));
    return cache.layer(layer);
  }
};

Program::Program(KvCache& cache) : impl_(std::make_unique<Impl>(cache)) {}
Program::~Program() = default;

BufferId Program::add_buffer(Extent extent, int64_t row_bytes, int64_t place) {
  return impl_->arena.add(extent, row_bytes, place);
}

// --- recording ----------------------------------------------------------------------------------
// Each op is checked, and then adds a function that fills in what depends on the step.

void Program::add_embedding(const PackedWeight& weight, BufferId out) {
  impl_->add_embedding(weight, out);
}

void Program::add_embedding(const QuantizedWeight& weight, BufferId out) {
  impl_->add_embedding(weight, out);
}

void Program::add_rms_norm(BufferId x, const float* weight, int64_t hidden, float eps,
                           BufferId out, Dtype out_dtype) {
  const OpBuffers buffers{"rms_norm", impl_->arena};
  const Extent extent = buffers.extent("x", x);
  buffers.check("x", x, extent, hidden * kFloatBytes);
  RmsNormArgs args{};
  args.out_dtype = buffers.check_inputs("out", out, extent, hidden, out_dtype);
  buffers.check_apart(out, {x});
  args.weight = weight;
  args.hidden = hidden;
  args.eps = eps;
  impl_->add(kernels().rms_norm, args, [x, out](RmsNormArgs& args, const Step& step) {
    step.place(args.x, x);
    step.place(args.out, out);
    args.num_rows = step.num_rows(x);
  });
}

void Program::add_linear(BufferId x, const PackedWeight& weight, const float* bias,
                         BufferId residual, BufferId out) {
  impl_->add_linear(x, weight, bias, residual, out);
}

void Program::add_linear(BufferId x, const QuantizedWeight& weight, const float* bias,
                         BufferId residual, BufferId out) {
  impl_->add_linear(x, weight, bias, residual, out);
}

void Program::add_linear_silu_mul(BufferId x, const PackedWeight& weight, const float* bias,
                                  BufferId out, Dtype out_dtype) {
  if (out_dtype == Dtype::kInt8)
    refuse("linear_silu_mul", "out_dtype", "float32 or bfloat16 of a float weight", "int8");
  impl_->add_linear_silu_mul(x, weight, bias, out, out_dtype);
}

void Program::add_linear_silu_mul(BufferId x, const QuantizedWeight& weight, const float* bias,
                                  BufferId out, Dtype out_dtype) {
  impl_->add_linear_silu_mul(x, weight, bias, out, out_dtype);
}

void Program::add_quantize(BufferId x, int64_t width, BufferId out) {
  const OpBuffers buffers{"quantize", impl_->arena};
  const Extent extent = buffers.extent("x", x);
  buffers.check("x", x, extent, width * kFloatBytes);
  buffers.check_inputs("out", out, extent, width, Dtype::kInt8);
  buffers.check_apart(out, {x});
  QuantizeArgs args{};
  args.width = width;
  impl_->add(kernels().quantized.quantize, args, [x, out](QuantizeArgs& args, const Step& step) {
    step.place(args.x, x);
    step.place(args.out, out);
    args.num_rows = step.num_rows(x);
  });
}

void Program::add_head_rms_norm(BufferId qkv, const float* q_weight, const float* k_weight,
                                float eps, int64_t num_heads, BufferId out) {
  HeadRmsNormArgs args{};
  args.num_heads = impl_->check_num_heads("head_rms_norm", num_heads);
  args.num_kv_heads = impl_->cache.num_kv_heads;
  args.head_dim = impl_->cache.head_dim;
  args.q_weight = q_weight;
  args.k_weight = k_weight;
  args.eps = eps;
  impl_->check_qkv_out("head_rms_norm", qkv, num_heads, out);
  impl_->add(kernels().head_rms_norm, args, [qkv, out](HeadRmsNormArgs& args, const Step& step) {
    step.place(args.qkv, qkv);
    step.place(args.out, out);
    args.num_tokens = step.num_rows(qkv);
  });
}

void Program::add_rotary(BufferId qkv, const float* cos_sin, int64_t max_positions,
                         int64_t num_heads, BufferId out) {
  RotaryArgs args{};
  args.num_rotated = impl_->check_num_heads("rotary", num_heads) + impl_->cache.num_kv_heads;
  args.num_copied = impl_->cache.num_kv_heads;
  args.head_dim = impl_->cache.head_dim;
  args.cos_sin = cos_sin;
  impl_->check_qkv_out("rotary", qkv, num_heads, out);
  impl_->max_positions = std::min(impl_->max_positions, max_positions);
  impl_->add(kernels().rotary, args, [qkv, out](RotaryArgs& args, const Step& step) {
    step.place(args.qkv, qkv);
    args.positions = step.batch.positions;
    step.place(args.out, out);
    args.num_tokens = step.num_rows(qkv);
  });
}

void Program::add_store_kv(BufferId qkv, int64_t layer, int64_t num_heads) {
  const OpBuffers buffers{"store_kv", impl_->arena};
  StoreKvArgs args{};
  args.num_heads = impl_->check_num_heads("store_kv", num_heads);
  args.cache = impl_->check_layer("store_kv", layer);
  buffers.check("qkv", qkv, Extent::kTokens, impl_->qkv_bytes(num_heads));
  impl_->add(kernels().store_kv, args, [qkv](StoreKvArgs& args, const Step& step) {
    step.place(args.qkv, qkv);
    args.slots = step.batch.slots;
    args.num_tokens = step.num_rows(qkv);
  });
}

void Program::add_paged_attention(BufferId qkv, int64_t layer, int64_t num_heads, float scale,
                                  BufferId out, Dtype out_dtype) {
  const OpBuffers buffers{"paged_attention", impl_->arena};
  AttentionArgs args{};
  args.num_heads = impl_->check_num_heads("paged_attention", num_heads);
  args.cache = impl_->check_layer("paged_attention", layer);
  args.scale = scale;
  buffers.check("qkv", qkv, Extent::kTokens, impl_->qkv_bytes(num_heads));
  if (out_dtype == Dtype::kInt8 && impl_->cache.head_dim % kInputGroup != 0)
    refuse("paged_attention", "out_dtype", "float32 or bfloat16 of heads of " +
           std::to_string(impl_->cache.head_dim), "int8");
  args.out_dtype = buffers.check_inputs("out", out, Extent::kTokens,
                                        num_heads * impl_->cache.head_dim, out_dtype);
  buffers.check_apart(out, {qkv});
  if (impl_->num_attention_heads != 0 && impl_->num_attention_heads != num_heads)
    refuse("paged_attention", "num_heads", "as in the layers before, " +
           std::to_string(impl_->num_attention_heads), std::to_string(num_heads));
  impl_->num_attention_heads = num_heads;
  impl_->add(kernels().attention, args, [qkv, out](AttentionArgs& args, const Step& step) {
    step.place(args.qkv, qkv);
    args.batch = &step.batch;
    args.plan = step.plan;
    step.place(args.out, out);
  });
}

void Program::add_select_rows(BufferId x, BufferId out) {
  const OpBuffers buffers{"select_rows", impl_->arena};
  const int64_t row_bytes = impl_->arena.row_bytes(buffers.known("x", x));
  buffers.check("x", x, Extent::kTokens, row_bytes);
  buffers.check("out", out, Extent::kLogitRows, row_bytes);
  SelectRowsArgs args{};
  args.width = row_bytes / kFloatBytes;
  if (row_bytes % kFloatBytes != 0)
    refuse("select_rows", "x", "rows of float32", std::to_string(row_bytes) + " bytes");
  impl_->add(kernels().select_rows, args, [x, out](SelectRowsArgs& args, const Step& step) {
    step.place(args.x, x);
    args.rows = step.batch.logit_rows;
    step.place(args.out, out);
    args.num_rows = step.num_rows(out);
  });
}

// --- running ------------------------------------------------------------------------------------

int64_t Program::num_ops() const { return static_cast<int64_t>(impl_->ops.size()); }
const KvCache& Program::cache() const { return impl_->cache; }
int64_t Program::vocab_size() const { return impl_->vocab_size; }
int64_t Program::max_positions() const { return impl_->max_positions; }

void Program::reserve(int64_t max_tokens, int64_t max_logit_rows) {
  impl_->arena.reserve(max_tokens, max_logit_rows);
}

void Program::run(const Batch& batch, Team& team, int64_t first, int64_t last) {
  Impl& self = *impl_;
  if (first < 0 || first > last || last > num_ops())
    refuse("run", "first, last", "ascending numbers up to " + std::to_string(num_ops()),
           std::to_string(first) + ", " + std::to_string(last));
  self.arena.set_num_rows(Extent::kTokens, batch.num_tokens);
  self.arena.set_num_rows(Extent::kLogitRows, batch.num_logit_rows);

  Step step{self.arena, batch, nullptr};
  if (self.num_attention_heads != 0) {
    const KvCache& cache = self.cache;
    step.plan = &self.planner.plan(
        batch, {self.num_attention_heads, cache.num_kv_heads, cache.head_dim, cache.block_size},
        team.num_threads());
  }
  self.phases.clear();
  for (int64_t i = first; i < last; ++i)
    self.phases.push_back(self.ops[i]->bind(step, team.num_threads()));

  if (!self.is_profiled) return team.run(self.phases.data(), last - first);
  team.run(self.phases.data(), last - first, self.op_ns.data() + first);
  ++self.num_profiled_runs;
}

void* Program::buffer(BufferId id) const {
  return impl_->arena.at(impl_->arena.check("buffer", id));
}

int64_t Program::num_rows(BufferId id) const {
  return impl_->arena.num_rows(impl_->arena.check("num_rows", id));
}

int64_t Program::row_bytes(BufferId id) const {
  return impl_->arena.row_bytes(impl_->arena.check("row_bytes", id));
}

void Program::set_num_rows(BufferId id, int64_t num_rows) {
  impl_->arena.set_num_rows(impl_->arena.extent(impl_->arena.check("set_num_rows", id)), num_rows);
}

void Program::profile(bool on) {
  impl_->is_profiled = on;
  if (!on) return;
  impl_->op_ns.assign(impl_->ops.size(), 0);
  impl_->num_profiled_runs = 0;
}

const std::vector<int64_t>& Program::op_ns() const { return impl_->op_ns; }
int64_t Program::num_profiled_runs() const { return impl_->num_profiled_runs; }

}  // namespace streamkv
