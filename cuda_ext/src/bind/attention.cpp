// streamkv._cpu.Batch, ops.store_kv and ops.paged_attention.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <string>
#include <vector>

#include "arguments.h"
#include "batch.h"
#include "streamkv/attention_planner.h"
#include "streamkv/batch_arrays.h"
#include "streamkv/kv_cache.h"

namespace streamkv {

void check_slots(const char* op, const int32_t* slots, int64_t num_slots, const KvLayer& cache) {
  const int64_t limit = cache.num_blocks * cache.block_size;
  for (int64_t i = 0; i < num_slots; ++i)
    if (slots[i] < 0 || slots[i] >= limit)
      refuse(op, "slots", "numbers from 0 to " + std::to_string(limit - 1),
             std::to_string(slots[i]) + " at " + std::to_string(i));
}

void check_contexts(const char* op, const Batch& batch, const KvLayer& cache) {
  for (int64_t row = 0; row < batch.num_rows; ++row) {
    const int64_t num_blocks = (batch.context_lens[row] + cache.block_size - 1) / cache.block_size;
    const std::string where = " for row " + std::to_string(row);
    if (num_blocks > batch.max_blocks)
      refuse(op, "block_tables", std::to_string(num_blocks) + " blocks" + where,
             std::to_string(batch.max_blocks));
    const int32_t* table = batch.block_tables + row * batch.max_blocks;
    for (int64_t i = 0; i < num_blocks; ++i)
      if (table[i] < 0 || table[i] >= cache.num_blocks)
        refuse(op, "block_tables", "blocks from 0 to " + std::to_string(cache.num_blocks - 1),
               std::to_string(table[i]) + where);
  }
}

namespace {

constexpr int64_t kMaxNumber = int64_t{1} << 31;

std::vector<int32_t> copied(const char* name, const Array& array, int64_t length, int64_t limit) {
  const int32_t* values = indices("Batch", name, array, length, limit);
  return {values, values + array.shape(0)};
}

// Rows own tokens one after the other, and no more of them than their contexts have.
void check_rows(const BatchArrays& batch) {
  const int64_t num_tokens = static_cast<int64_t>(batch.token_ids.size());
  const std::vector<int32_t>& start = batch.query_start;
  if (start.front() != 0 || start.back() != num_tokens)
    refuse("Batch", "query_start", "numbers from 0 to " + std::to_string(num_tokens),
           std::to_string(start.front()) + " to " + std::to_string(start.back()));
  for (size_t row = 0; row + 1 < start.size(); ++row) {
    const int32_t queries = start[row + 1] - start[row];
    if (queries < 0)
      refuse("Batch", "query_start", "ascending numbers", "less after row " + std::to_string(row));
    if (batch.context_lens[row] < queries)
      refuse("Batch", "context_lens",
             "at least the row's " + std::to_string(queries) + " tokens",
             std::to_string(batch.context_lens[row]) + " for row " + std::to_string(row));
  }
}

void init(BatchArrays* self, const Array& token_ids, const Array& positions, const Array& slots,
          const Array& query_start, const Array& context_lens, const Array& block_tables,
          const Array& logit_rows) {
  BatchArrays batch;
  batch.token_ids = copied("token_ids", token_ids, kAny, kMaxNumber);
  const int64_t num_tokens = static_cast<int64_t>(batch.token_ids.size());
  batch.positions = copied("positions", positions, num_tokens, kMaxNumber);
  batch.slots = copied("slots", slots, num_tokens, kMaxNumber);
  batch.context_lens = copied("context_lens", context_lens, kAny, kMaxNumber);
  const int64_t num_rows = static_cast<int64_t>(batch.context_lens.size());
  batch.query_start = copied("query_start", query_start, num_rows + 1, kMaxNumber);
  const int32_t* tables = elements<int32_t>("Batch", "block_tables", block_tables,
                                            {num_rows, kAny});
  batch.max_blocks = static_cast<int64_t>(block_tables.shape(1));
  batch.block_tables.assign(tables, tables + num_rows * batch.max_blocks);
  batch.logit_rows = copied("logit_rows", logit_rows, kAny, num_tokens);
  check_rows(batch);
  new (self) BatchArrays(std::move(batch));
}

nb::object to_array(const std::vector<int32_t>& values, std::vector<size_t> shape) {
  auto* data = new int32_t[values.size()];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
  std::copy(values.begin(), values.end(), data);
  return nb::cast(nb::ndarray<nb::numpy, int32_t>(data, shape.size(), shape.data(), owner));
}

template <std::vector<int32_t> BatchArrays::* kArray>
nb::object get_array(const BatchArrays& batch) {
  return to_array(batch.*kArray, {(batch.*kArray).size()});
}

nb::object get_block_tables(const BatchArrays& batch) {
  return to_array(batch.block_tables,
                  {batch.context_lens.size(), static_cast<size_t>(batch.max_blocks)});
}

KvLayer layer_of(const char* op, const KvCache& cache, int64_t layer) {
  if (layer < 0 || layer >= cache.num_layers)
    refuse(op, "layer", "0 to " + std::to_string(cache.num_layers - 1), std::to_string(layer));
  return cache.layer(layer);
}

const float* check_qkv(const char* op, const Array& qkv, const KvCache& cache, int64_t num_heads,
                       int64_t num_tokens) {
  if (num_heads < 1 || num_heads > kMaxHeads || num_heads % cache.num_kv_heads != 0)
    refuse(op, "num_heads",
           "a multiple of " + std::to_string(cache.num_kv_heads) + " KV heads up to " +
               std::to_string(kMaxHeads),
           std::to_string(num_heads));
  const int64_t width = (num_heads + 2 * cache.num_kv_heads) * cache.head_dim;
  return elements<float>(op, "qkv", qkv, {num_tokens, width});
}

void store_kv(Team& team, const Array& qkv, KvCache& cache, const Array& slots, int64_t layer,
              int64_t num_heads) {
  constexpr auto kOp = "store_kv";
  StoreKvArgs args;
  args.cache = layer_of(kOp, cache, layer);
  args.slots = elements<int32_t>(kOp, "slots", slots, {kAny});
  args.num_tokens = static_cast<int64_t>(slots.shape(0));
  args.num_heads = num_heads;
  args.qkv = check_qkv(kOp, qkv, cache, num_heads, args.num_tokens);
  check_slots(kOp, args.slots, args.num_tokens, args.cache);
  run_op(team, kernels().store_kv, args);
}

nb::object paged_attention(Team& team, const Array& qkv, const KvCache& cache,
                           const BatchArrays& arrays, int64_t layer, int64_t num_heads,
                           float scale, const std::string& out_dtype) {
  constexpr auto kOp = "paged_attention";
  const Batch batch = arrays.view();
  AttentionArgs args;
  args.cache = layer_of(kOp, cache, layer);
  args.qkv = check_qkv(kOp, qkv, cache, num_heads, batch.num_tokens);
  args.batch = &batch;
  args.out_dtype = parse_any_dtype(kOp, "out_dtype", out_dtype);
  if (args.out_dtype == Dtype::kInt8 && cache.head_dim % kInputGroup != 0)
    refuse(kOp, "out_dtype", "'float32' or 'bfloat16' of heads of " +
           std::to_string(cache.head_dim), "'int8'");
  args.num_heads = num_heads;
  args.scale = scale;
  check_contexts(kOp, batch, args.cache);
  const AttentionShape shape{num_heads, cache.num_kv_heads, cache.head_dim, cache.block_size};
  AttentionPlanner planner;
  args.plan = &planner.plan(batch, shape, team.num_threads());
  const Output out = make_output(args.out_dtype, batch.num_tokens, num_heads * cache.head_dim);
  args.out = out.data;
  run_op(team, kernels().attention, args);
  return out.array;
}

void bind_batch(nb::module_& m) {
  nb::class_<BatchArrays>(m, "Batch", "What one step computes; arrays are copies, int32.")
      .def("__init__", &init, nb::arg("token_ids"), nb::arg("positions"), nb::arg("slots"),
           nb::arg("query_start"), nb::arg("context_lens"), nb::arg("block_tables"),
           nb::arg("logit_rows"))
      .def_prop_ro("num_tokens", [](const BatchArrays& b) { return b.token_ids.size(); })
      .def_prop_ro("num_rows", [](const BatchArrays& b) { return b.context_lens.size(); })
      .def_prop_ro("num_logit_rows", [](const BatchArrays& b) { return b.logit_rows.size(); })
      .def_prop_ro("token_ids", &get_array<&BatchArrays::token_ids>)
      .def_prop_ro("positions", &get_array<&BatchArrays::positions>)
      .def_prop_ro("slots", &get_array<&BatchArrays::slots>)
      .def_prop_ro("query_start", &get_array<&BatchArrays::query_start>)
      .def_prop_ro("context_lens", &get_array<&BatchArrays::context_lens>)
      .def_prop_ro("block_tables", &get_block_tables)
      .def_prop_ro("logit_rows", &get_array<&BatchArrays::logit_rows>);
}

}  // namespace

// After the ops module exists.
void bind_attention(nb::module_& m) {
  bind_batch(m);
  nb::module_ ops = nb::cast<nb::module_>(m.attr("ops"));
  ops.def("store_kv", &store_kv, nb::arg("team"), nb::arg("qkv"), nb::arg("cache"),
          nb::arg("slots"), nb::arg("layer"), nb::arg("num_heads"));
  ops.def("paged_attention", &paged_attention, nb::arg("team"), nb::arg("qkv"), nb::arg("cache"),
          nb::arg("batch"), nb::arg("layer"), nb::arg("num_heads"), nb::arg("scale"),
          nb::arg("out_dtype"));
}

}  // namespace streamkv
