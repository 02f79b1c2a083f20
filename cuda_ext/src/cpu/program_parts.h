// What a Program is made of: the arena its buffers lie in, the checks of an op's buffers, and ops
// that are bound to a step. Included by program.cpp alone.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "streamkv/bound_kernel.h"
#include "streamkv/formats.h"
#include "streamkv/kernels.h"
#include "streamkv/memory.h"
#include "streamkv/program.h"

namespace streamkv {
namespace {

constexpr BufferId kNoBuffer = -1;
constexpr int64_t kFloatBytes = 4;
constexpr int64_t kAlignment = 64;

[[noreturn]] void refuse(const char* op, const char* argument, const std::string& expected,
                         const std::string& got) {
  throw std::invalid_argument(std::string(op) + ": " + argument + ": expected " + expected +
                              ", got " + got);
}

// What the left side of a product with it must be, of either class of weight.
Dtype input_dtype(const PackedWeight& weight) {
  return weight.dtype == Dtype::kBFloat16 ? kernels().bf16_inputs : Dtype::kFloat32;
}
Dtype input_dtype(const QuantizedWeight&) { return Dtype::kInt8; }

const char* name_of(Extent extent) {
  return extent == Extent::kTokens ? "tokens" : "logit rows";
}

class Arena {
 public:
  BufferId add(Extent extent, int64_t row_bytes, int64_t place) {
    constexpr int64_t kMaxBytes = int64_t{1} << 31;  // so that nothing below overflows
    if (row_bytes < 1 || row_bytes > kMaxBytes)
      refuse("add_buffer", "row_bytes", "1 to 2**31", std::to_string(row_bytes));
    if (place < 0 || place > kMaxBytes || place % kAlignment != 0)
      refuse("add_buffer", "place", "a multiple of 64 up to 2**31", std::to_string(place));
    Region& region = region_of(extent);
    if (region.max_rows > 0)
      refuse("add_buffer", "extent", "all buffers before reserve", "one after it");
    region.bytes_per_row = std::max(region.bytes_per_row, place + row_bytes);
    buffers_.push_back({extent, row_bytes, place});
    return static_cast<BufferId>(buffers_.size()) - 1;
  }

  void reserve(int64_t max_tokens, int64_t max_logit_rows) {
    const int64_t max_rows[2] = {max_tokens, max_logit_rows};
    for (int i = 0; i < 2; ++i) {
      if (max_rows[i] < 0 || max_rows[i] > std::numeric_limits<int32_t>::max())
        refuse("reserve", i == 0 ? "max_tokens" : "max_logit_rows", "0 to 2**31 - 1",
               std::to_string(max_rows[i]));
      regions_[i].memory = Memory(regions_[i].bytes_per_row * max_rows[i], true);
      regions_[i].max_rows = max_rows[i];
      regions_[i].num_rows = 0;
    }
  }

  void set_num_rows(Extent extent, int64_t num_rows) {
    Region& region = region_of(extent);
    if (num_rows < 0 || num_rows > region.max_rows)
      refuse("run", name_of(extent), "at most the " + std::to_string(region.max_rows) +
             " that were reserved", std::to_string(num_rows));
    region.num_rows = num_rows;
  }

  BufferId check(const char* op, BufferId id, const char* argument = "id") const {
    if (id < 0 || id >= static_cast<BufferId>(buffers_.size()))
      refuse(op, argument, "one of the " + std::to_string(buffers_.size()) + " buffers",
             std::to_string(id));
    return id;
  }

  // Of a buffer that was checked.
  Extent extent(BufferId id) const { return buffers_[id].extent; }
  int64_t row_bytes(BufferId id) const { return buffers_[id].row_bytes; }
  int64_t place(BufferId id) const { return buffers_[id].place; }
  int64_t num_rows(BufferId id) const { return region_of(buffers_[id].extent).num_rows; }
  void* at(BufferId id) const {
    const Region& region = region_of(buffers_[id].extent);
    return static_cast<char*>(region.memory.data()) + buffers_[id].place * region.num_rows;
  }

 private:
  struct Buffer {
    Extent extent;
    int64_t row_bytes, place;
  };

  struct Region {
    Memory memory;
    int64_t bytes_per_row = 0;
    int64_t max_rows = 0;
    int64_t num_rows = 0;  // of the step
  };

  Region& region_of(Extent extent) { return regions_[static_cast<int>(extent)]; }
  const Region& region_of(Extent extent) const { return regions_[static_cast<int>(extent)]; }

  std::vector<Buffer> buffers_;
  Region regions_[2];
};

// Checks of the buffers that one op is given.
class OpBuffers {
 public:
  OpBuffers(const char* op, const Arena& arena) : op_(op), arena_(arena) {}

  BufferId known(const char* argument, BufferId id) const {
    return arena_.check(op_, id, argument);
  }

  Extent extent(const char* argument, BufferId id) const {
    return arena_.extent(known(argument, id));
  }

  void check(const char* argument, BufferId id, Extent extent, int64_t row_bytes) const {
    known(argument, id);
    if (arena_.extent(id) != extent || arena_.row_bytes(id) != row_bytes)
      refuse(op_, argument, describe(extent, row_bytes),
             describe(arena_.extent(id), arena_.row_bytes(id)));
  }

  // `width` inputs of a product.
  Dtype check_inputs(const char* argument, BufferId id, Extent extent, int64_t width,
                     Dtype dtype) const {
    if (dtype == Dtype::kFloat16)
      refuse(op_, "out_dtype", "float32, bfloat16 or int8", "float16");
    check(argument, id, extent, input_row_bytes(dtype, width));
    return dtype;
  }

  template <class Weight>
  Extent check_product(BufferId x, const Weight& weight, bool is_paired) const {
    if (weight.is_paired != is_paired)
      refuse(op_, "weight", is_paired ? "a paired one" : "one that is not paired",
             is_paired ? "one that is not" : "a paired one");
    const Extent rows = extent("x", x);
    check_inputs("x", x, rows, weight.depth, input_dtype(weight));
    return rows;
  }

  bool are_one_place(BufferId a, BufferId b) const {
    return arena_.extent(a) == arena_.extent(b) && arena_.place(a) == arena_.place(b);
  }

  void check_apart(BufferId out, std::initializer_list<BufferId> read) const {
    for (const BufferId id : read) {
      const bool is_apart = arena_.extent(id) != arena_.extent(out) || ends_before(id, out) ||
                            ends_before(out, id);
      if (!is_apart)
        refuse(op_, "out", "a place beside what is read", "one over buffer " + std::to_string(id));
    }
  }

 private:
  bool ends_before(BufferId a, BufferId b) const {
    return arena_.place(a) + arena_.row_bytes(a) <= arena_.place(b);
  }

  static std::string describe(Extent extent, int64_t row_bytes) {
    return std::to_string(row_bytes) + " bytes for each of the " + name_of(extent);
  }

  const char* op_;
  const Arena& arena_;
};

// What ops are bound to.
struct Step {
  const Arena& arena;
  const Batch& batch;
  const AttentionPlan* plan;

  // Where a kernel's argument points to, of whatever type it is.
  template <class T>
  void place(T*& argument, BufferId id) const {
    argument = static_cast<T*>(arena.at(id));
  }
  int64_t num_rows(BufferId id) const { return arena.num_rows(id); }
};

class Op {
 public:
  virtual ~Op() = default;
  // The op's part of a step. Valid until the next call; the step must outlive it.
  virtual Phase bind(const Step& step, int num_threads) = 0;
};

// `place` fills in the arguments that depend on the step.
template <class Args, class Place>
class PlacedOp final : public Op {
 public:
  PlacedOp(const Kernel<Args>& kernel, const Args& args, Place place)
      : bound_{kernel, args}, place_(place) {}

  Phase bind(const Step& step, int num_threads) override {
    place_(bound_.args, step);
    return bound_.phase(num_threads);
  }

 private:
  BoundKernel<Args> bound_;
  Place place_;
};

}  // namespace
}  // namespace streamkv
