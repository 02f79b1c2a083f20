// Large, 64-byte aligned memory from the system: committed when first touched, zero until then.
#pragma once

#include <stdint.h>

namespace streamkv {

class Memory {
 public:
  Memory() = default;
  // Throws std::bad_alloc. `huge_pages` asks for them where the system grants them: for what is
  // read in long runs, like weights and blocks of KV. The first touch commits a whole one.
  explicit Memory(int64_t num_bytes, bool huge_pages = false);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  void* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

}  // namespace streamkv
