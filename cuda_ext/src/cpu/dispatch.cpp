// Which instruction sets this CPU runs, which table of kernels is in use, and how they are tuned.
//
// Compiled for the oldest CPU. The tables are constant data: naming one executes none of its code.
#include <string.h>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <atomic>
#include <stdexcept>
#include <string>

#include "streamkv/kernels.h"

namespace streamkv {

#if defined(__x86_64__)
extern const Kernels kKernels_baseline, kKernels_avx2, kKernels_avx2_vnni, kKernels_avx512,
    kKernels_avx512_vnni, kKernels_avx512_bf16;
#else
extern const Kernels kKernels_neon, kKernels_neon_dotprod;
#endif

namespace {

struct Candidate {
  const Kernels* kernels;
  bool runs_here;
};

constexpr int kMaxCandidates = 7;

#if defined(__x86_64__)
// Best first. __builtin_cpu_supports also knows whether the OS saves the registers. Products of
// bfloat16 pairs run at twice the rate of float32's on AMD's cores, at half of it on Intel's.
int list_candidates(Candidate out[kMaxCandidates]) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool avx512_bf16 = avx512_vnni && __builtin_cpu_supports("avx512bf16");
  const bool prefers_bf16 = avx512_bf16 && __builtin_cpu_is("amd");
  int count = 0;
  out[count++] = {&kKernels_avx512_bf16, prefers_bf16};
  out[count++] = {&kKernels_avx512_vnni, avx512_vnni};
  out[count++] = {&kKernels_avx512_bf16, avx512_bf16 && !prefers_bf16};
  out[count++] = {&kKernels_avx512, avx512};
  out[count++] = {&kKernels_avx2_vnni, avx2 && __builtin_cpu_supports("avxvnni")};
  out[count++] = {&kKernels_avx2, avx2};
  out[count++] = {&kKernels_baseline, __builtin_cpu_supports("sse4.2") != 0};
  return count;
}
#else
int list_candidates(Candidate out[kMaxCandidates]) {
  out[0] = {&kKernels_neon_dotprod, (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0};
  out[1] = {&kKernels_neon, true};
  return 2;
}
#endif

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

Tuning tuning = kDefaultTuning;

void set_tuning(const Tuning& wanted) { tuning = wanted; }

int num_available_isas() {
  Candidate candidates[kMaxCandidates];
  int available = 0;
  for (int i = 0, count = list_candidates(candidates); i < count; ++i)
    available += candidates[i].runs_here;
  return available;
}

const char* available_isa(int index) {
  Candidate candidates[kMaxCandidates];
  for (int i = 0, count = list_candidates(candidates); i < count; ++i)
    if (candidates[i].runs_here && index-- == 0) return candidates[i].kernels->isa;
  throw std::runtime_error("the CPU kernels need SSE4.2, which this CPU does not have");
}

void set_isa(const char* name) {
  Candidate candidates[kMaxCandidates];
  std::string names;
  for (int i = 0, count = list_candidates(candidates); i < count; ++i) {
    if (!candidates[i].runs_here) continue;
    if (strcmp(candidates[i].kernels->isa, name) == 0) {
      chosen.store(candidates[i].kernels);
      return;
    }
    names += names.empty() ? "" : ", ";
    names += candidates[i].kernels->isa;
  }
  throw std::invalid_argument("expected an instruction set that this CPU runs (" + names +
                              "), got '" + name + "'");
}

const Kernels& kernels() {
  if (chosen.load(std::memory_order_acquire) == nullptr) set_isa(available_isa(0));
  return *chosen.load(std::memory_order_acquire);
}

}  // namespace streamkv
