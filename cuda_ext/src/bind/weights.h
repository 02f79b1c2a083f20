// A packed weight with the memory it lies in: what Python holds as PackedWeight.
#pragma once

#include <memory>
#include <mutex>

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

}  // namespace streamkv
