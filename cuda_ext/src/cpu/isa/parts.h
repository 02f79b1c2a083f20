// Kernels that are compiled apart from the table that names them (kernels.cpp), so that a build has
// more and shorter work to share out. Each instruction set's have names of their own.
//
// Functions, not tables: a table that holds another file's values would be filled in at the start,
// by code for an instruction set that the CPU may not have.
#pragma once

#include "streamkv/kernels.h"

#define STREAMKV_JOIN(a, b) a##_##b
#define STREAMKV_JOINED(a, b) STREAMKV_JOIN(a, b)
#define STREAMKV_PART(name) STREAMKV_JOINED(name, STREAMKV_ISA)

namespace streamkv {

int64_t STREAMKV_PART(attention_num_items)(const AttentionArgs& args, int num_threads);
void STREAMKV_PART(attention_run)(const AttentionArgs& args, int64_t item, void* scratch);
int64_t STREAMKV_PART(matmul_num_items)(const MatmulArgs& args, int num_threads);
void STREAMKV_PART(matmul_run)(const MatmulArgs& args, int64_t item, void* scratch);
int64_t STREAMKV_PART(quantized_matmul_num_items)(const QuantizedMatmulArgs& args,
                                                  int num_threads);
void STREAMKV_PART(quantized_matmul_run)(const QuantizedMatmulArgs& args, int64_t item,
                                         void* scratch);

}  // namespace streamkv
