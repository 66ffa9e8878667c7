#include "memory.hpp"

#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace elasticdl {
namespace {

constexpr size_t kCacheLine = 64;

size_t rounded_up(size_t size, size_t unit) {
  if (size > SIZE_MAX - unit) throw std::bad_alloc();
  return (size + unit - 1) / unit * unit;
}

#if defined(__linux__)

constexpr size_t kSmallestMapping = kHugePage;

char* map_aligned(size_t size) {
  if (size > SIZE_MAX / 2) throw std::bad_alloc();
  void* mapped = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  char* start = static_cast<char*>(mapped);
  char* aligned = reinterpret_cast<char*>(rounded_up(reinterpret_cast<uintptr_t>(start), kHugePage));
  if (aligned > start) munmap(start, aligned - start);
  char* end = start + size + kHugePage;
  if (end > aligned + size) munmap(aligned + size, end - (aligned + size));
  madvise(aligned, size, MADV_HUGEPAGE);  // where the system has none, it says no, and that is all
  return aligned;
}

#else

constexpr size_t kSmallestMapping = SIZE_MAX;

#endif

}  // namespace

Memory::Memory(size_t size, std::atomic<int64_t>* counter) : counter_(counter) {
  if (size >= kSmallestMapping) {
#if defined(__linux__)
    size_ = rounded_up(size, kHugePage);
    data_ = map_aligned(size_);
#endif
  } else {
    size_ = rounded_up(size, kCacheLine);
    data_ = static_cast<char*>(std::aligned_alloc(kCacheLine, size_));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_, 0, size_);
  }
  counter_->fetch_add(static_cast<int64_t>(size_), std::memory_order_relaxed);
}

Memory::~Memory() {
  if (data_ == nullptr) return;
  counter_->fetch_sub(static_cast<int64_t>(size_), std::memory_order_relaxed);
#if defined(__linux__)
  if (size_ >= kSmallestMapping) {
    munmap(data_, size_);
    return;
  }
#endif
  std::free(data_);
}

void Memory::populate() const {
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
  if (size_ >= kSmallestMapping) madvise(data_, size_, MADV_POPULATE_WRITE);
#endif
}

}  // namespace elasticdl
