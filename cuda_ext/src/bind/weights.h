// Weights with the memory they lie in: what Python holds as PackedWeight and QuantizedWeight.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "arguments.h"
#include "streamkv/kernels.h"
#include "streamkv/memory.h"

namespace streamkv {

// Weights side by side. A model's are mostly smaller than a huge page or end within one: each in
// memory of its own would lie in small pages, which are read a third slower. Any thread may take.
class WeightArena {
 public:
  struct Piece {
    std::shared_ptr<Memory> memory;  // that it is part of
    void* data;                      // 64-byte aligned, zeros
  };

  Piece take(int64_t num_bytes);
  static Piece alone(int64_t num_bytes);  // memory that it shares with no other

 private:
  std::mutex mutex_;
  std::shared_ptr<Memory> memory_;  // what is taken from at present
  int64_t num_taken_ = 0;           // bytes of it
};

constexpr int64_t kMaxLength = (int64_t{1} << 31) - 1;  // of a weight's sides
constexpr int64_t kMaxBytes = int64_t{1} << 46;  // no process can have more: nothing overflows

struct OwnedWeight {
  PackedWeight view;               // view.data lies in memory
  std::shared_ptr<Memory> memory;  // shared with others of its arena
  const Kernels* table;            // that packs it: no other can read it

  int64_t num_bytes() const { return table->packed_bytes(view); }

  // What the left side of a product with it must be.
  Dtype input_dtype() const {
    return view.dtype == Dtype::kBFloat16 ? table->bf16_inputs : Dtype::kFloat32;
  }
};

struct OwnedQuantizedWeight {
  QuantizedWeight view;            // its parts lie in memory, one after another
  std::shared_ptr<Memory> memory;  // as above
  const Kernels* table;

  int64_t part_bytes(int64_t part) const {
    const QuantizedPart& p = view.parts[part];
    return table->quantized.packed_bytes(p.format, p.num_outputs, view.depth);
  }
  Dtype input_dtype() const { return Dtype::kInt8; }
};

inline WeightArena::Piece take_from(WeightArena* arena, int64_t num_bytes) {
  return arena == nullptr ? WeightArena::alone(num_bytes) : arena->take(num_bytes);
}

// Packed bytes as an array that keeps their memory.
inline nanobind::ndarray<nanobind::numpy, uint8_t> bytes_of(const std::shared_ptr<Memory>& memory,
                                                            const void* data, int64_t num_bytes) {
  nanobind::capsule owner(new std::shared_ptr<Memory>(memory), [](void* p) noexcept {
    delete static_cast<std::shared_ptr<Memory>*>(p);
  });
  const size_t shape[1] = {static_cast<size_t>(num_bytes)};
  auto* bytes = const_cast<uint8_t*>(static_cast<const uint8_t*>(data));
  return nanobind::ndarray<nanobind::numpy, uint8_t>(bytes, 1, shape, owner);
}

// Of either class of weight, for the op that is given it.
template <class Owned>
const auto& check_weight(const char* op, const Owned& weight) {
  if (weight.table != &kernels())
    refuse(op, "weight", std::string("one packed for ") + kernels().isa, weight.table->isa);
  return weight.view;
}

template <class Owned>
void check_range(const char* method, const Owned& weight, int64_t first_output,
                 int64_t num_rows) {
  const int64_t num_outputs = weight.view.num_outputs;
  if (first_output < 0 || num_rows < 0 || num_rows > num_outputs ||
      first_output > num_outputs - num_rows)
    refuse(method, "first_output",
           "rows inside the " + std::to_string(num_outputs) + " outputs",
           std::to_string(num_rows) + " from " + std::to_string(first_output));
}

}  // namespace streamkv
