#include "quantized_blocks.h"

#include <algorithm>

#include "streamkv/formats.h"

namespace streamkv::selftest {

namespace {

// One block while it is read.
struct Reader {
  const uint8_t* block;
  int* levels;
  float *scales, *minima;

  void put(int64_t k, int level, float scale, float minimum) const {
    levels[k] = level;
    scales[k] = scale;
    minima[k] = minimum;
  }
  float half(int64_t at) const {
    return from_half(static_cast<uint16_t>(block[at] | block[at + 1] << 8));
  }
};

// 32 values of 4 or 5 bits: `offset` is what a level is less than its bits.
void read_small(const Reader& reader, bool has_minimum, bool has_fifth, int offset) {
  const float scale = reader.half(0), minimum = has_minimum ? reader.half(2) : 0.0f;
  const uint8_t* fifths = reader.block + (has_minimum ? 4 : 2);
  const uint8_t* nibbles = fifths + (has_fifth ? 4 : 0);
  for (int k = 0; k < 32; ++k) {
    int bits = k < 16 ? nibbles[k] & 15 : nibbles[k - 16] >> 4;
    if (has_fifth) bits |= (fifths[k / 8] >> k % 8 & 1) << 4;
    reader.put(k, bits - offset, scale, minimum);
  }
}

// Six bits of one of 8 scales and of one of 8 minima, in 12 bytes.
void read_six_bits(const uint8_t* packed, int group, int* scale, int* minimum) {
  if (group < 4) {
    *scale = packed[group] & 63;
    *minimum = packed[group + 4] & 63;
  } else {
    *scale = (packed[group + 4] & 15) | packed[group - 4] >> 6 << 4;
    *minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4;
  }
}

// Q4_K and Q5_K: by turns 32 low and 32 high halves of 32 bytes.
void read_super(const Reader& reader, bool has_fifth) {
  const uint8_t *fifths = reader.block + 16, *nibbles = fifths + (has_fifth ? 32 : 0);
  for (int k = 0; k < 256; ++k) {
    const int group = k / 32, at = k % 32;
    int scale, minimum;
    read_six_bits(reader.block + 4, group, &scale, &minimum);
    const uint8_t byte = nibbles[group / 2 * 32 + at];
    int bits = group % 2 == 0 ? byte & 15 : byte >> 4;
    if (has_fifth) bits |= (fifths[at] >> group & 1) << 4;
    reader.put(k, bits, reader.half(0) * static_cast<float>(scale),
               -(reader.half(2) * static_cast<float>(minimum)));
  }
}

// Halves of 128: 64 bytes of low bits, 32 of high ones.
void read_six(const Reader& reader) {
  const uint8_t *low = reader.block, *high = low + 128, *scales = high + 64;
  const float scale = reader.half(208);
  for (int k = 0; k < 256; ++k) {
    const int half = k / 128, quarter = k % 128 / 32, at = k % 32;
    const uint8_t byte = low[half * 64 + quarter % 2 * 32 + at];
    const int bits = (quarter < 2 ? byte & 15 : byte >> 4) |
                     (high[half * 32 + at] >> 2 * quarter & 3) << 4;
    reader.put(k, bits - 32, scale * static_cast<float>(static_cast<int8_t>(scales[k / 16])),
               0.0f);
  }
}

void read_block(WeightFormat format, const Reader& reader) {
  switch (format) {
    case WeightFormat::kQ4_0: return read_small(reader, false, false, 8);
    case WeightFormat::kQ4_1: return read_small(reader, true, false, 0);
    case WeightFormat::kQ5_0: return read_small(reader, false, true, 16);
    case WeightFormat::kQ5_1: return read_small(reader, true, true, 0);
    case WeightFormat::kQ4_K: return read_super(reader, false);
    case WeightFormat::kQ5_K: return read_super(reader, true);
    case WeightFormat::kQ6_K: return read_six(reader);
    default:
      for (int k = 0; k < 32; ++k)
        reader.put(k, static_cast<int8_t>(reader.block[2 + k]), reader.half(0), 0.0f);
  }
}

void read_int8_row(const Reader& reader, int64_t depth) {
  float scale;
  memcpy(&scale, reader.block, sizeof(scale));
  for (int64_t k = 0; k < depth; ++k)
    reader.put(k, static_cast<int8_t>(reader.block[4 + k]), scale, 0.0f);
}

// From an odd address: a file's rows begin anywhere.
void pack_blocks(const Blocks& blocks, const QuantizedPart& to, int64_t piece_rows) {
  const int64_t row_bytes = blocks.row_bytes();
  for (int64_t row = 0; row < blocks.num_outputs; row += piece_rows) {
    const int64_t num_rows = std::min(piece_rows, blocks.num_outputs - row);
    const auto from = blocks.bytes.begin() + row * row_bytes;
    std::vector<uint8_t> source(1);
    source.insert(source.end(), from, from + num_rows * row_bytes);
    kernels().quantized.pack({to, blocks.depth, source.data() + 1, row, num_rows});
  }
}

// A normal float16 from 2^-9 to 2^-4, of either sign.
uint16_t random_half(Random& random) {
  return static_cast<uint16_t>((random.bits() & 0x83ff) | (6 + random.below(5)) << 10);
}

// Where a block has float16s.
std::vector<int64_t> halves_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ4_0:
    case WeightFormat::kQ5_0:
    case WeightFormat::kQ8_0: return {0};
    case WeightFormat::kQ6_K: return {208};
    case WeightFormat::kInt8: return {};
    default: return {0, 2};
  }
}

bool has_minima(WeightFormat format) {
  return halves_of(format).size() == 2;
}

uint8_t random_byte(Random& random, WeightFormat format, Filling filling) {
  const bool is_int8 = format == WeightFormat::kInt8, is_q8 = format == WeightFormat::kQ8_0;
  if (filling == Filling::kLeast) return is_int8 ? 0x81 : is_q8 ? 0x80 : 0;
  if (filling == Filling::kGreatest) return is_int8 || is_q8 ? 0x7f : 0xff;
  const auto byte = static_cast<uint8_t>(random.bits());
  return is_int8 && byte == 0x80 ? 0 : byte;  // int8 has no -128
}

}  // namespace

Blocks::Blocks(Random& random, WeightFormat format, int64_t num_outputs, int64_t depth,
               Filling filling)
    : format(format), num_outputs(num_outputs), depth(depth),
      bytes(num_outputs * source_row_bytes(format, depth)), levels(num_outputs * depth),
      scales(num_outputs * depth), minima(num_outputs * depth), values(num_outputs * depth) {
  const bool is_int8 = format == WeightFormat::kInt8;
  const int64_t step = is_int8 ? depth : block_depth(format);
  const int64_t block_bytes = source_row_bytes(format, step);
  for (uint8_t& byte : bytes) byte = random_byte(random, format, filling);
  for (int64_t i = 0; i < num_outputs * depth / step; ++i) {
    uint8_t* const block = bytes.data() + i * block_bytes;
    const Reader reader{block, levels.data() + i * step, scales.data() + i * step,
                        minima.data() + i * step};
    if (is_int8) {
      const float scale = random.uniform() * 0.01f;
      memcpy(block, &scale, sizeof(scale));
      read_int8_row(reader, depth);
      continue;
    }
    for (const int64_t at : halves_of(format)) {
      const uint16_t half = random_half(random);
      memcpy(block + at, &half, sizeof(half));
    }
    read_block(format, reader);
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const float product = static_cast<float>(levels[i]) * scales[i];
    values[i] = has_minima(format) ? product + minima[i] : product;
  }
}

TestQuantized::TestQuantized(std::vector<Blocks> blocks, bool is_paired, int64_t piece_rows)
    : parts(std::move(blocks)), view{} {
  view.num_parts = static_cast<int64_t>(parts.size());
  view.depth = parts[0].depth;
  view.is_paired = is_paired;
  for (int64_t i = 0; i < view.num_parts; ++i) {
    const Blocks& part = parts[i];
    memory.push_back(std::make_unique<Guarded>(
        kernels().quantized.packed_bytes(part.format, part.num_outputs, part.depth)));
    memset(memory[i]->as<char>(), 0, memory[i]->num_bytes());  // as the system gives it
    view.parts[i] = {memory[i]->as<void>(), part.format, part.num_outputs};
    view.num_outputs += part.num_outputs;
    pack_blocks(part, view.parts[i], piece_rows);
  }
}

bool TestQuantized::is_intact() const {
  return std::all_of(memory.begin(), memory.end(),
                     [](const auto& guarded) { return guarded->is_intact(); });
}

std::pair<const Blocks*, int64_t> TestQuantized::find(int64_t output) const {
  const Blocks* part = parts.data();
  for (; output >= part->num_outputs; ++part) output -= part->num_outputs;
  return {part, output};
}

std::string TestQuantized::name() const {
  std::string text = view.is_paired ? "paired" : "";
  for (const Blocks& part : parts)
    text += std::string(text.empty() ? "" : " ") + format_name(part.format) + " " +
            std::to_string(part.num_outputs);
  return text + " of " + std::to_string(view.depth);
}

}  // namespace streamkv::selftest
