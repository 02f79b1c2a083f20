// Rows become tiles, tiles become items.
//
// Rows with many queries are cut into tiles of their own. Rows with few (those that decode) are
// sorted by their block tables, so that rows with leading blocks in common are neighbours, and up
// to a tile of them is one tile: its steps walk the tree of what they have in common. Costs are in
// units of what one row of a tile takes for one partition; reading a partition takes kReadCost.
#include "streamkv/attention_planner.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "streamkv/kernels.h"
#include "streamkv/memory.h"

namespace streamkv {
namespace {

constexpr int64_t kReadCost = 4;
constexpr int64_t kPassRows = 6;        // what many rows are computed by
constexpr int64_t kMinTileRows = 12;    // fewer don't hide what reading costs
constexpr int64_t kMinItemCost = 50;    // some microseconds: less isn't worth handing out
constexpr int64_t kMinPartPartitions = 4;
constexpr int64_t kItemsPerThread = 8;  // so that the last one to end isn't waited for long
constexpr int64_t kMaxRecordBytes = 64 << 20;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A row with few queries, as it is sorted.
struct Short {
  AttentionRun run;
  int64_t shareable;  // leading partitions that all its queries see all of
  int64_t common;     // of those, in common with the row before
};

struct Costed {
  AttentionItem item;
  int64_t cost;
};

}  // namespace

struct AttentionPlanner::Impl {
  void make(const Batch& batch, const AttentionShape& shape, int num_threads);

  AttentionPlan plan_{};

 private:
  void choose_sizes();
  void add_long(AttentionRun run);
  void sort_short();
  void add_short();
  void add_shared_steps(int64_t first, int64_t begin, int64_t end, int64_t partition);
  void add_tile(int64_t num_runs);
  int64_t common_partitions(const Short& a, const Short& b) const;
  int64_t slice_cost(const AttentionTile& tile) const;
  void add_items();
  void add_parts(int32_t tile, int64_t num_parts);
  void add_part_items(int32_t tile, const std::vector<int32_t>& cuts);
  void finish();

  const int32_t* table(const AttentionRun& run) const {
    return batch_->block_tables + run.row * batch_->max_blocks;
  }

  const Batch* batch_ = nullptr;
  AttentionShape shape_{};
  int64_t num_threads_ = 1;
  int64_t num_slices_ = 1;
  int64_t heads_per_slice_ = 1;
  int64_t max_queries_ = 1;   // that fit into a tile
  int64_t tile_queries_ = 1;  // that go into one
  int64_t record_floats_ = 0;

  std::vector<AttentionTile> tiles_;
  std::vector<AttentionRun> runs_;
  std::vector<AttentionStep> steps_;
  std::vector<AttentionJoin> joins_;
  std::vector<AttentionItem> items_;
  std::vector<Short> short_;
  std::vector<Costed> costed_;
  std::vector<int64_t> tile_costs_, densities_;
  std::vector<int32_t> cuts_;
  Memory records_;
};

// Enough tiles for the threads, of whole passes if there are enough queries.
void AttentionPlanner::Impl::choose_sizes() {
  const int64_t group = shape_.num_heads / shape_.num_kv_heads;
  const int64_t slices = divide_up(group, kMaxTileRows);
  heads_per_slice_ = divide_up(group, slices);
  num_slices_ = slices * shape_.num_kv_heads;
  plan_.slices_per_kv_head = static_cast<int32_t>(slices);
  plan_.heads_per_slice = static_cast<int32_t>(heads_per_slice_);

  max_queries_ = kMaxTileRows / heads_per_slice_;
  tile_queries_ = max_queries_;
  if (num_threads_ > 1) {
    const int64_t num_tiles = divide_up(kItemsPerThread / 2 * num_threads_, num_slices_);
    const int64_t least = std::min(divide_up(kMinTileRows, heads_per_slice_), max_queries_);
    tile_queries_ = std::clamp(divide_up(batch_->num_tokens, num_tiles), least, max_queries_);
  }
  const int64_t whole = kPassRows / std::gcd(kPassRows, heads_per_slice_);
  if (tile_queries_ >= whole) tile_queries_ -= tile_queries_ % whole;
}

// The last num_runs runs and all steps since the last tile.
void AttentionPlanner::Impl::add_tile(int64_t num_runs) {
  AttentionTile tile{};
  tile.num_runs = static_cast<int32_t>(num_runs);
  tile.first_run = static_cast<int32_t>(runs_.size()) - tile.num_runs;
  if (!tiles_.empty()) tile.first_step = tiles_.back().first_step + tiles_.back().num_steps;
  tile.num_steps = static_cast<int32_t>(steps_.size()) - tile.first_step;
  for (size_t i = tile.first_run; i < runs_.size(); ++i) {
    AttentionRun& run = runs_[i];
    run.first_query = tile.num_queries;
    tile.num_queries += run.num_queries;
    const int64_t length = run.first_position + run.num_queries;
    tile.num_partitions =
        std::max(tile.num_partitions, static_cast<int32_t>(divide_up(length, kPartition)));
  }
  tiles_.push_back(tile);
}

void AttentionPlanner::Impl::add_long(AttentionRun run) {
  const int64_t num_tiles = divide_up(run.num_queries, tile_queries_);
  const int64_t whole = kPassRows / std::gcd(kPassRows, heads_per_slice_);
  int64_t size = divide_up(run.num_queries, num_tiles);
  size = std::min(divide_up(size, whole) * whole, tile_queries_);
  const int32_t end = run.first_token + run.num_queries;
  while (run.first_token < end) {
    run.num_queries = static_cast<int32_t>(std::min<int64_t>(size, end - run.first_token));
    const int64_t length = run.first_position + run.num_queries;
    runs_.push_back(run);
    steps_.push_back({0, 1, 0, static_cast<int32_t>(divide_up(length, kPartition))});
    add_tile(1);
    run.first_token += run.num_queries;
    run.first_position += run.num_queries;
  }
}

int64_t AttentionPlanner::Impl::common_partitions(const Short& a, const Short& b) const {
  const int64_t most = std::min(a.shareable, b.shareable);
  const int64_t num_blocks = divide_up(most * kPartition, shape_.block_size);
  const int32_t* first = table(a.run);
  const int64_t same =
      std::mismatch(first, first + num_blocks, table(b.run)).first - first;
  return std::min(most, same * shape_.block_size / kPartition);
}

// By block tables, then by row: what neighbours have in common, all between them have.
void AttentionPlanner::Impl::sort_short() {
  std::sort(short_.begin(), short_.end(), [&](const Short& a, const Short& b) {
    const int64_t blocks_a = divide_up(a.shareable * kPartition, shape_.block_size);
    const int64_t blocks_b = divide_up(b.shareable * kPartition, shape_.block_size);
    const int64_t least = std::min(blocks_a, blocks_b);
    const int32_t* table_a = table(a.run);
    const int32_t* table_b = table(b.run);
    const auto [x, y] = std::mismatch(table_a, table_a + least, table_b);
    if (x != table_a + least) return *x < *y;
    return blocks_a != blocks_b ? blocks_a < blocks_b : a.run.row < b.run.row;
  });
  for (size_t i = 0; i < short_.size(); ++i)
    short_[i].common = i == 0 ? 0 : common_partitions(short_[i - 1], short_[i]);
}

// Steps of short_[begin, end), which have `partition` partitions in common and read; `first` is the
// tile's first.
void AttentionPlanner::Impl::add_shared_steps(int64_t first, int64_t begin, int64_t end,
                                              int64_t partition) {
  const auto add = [&](int64_t end_partition) {
    if (end_partition > partition)
      steps_.push_back({static_cast<int32_t>(begin - first), static_cast<int32_t>(end - first),
                        static_cast<int32_t>(partition), static_cast<int32_t>(end_partition)});
  };
  if (end - begin == 1) {
    const AttentionRun& run = short_[begin].run;
    add(divide_up(run.first_position + run.num_queries, kPartition));
    return;
  }
  int64_t common = short_[begin + 1].common;
  for (int64_t i = begin + 2; i < end; ++i) common = std::min(common, short_[i].common);
  add(common);
  for (int64_t child = begin; child < end;) {
    int64_t next = child + 1;
    while (next < end && short_[next].common > common) ++next;
    add_shared_steps(first, child, next, common);
    child = next;
  }
}

void AttentionPlanner::Impl::add_short() {
  sort_short();
  const int64_t count = static_cast<int64_t>(short_.size());
  for (int64_t begin = 0; begin < count;) {
    int64_t end = begin, queries = 0;
    do {
      runs_.push_back(short_[end].run);
      queries += short_[end++].run.num_queries;
    } while (end < count && short_[end].common > 0 &&
             queries + short_[end].run.num_queries <= tile_queries_);
    add_shared_steps(begin, begin, end, 0);
    add_tile(end - begin);
    begin = end;
  }
}

// What one slice of a tile costs.
int64_t AttentionPlanner::Impl::slice_cost(const AttentionTile& tile) const {
  int64_t cost = 0;
  for (int64_t i = tile.first_step; i < tile.first_step + tile.num_steps; ++i) {
    const AttentionStep& step = steps_[i];
    const AttentionRun& first = runs_[tile.first_run + step.first_run];
    const AttentionRun& last = runs_[tile.first_run + step.end_run - 1];
    const int64_t rows =
        (last.first_query + last.num_queries - first.first_query) * heads_per_slice_;
    const int64_t partitions = step.end_partition - step.first_partition;
    const int64_t whole =
        std::min<int64_t>(partitions, first.first_position / kPartition - step.first_partition);
    cost += whole * (kReadCost + rows) + (partitions - whole) * (kReadCost + rows / 2);
  }
  return cost;
}

void AttentionPlanner::Impl::add_items() {
  int64_t total = 0;
  tile_costs_.clear();
  for (const AttentionTile& tile : tiles_) {
    tile_costs_.push_back(slice_cost(tile));
    total += tile_costs_.back() * num_slices_;
  }
  const int64_t target = num_threads_ == 1
                             ? total + 1
                             : std::max(total / (kItemsPerThread * num_threads_), kMinItemCost);
  for (size_t i = 0; i < tiles_.size(); ++i) {
    const auto tile = static_cast<int32_t>(i);
    const int64_t cost = tile_costs_[i], partitions = tiles_[i].num_partitions;
    const int64_t num_parts =
        std::min(divide_up(2 * cost, 3 * target), partitions / kMinPartPartitions);
    if (num_parts > 1) {
      add_parts(tile, num_parts);
      continue;
    }
    const int64_t slices = std::clamp<int64_t>(target / std::max<int64_t>(cost, 1), 1, num_slices_);
    for (int64_t slice = 0; slice < num_slices_; slice += slices) {
      const int64_t end = std::min(slice + slices, num_slices_);
      costed_.push_back({{tile, static_cast<int32_t>(slice), static_cast<int32_t>(end), 0,
                          tiles_[i].num_partitions, -1},
                         (end - slice) * cost});
    }
  }
}

// Cuts a tile's context into parts that cost about the same.
void AttentionPlanner::Impl::add_parts(int32_t index, int64_t num_parts) {
  const AttentionTile& tile = tiles_[index];
  densities_.assign(tile.num_partitions, 0);
  for (int64_t i = tile.first_step; i < tile.first_step + tile.num_steps; ++i) {
    const AttentionStep& step = steps_[i];
    const AttentionRun& first = runs_[tile.first_run + step.first_run];
    const AttentionRun& last = runs_[tile.first_run + step.end_run - 1];
    const int64_t queries = last.first_query + last.num_queries - first.first_query;
    for (int64_t p = step.first_partition; p < step.end_partition; ++p)
      densities_[p] += kReadCost + queries * heads_per_slice_;
  }
  const int64_t cost = std::accumulate(densities_.begin(), densities_.end(), int64_t{0});
  cuts_.assign(1, 0);
  int64_t passed = 0;
  for (int32_t p = 0; p + 1 < tile.num_partitions; ++p) {
    passed += densities_[p];
    if (passed * num_parts >= cost * static_cast<int64_t>(cuts_.size())) cuts_.push_back(p + 1);
  }
  cuts_.push_back(tile.num_partitions);
  add_part_items(index, cuts_);
}

void AttentionPlanner::Impl::add_part_items(int32_t index, const std::vector<int32_t>& cuts) {
  const AttentionTile& tile = tiles_[index];
  const auto num_parts = static_cast<int32_t>(cuts.size()) - 1;
  for (int32_t slice = 0; slice < num_slices_; ++slice) {
    const int64_t floats = int64_t{tile.num_partitions} * tile.num_queries * heads_per_slice_ *
                           (shape_.head_dim + kRecordPadding);
    const bool fits = (record_floats_ + floats) * static_cast<int64_t>(sizeof(float)) <=
                      kMaxRecordBytes;
    if (!fits || num_parts == 1) {
      costed_.push_back({{index, slice, slice + 1, 0, tile.num_partitions, -1}, tile_costs_[index]});
      continue;
    }
    const auto join = static_cast<int32_t>(joins_.size());
    joins_.push_back({record_floats_, num_parts, num_parts, cuts[1]});
    record_floats_ += floats;
    for (int32_t part = 0; part < num_parts; ++part)
      costed_.push_back({{index, slice, slice + 1, cuts[part], cuts[part + 1], join},
                         tile_costs_[index] / num_parts});
  }
}

// The longest first, so that what ends last is short.
void AttentionPlanner::Impl::finish() {
  std::stable_sort(costed_.begin(), costed_.end(),
                   [](const Costed& a, const Costed& b) { return a.cost > b.cost; });
  for (const Costed& costed : costed_) items_.push_back(costed.item);
  const int64_t bytes = record_floats_ * static_cast<int64_t>(sizeof(float));
  if (bytes > records_.num_bytes()) records_ = Memory(2 * bytes);
  plan_.num_items = static_cast<int64_t>(items_.size());
  plan_.items = items_.data();
  plan_.tiles = tiles_.data();
  plan_.runs = runs_.data();
  plan_.steps = steps_.data();
  plan_.joins = joins_.data();
  plan_.records = static_cast<float*>(records_.data());
}

void AttentionPlanner::Impl::make(const Batch& batch, const AttentionShape& shape,
                                  int num_threads) {
  batch_ = &batch;
  shape_ = shape;
  num_threads_ = num_threads;
  record_floats_ = 0;
  tiles_.clear();
  runs_.clear();
  steps_.clear();
  joins_.clear();
  items_.clear();
  short_.clear();
  costed_.clear();
  choose_sizes();
  for (int32_t row = 0; row < batch.num_rows; ++row) {
    const int32_t first = batch.query_start[row];
    const int32_t queries = batch.query_start[row + 1] - first;
    if (queries == 0) continue;
    const int32_t position = batch.context_lens[row] - queries;
    const AttentionRun run = {row, first, queries, position, 0};
    if (2 * queries > std::max<int64_t>(max_queries_, 2) || queries > tile_queries_)
      add_long(run);
    else
      short_.push_back({run, (position + 1) / kPartition, 0});
  }
  add_short();
  add_items();
  finish();
}

AttentionPlanner::AttentionPlanner() : impl_(std::make_unique<Impl>()) {}
AttentionPlanner::~AttentionPlanner() = default;

const AttentionPlan& AttentionPlanner::plan(const Batch& batch, const AttentionShape& shape,
                                            int num_threads) {
  impl_->make(batch, shape, num_threads);
  return impl_->plan_;
}

}  // namespace streamkv
