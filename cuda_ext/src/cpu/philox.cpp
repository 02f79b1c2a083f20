// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
#include "streamkv/sampler.h"

namespace streamkv {

double philox_uniform(int64_t seed, int32_t position, int32_t choice) {
  constexpr int kRounds = 10;
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kKeyStep0 = 0x9E3779B9, kKeyStep1 = 0xBB67AE85;  // golden ratio, sqrt(3) - 1
  uint32_t counter[4] = {(uint32_t)position, (uint32_t)choice, 0, 0};
  uint32_t key0 = (uint32_t)(uint64_t)seed, key1 = (uint32_t)((uint64_t)seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = counter[0] * kMultiplier0, product1 = counter[2] * kMultiplier1;
    const uint32_t next0 = (uint32_t)(product1 >> 32) ^ counter[1] ^ key0;
    const uint32_t next2 = (uint32_t)(product0 >> 32) ^ counter[3] ^ key1;
    counter[0] = next0;
    counter[1] = (uint32_t)product1;
    counter[2] = next2;
    counter[3] = (uint32_t)product0;
    key0 += kKeyStep0;
    key1 += kKeyStep1;
  }
  const uint64_t bits = (uint64_t)(counter[0] >> 5) << 26 | counter[1] >> 6;
  return (double)bits * 0x1p-53;
}

}  // namespace streamkv
