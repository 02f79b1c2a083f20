#include "streamkv/memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace streamkv {
namespace {

constexpr uintptr_t kHugePage = 2 << 20;

// Pages of zeros, promised but not taken: a KV cache may be larger than what is ever used of it.
char* map_pages(uintptr_t num_bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#if defined(MAP_NORESERVE)
  flags |= MAP_NORESERVE;
#endif
  void* data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(data);
}

// Only whole huge pages can be huge: maps one more and gives back what lies around.
char* map_huge_pages(uintptr_t num_bytes) {
  char* begin = map_pages(num_bytes + kHugePage);
  char* end = begin + num_bytes + kHugePage;
  const uintptr_t address = reinterpret_cast<uintptr_t>(begin);
  char* data = begin + ((address + kHugePage - 1) / kHugePage * kHugePage - address);
  if (data > begin) munmap(begin, data - begin);
  if (end > data + num_bytes) munmap(data + num_bytes, end - (data + num_bytes));
#if defined(MADV_HUGEPAGE)
  madvise(data, num_bytes, MADV_HUGEPAGE);  // advice: systems without huge pages refuse it
#endif
  return data;
}

uintptr_t whole_pages(int64_t num_bytes) {
  constexpr uintptr_t kPage = 1 << 16;  // the largest that a CPU we run on has
  return (static_cast<uintptr_t>(num_bytes) + kPage - 1) / kPage * kPage;
}

}  // namespace

Memory::Memory(int64_t num_bytes, bool huge_pages) : num_bytes_(num_bytes) {
  if (num_bytes < 0) throw std::bad_alloc();
  if (num_bytes == 0) return;
  const uintptr_t mapped = whole_pages(num_bytes);
  const bool is_large = mapped >= kHugePage;
  data_ = huge_pages && is_large ? map_huge_pages(mapped) : map_pages(mapped);
}

Memory::~Memory() {
  if (data_ != nullptr) munmap(data_, whole_pages(num_bytes_));
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      num_bytes_(std::exchange(other.num_bytes_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

}  // namespace streamkv
