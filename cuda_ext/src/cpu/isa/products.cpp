// Matrix products, compiled once per instruction set, like kernels.cpp.
#include "parts.h"

#include "matmul.h"
#include "quantized_matmul.h"

namespace streamkv {

int64_t STREAMKV_PART(matmul_num_items)(const MatmulArgs& args, int num_threads) {
  return matmul_num_items(args, num_threads);
}

void STREAMKV_PART(matmul_run)(const MatmulArgs& args, int64_t item, void* scratch) {
  matmul_run(args, item, scratch);
}

int64_t STREAMKV_PART(quantized_matmul_num_items)(const QuantizedMatmulArgs& args,
                                                  int num_threads) {
  return quantized_matmul_num_items(args, num_threads);
}

void STREAMKV_PART(quantized_matmul_run)(const QuantizedMatmulArgs& args, int64_t item,
                                         void* scratch) {
  quantized_matmul_run(args, item, scratch);
}

}  // namespace streamkv
