// Paged attention: walks an item of the plan, partition by partition.
//
// Included by attention.cpp alone. attention_tile.h computes one partition for some rows; while it
// does, the next one is fetched, be it the next head's. All queries of a tile read a partition
// once; many rows first widen it to float32 (of int8 the values alone).
#pragma once

#include "attention_context.h"

namespace {

inline Rows rows_at(const Job& job, int64_t row, float* record) {
  const Tile& t = job.t;
  const int64_t head_dim = job.args.cache.head_dim;
  if (record != nullptr) record += row * (head_dim + kRecordPadding);
  const Queries queries = {t.queries + row * head_dim, t.query_bytes + row * head_dim,
                           t.query_scales + row, t.query_starts + row, head_dim};
  return {queries,         t.positions + row, t.attended + row * head_dim,
          t.highest + row, t.total + row,     record,
          head_dim};
}

// Rows [begin, end) of the tile, in passes of at most `most`. The first ones fetch what is next, a
// share each.
template <class K, class V>
void run_passes(const Job& job, int64_t begin, int64_t end, int64_t most, int64_t start,
                float* record, const Context<K, V>& context, Ahead ahead) {
  const int64_t num_passes = divide_up(end - begin, most);
  const int64_t size = divide_up(end - begin, num_passes);
  const int32_t wanted = ahead.columns;
  const int64_t shares = smaller(num_passes, kNumColumns);
  for (int64_t row = begin, i = 0; row < end; row += size, ++i) {
    ahead.columns = 0;
    if (i < shares)
      for (int64_t c = i * kNumColumns / shares; c < (i + 1) * kNumColumns / shares; ++c)
        ahead.columns |= wanted & 1 << c;
    run_pass(smaller(size, end - row), rows_at(job, row, record), start, context, ahead);
  }
}

inline void run_partition(const Job& job, int64_t begin, int64_t end, int64_t start, float* record,
                          const Context<float, float>& context, const Ahead& ahead) {
  const int64_t most = end - begin <= kMaxPassRows ? kMaxPassRows : 6;
  run_passes(job, begin, end, most, start, record, context, ahead);
}

template <class E>
void run_partition(const Job& job, int64_t begin, int64_t end, int64_t start, float* record,
                   const Context<E, E>& context, const Ahead& ahead) {
  if (end - begin <= 2 * kMaxPassRows)
    return run_passes(job, begin, end, kMaxPassRows, start, record, context, ahead);
  const int64_t count = smaller(job.t.positions[end - 1] + 1 - start, kPartition);
  run_passes(job, begin, end, 6, start, record, widen_partition(job, context, count), ahead);
}

// A query and head, as row `row`.
template <class K>
inline void load_query(const Job& job, const float* from, int64_t row) {
  const int64_t head_dim = job.args.cache.head_dim;
  if constexpr (kHasScales<K>) {
    int8_t* to = job.t.query_bytes + row * head_dim;
    job.t.query_scales[row] = convert_head(from, head_dim, to) * job.args.scale;
    vint sum = {};
    for (int64_t dim = 0; dim < head_dim; dim += kWidth) sum += load(to + dim);
    job.t.query_starts[row] = KeyDot::kTakesOffset ? 0 : -kByteOffset * reduce_sum(sum);
  } else {
    const vfloat scale = broadcast(job.args.scale);
    float* to = job.t.queries + row * head_dim;
    for (int64_t k = 0; k < head_dim; k += kWidth) store(to + k, load(from + k) * scale);
  }
}

template <class K>
inline void load_queries(const Job& job, const Slice& slice) {
  const AttentionArgs& args = job.args;
  const int64_t head_dim = args.cache.head_dim;
  const int64_t width = (args.num_heads + 2 * args.cache.num_kv_heads) * head_dim;
  int64_t row = 0;
  for (int64_t i = 0; i < job.tile.num_runs; ++i) {
    const AttentionRun& run = job.runs[i];
    for (int64_t query = 0; query < run.num_queries; ++query) {
      const float* from =
          args.qkv + (run.first_token + query) * width + slice.first_head * head_dim;
      for (int64_t head = 0; head < slice.num_heads; ++head, ++row, from += head_dim) {
        load_query<K>(job, from, row);
        job.t.positions[row] = run.first_position + (int32_t)query;
      }
    }
  }
}

template <class K>
inline void begin_tile(const Job& job, const Slice& slice) {
  const int64_t rows = job.tile.num_queries * slice.num_heads;
  load_queries<K>(job, slice);
  memset(job.t.attended, 0, rows * job.args.cache.head_dim * sizeof(float));
  for (int64_t i = 0; i < rows + kLanes; ++i) {
    job.t.highest[i] = kNoScore;
    job.t.total[i] = 0.0f;
  }
}

// Lanes of the two in turn, from the lower and from the upper half.
inline vfloat zip_low(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

inline vfloat zip_high(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// Results of a row in the order of dims: of bfloat16 values they are even ones, then odd ones.
inline void write_row(const float* attended, vfloat total, int64_t head_dim, bool is_split,
                      float* out) {
  int64_t dim = 0;
  for (; is_split && dim + 2 * kWidth <= head_dim; dim += 2 * kWidth) {
    const vfloat even = load(attended + dim) / total;
    const vfloat odd = load(attended + dim + kWidth) / total;
    store(out + dim, zip_low(even, odd));
    store(out + dim + kWidth, zip_high(even, odd));
  }
  for (; dim < head_dim; dim += kWidth) store(out + dim, load(attended + dim) / total);
}

inline void write_row(const float* attended, vfloat total, int64_t head_dim, bool is_split,
                      bf16* out) {
  int64_t dim = 0;
  for (; is_split && dim + 2 * kWidth <= head_dim; dim += 2 * kWidth) {
    const vfloat even = load(attended + dim) / total;
    store_words(out + dim, to_words(even, load(attended + dim + kWidth) / total));
  }
  for (; dim < head_dim; dim += kWidth) store(out + dim, load(attended + dim) / total);
}

// head_dim is a multiple of a group's.
inline void write_row(const float* attended, vfloat total, int64_t head_dim, bool is_split,
                      InputGroup* out) {
  alignas(64) float row[streamkv::kMaxHeadDim];
  write_row(attended, total, head_dim, is_split, row);
  for (int64_t dim = 0; dim < head_dim; dim += kInputGroup) quantize_group(row + dim, out++);
}

// Dims in an element of the output.
template <class Out>
constexpr int64_t kPerOutput = 1;
template <>
constexpr int64_t kPerOutput<InputGroup> = kInputGroup;

template <class Out>
void write_tile(const Job& job, const Slice& slice) {
  const AttentionArgs& args = job.args;
  const int64_t head_dim = args.cache.head_dim;
  const int64_t out_width = head_dim / kPerOutput<Out>;
  const bool is_split = args.cache.dtype == streamkv::Dtype::kBFloat16;
  int64_t row = 0;
  for (int64_t i = 0; i < job.tile.num_runs; ++i) {
    const AttentionRun& run = job.runs[i];
    for (int64_t query = 0; query < run.num_queries; ++query) {
      Out* out = (Out*)args.out +
                 ((run.first_token + query) * args.num_heads + slice.first_head) * out_width;
      for (int64_t head = 0; head < slice.num_heads; ++head, ++row, out += out_width)
        write_row(job.t.attended + row * head_dim, broadcast(job.t.total[row]), head_dim, is_split,
                  out);
    }
  }
}

inline void end_tile(const Job& job, const Slice& slice) {
  switch (job.args.out_dtype) {
    case streamkv::Dtype::kInt8: return write_tile<InputGroup>(job, slice);
    case streamkv::Dtype::kBFloat16: return write_tile<bf16>(job, slice);
    default: return write_tile<float>(job, slice);
  }
}

// Of the tile's `rows` rows.
inline float* record_of(const Job& job, int64_t rows, int64_t partition) {
  return job.plan.records + job.plan.joins[job.item.join].first_float +
         partition * rows * (job.args.cache.head_dim + kRecordPadding);
}

// The state that the first part has reached, into records or out of them.
inline void save_state(const Job& job, int64_t rows, float* record) {
  const int64_t head_dim = job.args.cache.head_dim;
  for (int64_t row = 0; row < rows; ++row, record += head_dim + kRecordPadding) {
    memcpy(record, job.t.attended + row * head_dim, head_dim * sizeof(float));
    record[head_dim] = job.t.highest[row];
    record[head_dim + 1] = job.t.total[row];
  }
}

inline void restore_state(const Job& job, int64_t rows, const float* record) {
  const int64_t head_dim = job.args.cache.head_dim;
  for (int64_t row = 0; row < rows; ++row, record += head_dim + kRecordPadding) {
    memcpy(job.t.attended + row * head_dim, record, head_dim * sizeof(float));
    job.t.highest[row] = record[head_dim];
    job.t.total[row] = record[head_dim + 1];
  }
}

// Merges one partition's records into rows [row, row + num_rows), those that see it.
inline void merge_records(const Job& job, int64_t row, int64_t num_rows, int64_t partition,
                          const float* record) {
  const int64_t head_dim = job.args.cache.head_dim, stride = head_dim + kRecordPadding;
  Partials here;
  Factors factors;
  clear(here);
  for (int64_t r = 0; r < num_rows; ++r) {
    if (job.t.positions[row + r] / kPartition < partition) continue;
    here.highest[r] = record[r * stride + head_dim];
    here.total[r] = record[r * stride + head_dim + 1];
  }
  merge(here, (int)num_rows, job.t.highest + row, job.t.total + row, factors);
  for (int64_t r = 0; r < num_rows; ++r) {
    if (job.t.positions[row + r] / kPartition < partition) continue;
    const vfloat keep = broadcast(factors.keep[r]), add = broadcast(factors.add[r]);
    for (int64_t dim = 0; dim < head_dim; dim += kWidth)
      merge_values(job.t.attended + (row + r) * head_dim + dim, load(record + r * stride + dim),
                   keep, add);
  }
}

// Ends a part: the last one to end joins all of them, the first part's state and then partition by
// partition. Every part has released its records before, and the last acquires them.
inline void end_part(const Job& job, const Slice& slice) {
  AttentionJoin& join = job.plan.joins[job.item.join];
  const int64_t rows = job.tile.num_queries * slice.num_heads;
  if (job.item.first_partition == 0) save_state(job, rows, record_of(job, rows, 0));
  if (__atomic_sub_fetch(&join.num_pending, 1, __ATOMIC_ACQ_REL) != 0) return;
  join.num_pending = join.num_parts;  // for the next layer, which begins after this one has ended
  restore_state(job, rows, record_of(job, rows, 0));
  const int64_t stride = job.args.cache.head_dim + kRecordPadding;
  for (int64_t partition = join.end_of_first; partition < job.tile.num_partitions; ++partition)
    for (int64_t row = 0; row < rows; row += kLanes)
      merge_records(job, row, smaller(rows - row, kLanes), partition,
                    record_of(job, rows, partition) + row * stride);
  end_tile(job, slice);
}

template <class E>
void run_at(const Job& job, const Cursor& at, const Context<E, E>& context, const Ahead& ahead) {
  const int64_t num_heads = slice_of(job.args, at.slice).num_heads;
  const AttentionStep& step = job.steps[at.step];
  const AttentionRun& first = job.runs[step.first_run];
  const AttentionRun& last = job.runs[step.end_run - 1];
  const int64_t start = at.partition * kPartition;
  // Queries before this partition see none of it.
  const int64_t unseen = start > first.first_position ? start - first.first_position : 0;
  const int64_t begin = (first.first_query + unseen) * num_heads;
  const int64_t end = (last.first_query + last.num_queries) * num_heads;
  float* record = nullptr;
  if (job.item.first_partition > 0)
    record = record_of(job, job.tile.num_queries * num_heads, at.partition);
  run_partition(job, begin, end, start, record, context, ahead);
}

template <class E>
void run_item(const Job& job) {
  const bool is_aligned = job.args.cache.block_size % kColumn == 0;
  const int64_t head_dim = job.args.cache.head_dim;
  Cursor at = {job.item.first_slice, 0, begin_of(job, 0)};
  settle(job, at);
  Context<E, E> context = is_aligned ? locate_columns<E>(job, at) : gather<E>(job, at);
  if (is_aligned) fetch(ahead_of(context, head_dim), 0);
  begin_tile<E>(job, slice_of(job.args, at.slice));
  for (bool is_last = false; !is_last;) {
    Cursor next = at;
    ++next.partition;
    is_last = !settle(job, next);
    const bool is_known = !is_last && is_aligned;
    const Context<E, E> next_context = is_known ? locate_columns<E>(job, next) : context;
    Ahead ahead = ahead_of(next_context, head_dim);
    if (!is_known) ahead.columns = 0;
    run_at(job, at, context, ahead);
    if (next.slice != at.slice) {
      const Slice slice = slice_of(job.args, at.slice);
      job.item.join < 0 ? end_tile(job, slice) : end_part(job, slice);
      if (!is_last) begin_tile<E>(job, slice_of(job.args, next.slice));
    }
    at = next;
    if (!is_last) context = is_aligned ? next_context : gather<E>(job, at);
  }
}

int64_t attention_num_items(const AttentionArgs& args, int) { return args.plan->num_items; }

void attention_run(const AttentionArgs& args, int64_t index, void* scratch) {
  const AttentionPlan& plan = *args.plan;
  const AttentionItem& item = plan.items[index];
  const AttentionTile& tile = plan.tiles[item.tile];
  const Job job = {args,
                   plan,
                   item,
                   tile,
                   plan.runs + tile.first_run,
                   plan.steps + tile.first_step,
                   carve(scratch, args.cache.head_dim)};
  switch (args.cache.dtype) {
    case streamkv::Dtype::kInt8: return run_item<int8_t>(job);
    case streamkv::Dtype::kBFloat16: return run_item<bf16>(job);
    default: return run_item<float>(job);
  }
}

}  // namespace
