// A packed weight with the memory it lies in: what Python holds as PackedWeight.
#pragma once

#include "streamkv/kernels.h"
#include "streamkv/memory.h"

namespace streamkv {

struct OwnedWeight {
  PackedWeight view;     // view.data is memory.data()
  Memory memory;
  const Kernels* table;  // that packs it: no other can read it

  // What the left side of a product with it must be.
  Dtype input_dtype() const {
    return view.dtype == Dtype::kBFloat16 ? table->bf16_inputs : Dtype::kFloat32;
  }
};

}  // namespace streamkv
