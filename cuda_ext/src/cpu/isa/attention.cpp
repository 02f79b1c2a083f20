// Attention, compiled once per instruction set, like kernels.cpp.
#include "parts.h"

#include "attention.h"

namespace streamkv {

int64_t STREAMKV_PART(attention_num_items)(const AttentionArgs& args, int num_threads) {
  return attention_num_items(args, num_threads);
}

void STREAMKV_PART(attention_run)(const AttentionArgs& args, int64_t item, void* scratch) {
  attention_run(args, item, scratch);
}

}  // namespace streamkv
