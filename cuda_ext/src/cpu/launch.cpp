#include "streamkv/launch.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "streamkv/thread_pool.h"

namespace streamkv {
namespace {

// Below these, waking a thread costs more than it saves.
constexpr int64_t kParallelBytes = 512 * 1024;
constexpr int64_t kParallelMultiplyAdds = 1024 * 1024;

constexpr int64_t kItemBytes = 32 * 1024;  // rows handed out together
constexpr int64_t kPreferredTileRows = 48;  // whole register tiles of each instruction set

[[noreturn]] void fail(const char* op, const std::string& argument, const std::string& expected,
                       int64_t got) {
  throw std::invalid_argument(std::string(op) + ": " + argument + " expected " + expected +
                              ", got " + std::to_string(got));
}

std::string element(const char* argument, int64_t index) {
  return std::string(argument) + "[" + std::to_string(index) + "]";
}

// Each index must be in [0, limit).
void check_indices(const char* op, const char* argument, const int32_t* indices, int64_t count,
                   int64_t limit) {
  for (int64_t i = 0; i < count; ++i)
    if (indices[i] < 0 || indices[i] >= limit)
      fail(op, element(argument, i), "at least 0 and less than " + std::to_string(limit),
           indices[i]);
}

// rows(begin, end) over [0, num_rows) in pieces of about kItemBytes.
template <class Rows>
void for_rows(int64_t num_rows, int64_t row_bytes, Rows rows) {
  const int64_t step = std::max<int64_t>(1, kItemBytes / std::max<int64_t>(1, row_bytes));
  parallel_for((num_rows + step - 1) / step, num_rows * row_bytes >= kParallelBytes,
               [&](int64_t item) {
                 rows(item * step, std::min(num_rows, (item + 1) * step));
               });
}

int64_t element_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

void check_heads(const AttentionArgs& args) {
  const char* op = "paged_attention";
  if (args.head_dim % 16 != 0 || args.head_dim > kMaxHeadDim)
    fail(op, "head_dim", "a multiple of 16 up to " + std::to_string(kMaxHeadDim), args.head_dim);
  if (args.num_heads % args.num_kv_heads != 0 ||
      args.num_heads > args.num_kv_heads * kMaxTileRows)
    fail(op, "num_heads",
         "1 to " + std::to_string(kMaxTileRows) + " for each of " +
             std::to_string(args.num_kv_heads) + " KV heads",
         args.num_heads);
}

void check_rows(const AttentionArgs& args, int64_t num_rows, int64_t num_tokens) {
  const char* op = "paged_attention";
  const int64_t capacity = args.max_blocks * args.block_size;
  if (args.query_start[0] != 0) fail(op, "query_start[0]", "0", args.query_start[0]);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t num_queries = args.query_start[row + 1] - args.query_start[row];
    const int64_t context_len = args.context_lens[row];
    if (num_queries < 0)
      fail(op, element("query_start", row + 1),
           "at least the one before, " + std::to_string(args.query_start[row]),
           args.query_start[row + 1]);
    if (context_len < num_queries || context_len > capacity)
      fail(op, element("context_lens", row),
           "from its " + std::to_string(num_queries) + " queries to the " +
               std::to_string(capacity) + " tokens of its block table",
           context_len);
  }
  if (args.query_start[num_rows] != num_tokens)
    fail(op, element("query_start", num_rows), "the number of tokens, " + std::to_string(num_tokens),
         args.query_start[num_rows]);
}

int64_t attention_multiply_adds(const AttentionArgs& args, int64_t num_rows) {
  int64_t scores = 0;
  for (int64_t row = 0; row < num_rows; ++row)
    scores += static_cast<int64_t>(args.query_start[row + 1] - args.query_start[row]) *
              args.context_lens[row];
  return 2 * scores * args.num_heads * args.head_dim;
}

}  // namespace

void launch_gather_rows(const char* op, const char* argument, const void* table, const int32_t* ids,
                        void* out, int64_t num_ids, int64_t num_rows, int64_t row_bytes) {
  check_indices(op, argument, ids, num_ids, num_rows);
  const char* from = static_cast<const char*>(table);
  char* to = static_cast<char*>(out);
  for_rows(num_ids, row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(to + i * row_bytes, from + ids[i] * row_bytes, row_bytes);
  });
}

void launch_rms_norm(const RmsNormArgs& args, int64_t num_rows) {
  const CpuKernels& kernels = cpu_kernels();
  for_rows(num_rows, 2 * args.hidden * element_bytes(args.dtype),
           [&](int64_t begin, int64_t end) { kernels.rms_norm(args, begin, end); });
}

void launch_rotary(const RotaryArgs& args, int64_t num_tokens, int64_t max_positions) {
  check_indices("rotary", "positions", args.positions, num_tokens, max_positions);
  const CpuKernels& kernels = cpu_kernels();
  const int64_t width = (args.num_rotated + args.num_copied) * args.head_dim;
  for_rows(num_tokens, 2 * width * element_bytes(args.dtype),
           [&](int64_t begin, int64_t end) { kernels.rotary(args, begin, end); });
}

void launch_silu_mul(const SiluMulArgs& args, int64_t num_rows) {
  const CpuKernels& kernels = cpu_kernels();
  for_rows(num_rows, 3 * args.inner * element_bytes(args.dtype),
           [&](int64_t begin, int64_t end) { kernels.silu_mul(args, begin, end); });
}

void launch_store_kv(const StoreKvArgs& args, int64_t num_tokens) {
  check_indices("store_kv", "slots", args.slots, num_tokens, args.num_blocks * args.block_size);
  const int64_t head_block_bytes = args.block_size * args.head_bytes;
  for_rows(num_tokens, args.qkv_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t block = args.slots[token] / args.block_size;
      const int64_t offset = args.slots[token] % args.block_size;
      const char* from = static_cast<const char*>(args.qkv) + token * args.qkv_bytes + args.q_bytes;
      char* to = static_cast<char*>(args.layer_cache) + block * args.block_bytes +
                 offset * args.head_bytes;
      for (int64_t head = 0; head < 2 * args.num_kv_heads; ++head)  // the K heads, then the V heads
        std::memcpy(to + head * head_block_bytes, from + head * args.head_bytes, args.head_bytes);
    }
  });
}

void launch_paged_attention(AttentionArgs args, int64_t num_rows, int64_t num_tokens) {
  check_heads(args);
  check_rows(args, num_rows, num_tokens);
  const int64_t group = args.num_heads / args.num_kv_heads;
  args.tile_queries = std::max<int64_t>(1, kPreferredTileRows / group);

  // Tiles of row r are first_tile[r] .. first_tile[r + 1] - 1. The vector keeps its memory.
  static thread_local std::vector<int64_t> first_tile;
  first_tile.assign(1, 0);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t num_queries = args.query_start[row + 1] - args.query_start[row];
    first_tile.push_back(first_tile.back() +
                         (num_queries + args.tile_queries - 1) / args.tile_queries);
  }

  const CpuKernels& kernels = cpu_kernels();
  const std::vector<int64_t>& tiles = first_tile;  // the caller's, not the worker's
  const int64_t num_items = tiles.back() * args.num_kv_heads;
  std::atomic<int64_t> bad_row{-1};
  parallel_for(num_items, attention_multiply_adds(args, num_rows) >= kParallelMultiplyAdds,
               [&](int64_t item) {
                 item = num_items - 1 - item;  // a prompt's last tiles are its longest
                 const int64_t tile = item / args.num_kv_heads;
                 const int64_t row =
                     std::upper_bound(tiles.begin(), tiles.end(), tile) - tiles.begin() - 1;
                 if (!kernels.attention_tile(args, row, tile - tiles[row], item % args.num_kv_heads,
                                             thread_scratch()))
                   bad_row.store(row, std::memory_order_relaxed);
               });
  if (bad_row.load() >= 0)
    throw std::invalid_argument("paged_attention: block_tables expected ids of the " +
                                std::to_string(args.num_blocks) +
                                " blocks for the context of each row, got another in row " +
                                std::to_string(bad_row.load()));
}

}  // namespace streamkv
