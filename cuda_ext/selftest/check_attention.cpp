// store_kv and paged attention against softmax sums in double precision over the tokens themselves,
// and the bits of a query in any company.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "packed.h"
#include "streamkv/attention_planner.h"
#include "streamkv/batch_arrays.h"
#include "streamkv/kv_cache.h"

namespace streamkv::selftest {

namespace {

// Heads as whole numbers to 127, with a scale each.
std::vector<float> rounded_to_int8(std::vector<float> x, int64_t head_dim) {
  for (auto head = x.begin(); head != x.end(); head += head_dim) {
    float highest = 0.0f;
    for (int64_t i = 0; i < head_dim; ++i) highest = std::max(highest, fabsf(head[i]));
    const float inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
    for (int64_t i = 0; i < head_dim; ++i)
      head[i] = nearbyintf(head[i] * inverse) * (highest / 127.0f);
  }
  return x;
}

// Of what out_dtype is made of.
int64_t out_bytes(Dtype out_dtype, int64_t n) {
  if (out_dtype != Dtype::kInt8) return n * element_bytes(out_dtype);
  return n / kInputGroup * static_cast<int64_t>(sizeof(InputGroup));
}

std::vector<float> read_out(const void* data, Dtype out_dtype, int64_t n) {
  if (out_dtype != Dtype::kInt8) return read_numbers(data, out_dtype, n);
  const auto* groups = static_cast<const InputGroup*>(data);
  std::vector<float> numbers(n);
  for (int64_t i = 0; i < n; ++i) {
    const InputGroup& group = groups[i / kInputGroup];
    numbers[i] = static_cast<float>(group.values[i % kInputGroup]) * group.scale;
  }
  return numbers;
}

constexpr int64_t kLayers = 2, kLayer = 1;

// Tokens [0, num_tokens) of a sequence; the first num_shared are those of the sequence before.
struct Sequence {
  int64_t num_tokens, num_shared;
  std::vector<float> qkv;  // [num_tokens, width]
  std::vector<int32_t> blocks;
};

// Queries [first, first + count) of a sequence.
struct Part {
  int64_t sequence, first, count;
};

class Scene {
 public:
  Scene(Random& random, const AttentionShape& shape, Dtype dtype,
        const std::vector<std::pair<int64_t, int64_t>>& lengths);

  // Fills the cache, a few tokens of each sequence at a time, each slot once: threads may share
  // out the tokens of a batch.
  void store(Order order);
  // [queries, num_heads * head_dim] of out_dtype.
  void attend(const std::vector<Part>& parts, int num_threads, Order order, Dtype out_dtype,
              Guarded& out);
  void expect(const Part& part, std::vector<double>& values) const;
  // Moves a sequence to blocks that nobody uses.
  void move(int64_t sequence);

  int64_t num_tokens(int64_t sequence) const { return sequences_[sequence].num_tokens; }
  int64_t out_width() const { return shape_.num_heads * shape_.head_dim; }
  std::string name() const;

 private:
  int64_t width() const {
    return (shape_.num_heads + 2 * shape_.num_kv_heads) * shape_.head_dim;
  }
  // Tokens in blocks that the sequence before has too.
  int64_t num_stored_before(const Sequence& sequence) const {
    return sequence.num_shared / shape_.block_size * shape_.block_size;
  }
  int32_t slot(const Sequence& sequence, int64_t position) const {
    const int64_t block = sequence.blocks[position / shape_.block_size];
    return static_cast<int32_t>(block * shape_.block_size + position % shape_.block_size);
  }
  BatchArrays batch_of(const std::vector<Part>& parts) const;
  std::vector<float> qkv_of(const std::vector<Part>& parts) const;

  AttentionShape shape_;
  Dtype dtype_;
  std::vector<Sequence> sequences_;
  std::vector<int32_t> free_blocks_;
  KvCache cache_;
  AttentionPlanner planner_;  // one for all steps, as in a program: its memory holds what was before
  float scale_;
};

Scene::Scene(Random& random, const AttentionShape& shape, Dtype dtype,
             const std::vector<std::pair<int64_t, int64_t>>& lengths)
    : shape_(shape), dtype_(dtype), scale_(3.0f / sqrtf(static_cast<float>(shape.head_dim))) {
  int64_t num_blocks = 0;
  const auto blocks_of = [&](int64_t n) { return (n + shape.block_size - 1) / shape.block_size; };
  for (const auto& [num_tokens, num_shared] : lengths) num_blocks += 2 * blocks_of(num_tokens);
  for (int64_t i = 0; i < num_blocks; ++i) free_blocks_.push_back(static_cast<int32_t>(i));
  for (size_t i = free_blocks_.size(); i > 1; --i)
    std::swap(free_blocks_[i - 1], free_blocks_[random.below(static_cast<int64_t>(i))]);
  for (const auto& [num_tokens, num_shared] : lengths) {
    Sequence sequence{num_tokens, num_shared, random.uniforms(num_tokens * width()), {}};
    for (int64_t i = 0; i < blocks_of(num_tokens); ++i) {
      if ((i + 1) * shape.block_size <= num_shared) {
        sequence.blocks.push_back(sequences_.back().blocks[i]);
        continue;
      }
      sequence.blocks.push_back(free_blocks_.back());
      free_blocks_.pop_back();
    }
    const int64_t same = num_stored_before(sequence) * width();
    if (same > 0)
      std::copy_n(sequences_.back().qkv.begin(), same, sequence.qkv.begin());
    sequences_.push_back(std::move(sequence));
  }
  cache_ = KvCache::allocate(dtype, num_blocks, kLayers, shape.num_kv_heads, shape.block_size,
                             shape.head_dim);
}

std::string Scene::name() const {
  return (dtype_ == Dtype::kInt8 ? "int8" : name_of(dtype_)) + " attention, " + std::to_string(shape_.num_heads) + "/" +
         std::to_string(shape_.num_kv_heads) + " heads of " + std::to_string(shape_.head_dim) +
         ", blocks of " + std::to_string(shape_.block_size);
}

BatchArrays Scene::batch_of(const std::vector<Part>& parts) const {
  BatchArrays batch;
  batch.query_start.push_back(0);
  for (const Part& part : parts)
    batch.max_blocks = std::max(
        batch.max_blocks, (part.first + part.count + shape_.block_size - 1) / shape_.block_size);
  for (const Part& part : parts) {
    const Sequence& sequence = sequences_[part.sequence];
    const int64_t end = part.first + part.count;
    for (int64_t position = part.first; position < end; ++position) {
      batch.token_ids.push_back(0);
      batch.positions.push_back(static_cast<int32_t>(position));
      batch.slots.push_back(slot(sequence, position));
    }
    batch.query_start.push_back(static_cast<int32_t>(batch.positions.size()));
    batch.context_lens.push_back(static_cast<int32_t>(end));
    const int64_t used = (end + shape_.block_size - 1) / shape_.block_size;
    for (int64_t i = 0; i < batch.max_blocks; ++i)
      batch.block_tables.push_back(i < used ? sequence.blocks[i] : 0);
  }
  return batch;
}

std::vector<float> Scene::qkv_of(const std::vector<Part>& parts) const {
  std::vector<float> qkv;
  for (const Part& part : parts) {
    const auto begin = sequences_[part.sequence].qkv.begin() + part.first * width();
    qkv.insert(qkv.end(), begin, begin + part.count * width());
  }
  return qkv;
}

void Scene::store(Order order) {
  // Not a number where nothing was stored: a request that broke may have left that.
  memset(cache_.memory.data(), 0xff, cache_.memory.num_bytes());
  constexpr int64_t kChunk = 37;
  for (int64_t first = 0;; first += kChunk) {
    std::vector<Part> parts;
    for (size_t i = 0; i < sequences_.size(); ++i) {
      const int64_t begin = std::max(first, num_stored_before(sequences_[i]));
      const int64_t end = std::min(first + kChunk, sequences_[i].num_tokens);
      if (begin < end) parts.push_back({static_cast<int64_t>(i), begin, end - begin});
    }
    if (parts.empty()) return;
    const BatchArrays batch = batch_of(parts);
    const std::vector<float> qkv = qkv_of(parts);
    run_kernel(kernels().store_kv,
               {qkv.data(), batch.slots.data(), cache_.layer(kLayer),
                static_cast<int64_t>(batch.slots.size()), shape_.num_heads},
               order);
  }
}

void Scene::attend(const std::vector<Part>& parts, int num_threads, Order order, Dtype out_dtype,
                   Guarded& out) {
  const BatchArrays arrays = batch_of(parts);
  const std::vector<float> qkv = qkv_of(parts);
  const Batch batch = arrays.view();
  const AttentionPlan& plan = planner_.plan(batch, shape_, num_threads);
  const AttentionArgs args{qkv.data(),       cache_.layer(kLayer), &batch, &plan, out.as<void>(),
                           out_dtype, shape_.num_heads, scale_};
  run_kernel(kernels().attention, args, order);
}

void Scene::expect(const Part& part, std::vector<double>& values) const {
  const Sequence& sequence = sequences_[part.sequence];
  const int64_t head_dim = shape_.head_dim, group = shape_.num_heads / shape_.num_kv_heads;
  const bool is_whole = dtype_ == Dtype::kInt8;
  const std::vector<float> kv = is_whole ? rounded_to_int8(sequence.qkv, head_dim)
                                : dtype_ == Dtype::kBFloat16 ? rounded_to_bf16(sequence.qkv)
                                                             : sequence.qkv;
  const std::vector<float>& queries = is_whole ? kv : sequence.qkv;
  for (int64_t query = part.first; query < part.first + part.count; ++query)
    for (int64_t head = 0; head < shape_.num_heads; ++head) {
      const float* q = queries.data() + query * width() + head * head_dim;
      const int64_t key = (shape_.num_heads + head / group) * head_dim;
      std::vector<double> attended(head_dim, 0.0);
      double total = 0.0;
      for (int64_t position = 0; position <= query; ++position) {
        const float* k = kv.data() + position * width() + key;
        const float* v = k + shape_.num_kv_heads * head_dim;
        double score = 0.0;
        for (int64_t i = 0; i < head_dim; ++i) score += static_cast<double>(q[i]) * k[i];
        const double weight = exp(score * scale_);
        total += weight;
        for (int64_t i = 0; i < head_dim; ++i) attended[i] += weight * v[i];
      }
      for (const double value : attended) values.push_back(value / total);
    }
}

void Scene::move(int64_t index) {
  for (int32_t& block : sequences_[index].blocks) {
    memcpy(cache_.block(free_blocks_.back()), cache_.block(block), cache_.block_bytes());
    block = free_blocks_.back();
    free_blocks_.pop_back();
  }
}

// All sequences' last queries, many and few.
std::vector<Part> last_queries(const Scene& scene, const std::vector<int64_t>& counts) {
  std::vector<Part> parts;
  for (size_t i = 0; i < counts.size(); ++i) {
    const int64_t index = static_cast<int64_t>(i), end = scene.num_tokens(index);
    const int64_t count = std::min(counts[i], end);
    parts.push_back({index, end - count, count});
  }
  return parts;
}

// Each part alone, with few and many threads, and cut in two: the same bits as all at once.
void check_company(Report& report, Scene& scene, const std::vector<Part>& parts, Dtype out_dtype,
                   Guarded& all) {
  const int64_t row_bytes = out_bytes(out_dtype, scene.out_width());
  int64_t first = 0;
  const auto check = [&](const Part& part, int64_t offset, int num_threads, const char* how) {
    Guarded out(part.count * row_bytes);
    scene.attend({part}, num_threads, Order::kBackward, out_dtype, out);
    report.expect(out.is_intact() &&
                      memcmp(out.as<char>(), all.as<char>() + (first + offset) * row_bytes,
                             out.num_bytes()) == 0,
                  scene.name() + ": sequence " + std::to_string(part.sequence) + how);
  };
  for (const Part& part : parts) {
    check(part, 0, 1, " alone");
    check(part, 0, 7, " alone for 7 threads");
    const int64_t cut = part.count / 3;
    if (cut > 0) {
      check({part.sequence, part.first, cut}, 0, 2, ": its first third");
      check({part.sequence, part.first + cut, part.count - cut}, cut, 2, ": the rest");
    }
    first += part.count;
  }
}

// Sequences by how many tokens they have and share with the one before, and how many are queries.
struct Workload {
  std::vector<std::pair<int64_t, int64_t>> lengths;
  std::vector<int64_t> num_queries;
};

const Workload kMixed = {
    {{70, 0}, {300, 0}, {300, 290}, {310, 290}, {1, 0}, {129, 0}, {64, 0}, {65, 64}},
    {70, 90, 1, 2, 1, 40, 64, 1}};
// Contexts of few queries, which threads share out.
const Workload kLong = {{{1100, 0}, {700, 0}}, {40, 1}};

void check_scene(Report& report, Random& random, const AttentionShape& shape, Dtype dtype,
                 Dtype out_dtype, const Workload& workload = kMixed) {
  Scene scene(random, shape, dtype, workload.lengths);
  const std::vector<Part> parts = last_queries(scene, workload.num_queries);
  int64_t num_queries = 0;
  std::vector<double> expected, tolerance;
  for (const Part& part : parts) {
    scene.expect(part, expected);
    num_queries += part.count;
  }
  // Values are in [-1, 1): so is a group's greatest, by which its other numbers are rounded.
  for (const double value : expected)
    tolerance.push_back(2e-5 + (out_dtype == Dtype::kInt8
                                    ? 0.5 / 127
                                    : fabs(value) * relative_error(out_dtype)));
  const int64_t size = num_queries * scene.out_width();
  Guarded all(out_bytes(out_dtype, size));
  scene.store(Order::kForward);
  scene.attend(parts, 1, Order::kForward, out_dtype, all);
  report.expect(all.is_intact(), scene.name() + ": writes inside");
  const auto got = read_out(all.as<void>(), out_dtype, size);
  report.expect_near(got.data(), expected, tolerance, scene.name());

  for (const Order order : kOrders)
    for (const int num_threads : {1, 2, 3, 16}) {
      Guarded again(all.num_bytes());
      scene.store(order);
      scene.attend(parts, num_threads, order, out_dtype, again);
      report.expect(again.is_intact() && again == all,
                    scene.name() + ": the same bits for " + std::to_string(num_threads) +
                        " threads");
    }
  check_company(report, scene, parts, out_dtype, all);
  scene.move(1);
  check_company(report, scene, parts, out_dtype, all);
}

}  // namespace

void check_attention(Report& report) {
  Random random(4);
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kInt8}) {
    check_scene(report, random, {9, 3, 64, 16}, dtype, Dtype::kFloat32);
    check_scene(report, random, {4, 4, 16, 1}, dtype, Dtype::kFloat32);
    check_scene(report, random, {6, 1, 48, 5}, dtype, Dtype::kFloat32);
    check_scene(report, random, {8, 2, 80, 32}, dtype, Dtype::kFloat32);
    check_scene(report, random, {2, 1, 256, 24}, dtype, Dtype::kFloat32);
    check_scene(report, random, {3, 1, 128, 80}, dtype, Dtype::kBFloat16);
    check_scene(report, random, {9, 3, 64, 16}, dtype, Dtype::kFloat32, kLong);
    check_scene(report, random, {2, 2, 32, 10}, dtype, Dtype::kBFloat16, kLong);
    check_scene(report, random, {4, 2, 96, 16}, dtype, Dtype::kInt8);
  }
  check_scene(report, random, {100, 1, 16, 16}, Dtype::kFloat32, Dtype::kFloat32);
}

}  // namespace streamkv::selftest
