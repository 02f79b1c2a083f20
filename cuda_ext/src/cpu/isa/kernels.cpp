// The CPU kernels, compiled once per instruction set: STREAMKV_ISA names the table made here. Those
// that take the compiler longest have files of their own (parts.h).
//
// All code is in an anonymous namespace, and only compiler intrinsics and plain C are used, so that
// the linker has no function to merge with another instruction set's (see kernels.h).
#include "streamkv/kernels.h"

#include "elementwise.h"
#include "pack.h"
#include "parts.h"
#include "peaks.h"
#include "quantized_pack.h"
#include "quantized_unpack.h"
#include "sampling.h"
#include "store_kv.h"
#include "vec.h"

#define STREAMKV_QUOTE(isa) #isa
#define STREAMKV_NAME(isa) STREAMKV_QUOTE(isa)

namespace streamkv {

extern const Kernels STREAMKV_PART(kKernels);
const Kernels STREAMKV_PART(kKernels) = {
    STREAMKV_NAME(STREAMKV_ISA),
    kPanel,
    kBf16Inputs,
    packed_bytes,
    pack,
    unpack,
    {embedding_num_items, embedding_run},
    {rms_norm_num_items, rms_norm_run},
    {STREAMKV_PART(matmul_num_items), STREAMKV_PART(matmul_run)},
    {head_rms_norm_num_items, head_rms_norm_run},
    {rotary_num_items, rotary_run},
    {store_kv_num_items, store_kv_run},
    {STREAMKV_PART(attention_num_items), STREAMKV_PART(attention_run)},
    {select_rows_num_items, select_rows_run},
    {quantized_packed_bytes,
     quantized_pack,
     quantized_unpack,
     {quantized_embedding_num_items, quantized_embedding_run},
     {STREAMKV_PART(quantized_matmul_num_items), STREAMKV_PART(quantized_matmul_run)},
     {quantize_num_items, quantize_run}},
    {argmax, sum_exp, count_at_least, collect_at_least, collect_between, group_maxima,
     mask},
    {peak_fma, kPeakBf16Dot, peak_int8_dot, peak_read},
};

}  // namespace streamkv
