// A kernel with its arguments, as a phase that a team can run.
#pragma once

#include "streamkv/kernels.h"
#include "streamkv/team.h"

namespace streamkv {

template <class Args>
struct BoundKernel {
  Kernel<Args> kernel;
  Args args;

  // This object must outlive the phase.
  Phase phase(int num_threads) {
    if constexpr (requires { args.num_threads; }) args.num_threads = num_threads;
    return {kernel.num_items(args, num_threads),
            [](const void* self, int64_t item, void* scratch) {
              const auto& bound = *static_cast<const BoundKernel*>(self);
              bound.kernel.run(bound.args, item, scratch);
            },
            this};
  }
};

// The kernels of either class of weight, and their arguments, still empty.
inline const auto& embedding_kernel(const PackedWeight&) { return kernels().embedding; }
inline const auto& embedding_kernel(const QuantizedWeight&) {
  return kernels().quantized.embedding;
}
inline const auto& matmul_kernel(const PackedWeight&) { return kernels().matmul; }
inline const auto& matmul_kernel(const QuantizedWeight&) { return kernels().quantized.matmul; }

template <class Args>
Args no_args(const Kernel<Args>&) {
  return {};
}

}  // namespace streamkv
