#include "streamkv/block_copier.h"

#include <string.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace streamkv {
namespace {

using std::to_string;

constexpr int64_t kPieceBytes = 1 << 16;
constexpr int64_t kMaxItems = 1 << 20;  // of a phase

struct Ends {
  bool from_slot, to_slot;

  explicit Ends(int32_t kind)
      : from_slot(kind == static_cast<int32_t>(CopyKind::kIn)),
        to_slot(kind == static_cast<int32_t>(CopyKind::kOut)) {}
};

Memory stamps(const KvCache& cache) {
  return Memory((cache.num_blocks + cache.num_host_slots) * static_cast<int64_t>(sizeof(int64_t)));
}

void check_place(int32_t number, const char* what, int32_t id, bool is_slot,
                 const KvCache& cache) {
  const int64_t end = is_slot ? cache.num_host_slots : cache.num_blocks;
  if (id < 0 || id >= end)
    throw std::invalid_argument("copy " + to_string(number) + ": " + what + ": expected a " +
                                (is_slot ? "host slot" : "block") + " below " + to_string(end) +
                                ", got " + to_string(id));
}

}  // namespace

BlockCopier::BlockCopier(KvCache& cache, Team& team)
    : cache_(cache),
      team_(team),
      pieces_per_block_((cache.block_bytes() + kPieceBytes - 1) / kPieceBytes),
      read_in_(stamps(cache)),
      written_in_(stamps(cache)) {}

void BlockCopier::check(const PackedInts& copies) const {
  for (int64_t i = 0; i < copies.size(); i += 4) {
    const int32_t number = copies[i], kind = copies[i + 1];
    if (number < 0)
      throw std::invalid_argument("copies: expected numbers from 0, got " + to_string(number));
    if (kind < 0 || kind > static_cast<int32_t>(CopyKind::kIn))
      throw std::invalid_argument("copy " + to_string(number) + ": expected a kind of 0 to 2, got " +
                                  to_string(kind));
    const Ends ends(kind);
    check_place(number, "source", copies[i + 2], ends.from_slot, cache_);
    check_place(number, "target", copies[i + 3], ends.to_slot, cache_);
  }
}

void BlockCopier::make(const PackedInts& copies, std::vector<int32_t>& done) {
  const int64_t num_copies = copies.size() / 4;
  const int64_t max_group = std::max<int64_t>(1, kMaxItems / pieces_per_block_);
  done.reserve(done.size() + num_copies);
  group_.reserve(std::min(num_copies, max_group));
  auto* read_in = static_cast<int64_t*>(read_in_.data());
  auto* written_in = static_cast<int64_t*>(written_in_.data());
  ++group_number_;
  for (int64_t i = 0; i < copies.size(); i += 4) {
    const Ends ends(copies[i + 1]);
    const int32_t from = copies[i + 2], to = copies[i + 3];
    const int64_t source = from + (ends.from_slot ? cache_.num_blocks : 0);
    const int64_t target = to + (ends.to_slot ? cache_.num_blocks : 0);
    const bool must_wait = written_in[source] == group_number_ ||
                           written_in[target] == group_number_ ||
                           read_in[target] == group_number_;
    if (must_wait || static_cast<int64_t>(group_.size()) == max_group) make_group();
    read_in[source] = written_in[target] = group_number_;
    if (source != target)
      group_.push_back({ends.from_slot ? cache_.host_slot(from) : cache_.block(from),
                        ends.to_slot ? cache_.host_slot(to) : cache_.block(to)});
  }
  make_group();
  for (int64_t i = 0; i < copies.size(); i += 4) done.push_back(copies[i]);
}

void BlockCopier::make_group() {
  const Phase phase{static_cast<int64_t>(group_.size()) * pieces_per_block_,
                    [](const void* self, int64_t item, void*) {
                      static_cast<const BlockCopier*>(self)->copy_piece(item);
                    },
                    this};
  if (phase.num_items > 0) team_.run(&phase, 1);
  group_.clear();
  ++group_number_;
}

void BlockCopier::copy_piece(int64_t item) const {
  const Copy& copy = group_[item / pieces_per_block_];
  const int64_t start = item % pieces_per_block_ * kPieceBytes;
  memcpy(copy.target + start, copy.source + start,
         std::min(kPieceBytes, cache_.block_bytes() - start));
}

}  // namespace streamkv
