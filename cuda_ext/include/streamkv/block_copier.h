// Copies of whole blocks: from block to block, and to slots of host memory and back.
//
// Owns their order: the result is as if they were made one after the other. Copies that can't tell
// each other's order are made together, in pieces that the threads share. Knows no rows and no
// tokens. Nothing is copied before all numbers were checked.
#pragma once

#include <stdint.h>

#include <vector>

#include "streamkv/kv_cache.h"
#include "streamkv/memory.h"
#include "streamkv/step.h"
#include "streamkv/team.h"

namespace streamkv {

enum class CopyKind : int32_t { kBlock = 0, kOut = 1, kIn = 2 };  // protocol.CopyKind

class BlockCopier {
 public:
  // Both must outlive it.
  BlockCopier(KvCache& cache, Team& team);

  // `copies` [n, 4] flat: (number, CopyKind, source, target). std::invalid_argument for a number,
  // kind or place that there isn't.
  void check(const PackedInts& copies) const;

  // Makes copies that were checked, and appends their numbers to `done`. std::bad_alloc: none made.
  void make(const PackedInts& copies, std::vector<int32_t>& done);

 private:
  struct Copy {
    const char* source;
    char* target;
  };

  void make_group();
  void copy_piece(int64_t item) const;

  KvCache& cache_;
  Team& team_;
  int64_t pieces_per_block_;

  // Of each place, blocks before slots: the last group that read it, and that wrote it.
  Memory read_in_, written_in_;  // int64 [num_blocks + num_host_slots]
  int64_t group_number_ = 0;
  std::vector<Copy> group_;
};

}  // namespace streamkv
