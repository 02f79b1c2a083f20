// Packing against the numbers that went in, and embedding, which reads packed weights.
#include <algorithm>

#include "packed.h"

namespace streamkv::selftest {

namespace {

int64_t bytes_of(Dtype dtype, int64_t num_outputs, int64_t depth, bool is_paired) {
  return kernels().packed_bytes({nullptr, dtype, num_outputs, depth, is_paired});
}

void check_weight(Report& report, Random& random, Dtype dtype, Dtype source_dtype,
                  int64_t num_outputs, int64_t depth, bool is_paired) {
  const std::string what = "pack " + name_of(source_dtype) + " to " + name_of(dtype) + " [" +
                           std::to_string(num_outputs) + ", " + std::to_string(depth) + "]" +
                           (is_paired ? " paired" : "");
  const auto source = random_source(random, source_dtype, num_outputs * depth);
  TestWeight whole(dtype, num_outputs, depth, is_paired, source.data(), source_dtype, num_outputs);
  TestWeight pieces(dtype, num_outputs, depth, is_paired, source.data(), source_dtype, 7);
  report.expect(whole.memory.is_intact() && pieces.memory.is_intact(), what + ": writes inside");

  for (const int64_t first : {int64_t{0}, num_outputs / 3, num_outputs - 1}) {
    const int64_t count = num_outputs - first;
    Guarded out(count * depth * 4);
    for (TestWeight* weight : {&whole, &pieces}) {
      kernels().unpack(weight->view, first, count, out.as<float>());
      report.expect(out.is_intact() && memcmp(out.as<float>(), whole.values.data() + first * depth,
                                              out.num_bytes()) == 0,
                    what + ": unpacked from " + std::to_string(first));
    }
  }
}

void check_embedding(Report& report, Random& random, Dtype dtype, int64_t hidden) {
  constexpr int64_t kVocabulary = 203, kTokens = 300;
  const auto source = random_source(random, dtype, kVocabulary * hidden);
  TestWeight weight(dtype, kVocabulary, hidden, false, source.data(), dtype, kVocabulary);
  const std::vector<int32_t> token_ids = random.indices(kTokens, kVocabulary);
  for (const Order order : kOrders) {
    Guarded out(kTokens * hidden * 4);
    run_kernel(kernels().embedding, {token_ids.data(), weight.view, out.as<float>(), kTokens},
               order);
    bool holds = out.is_intact();
    for (int64_t i = 0; i < kTokens; ++i)
      holds = holds && memcmp(out.as<float>() + i * hidden,
                              weight.values.data() + token_ids[i] * hidden, hidden * 4) == 0;
    report.expect(holds, "embedding " + name_of(dtype) + " of " + std::to_string(hidden));
  }
}

}  // namespace

TestWeight::TestWeight(Dtype dtype, int64_t num_outputs, int64_t depth, bool is_paired,
                       const void* source, Dtype source_dtype, int64_t piece_rows)
    : values(read_numbers(source, source_dtype, num_outputs * depth)),
      memory(bytes_of(dtype, num_outputs, depth, is_paired)),
      view{memory.as<void>(), dtype, num_outputs, depth, is_paired} {
  if (dtype == Dtype::kBFloat16) values = rounded_to_bf16(values);
  memset(memory.as<char>(), 0, memory.num_bytes());  // as the system gives it
  const auto* bytes = static_cast<const char*>(source);
  for (int64_t row = 0; row < num_outputs; row += piece_rows)
    kernels().pack({view, bytes + row * depth * element_bytes(source_dtype), source_dtype, row,
                    std::min(piece_rows, num_outputs - row)});
}

std::vector<unsigned char> random_source(Random& random, Dtype dtype, int64_t n) {
  std::vector<unsigned char> bytes(n * element_bytes(dtype));
  for (int64_t i = 0; i < n; ++i) {
    const float number = random.uniform();
    if (dtype == Dtype::kFloat32) {
      memcpy(bytes.data() + i * 4, &number, 4);
    } else {
      // A half below 2, denormals too; none is infinite.
      const uint16_t bits = dtype == Dtype::kBFloat16
                                ? to_bf16(number)
                                : static_cast<uint16_t>(random.bits() & 0xbfff);
      memcpy(bytes.data() + i * 2, &bits, 2);
    }
  }
  return bytes;
}

std::string name_of(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? "float32" : dtype == Dtype::kBFloat16 ? "bfloat16" : "float16";
}

void check_packing(Report& report) {
  Random random(1);
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    for (const Dtype source : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
      check_weight(report, random, dtype, source, 1, 2, false);
      check_weight(report, random, dtype, source, 77, 50, false);
      check_weight(report, random, dtype, source, 64, 128, false);
      check_weight(report, random, dtype, source, 96, 66, true);
      check_weight(report, random, dtype, source, 74, 34, true);
    }
    for (const int64_t hidden : {2, 30, 64, 250}) check_embedding(report, random, dtype, hidden);
  }
}

}  // namespace streamkv::selftest
