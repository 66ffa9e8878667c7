#include "pool.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace elasticdl {
namespace {

constexpr size_t kSmallestBlock = 64;
constexpr size_t kSmallestChunk = size_t{128} << 10;
constexpr size_t kLargestChunk = size_t{1} << 30;

size_t multiple(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

int logarithm(size_t size) { return 63 - __builtin_clzll(size); }

#if defined(__linux__)

// Zeroed, aligned to huge pages.
char* map(size_t size) {
  if (size > SIZE_MAX / 4) throw std::bad_alloc();
  void* mapped = mmap(nullptr, size + Pool::kLarge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  char* start = static_cast<char*>(mapped);
  char* aligned = reinterpret_cast<char*>(multiple(reinterpret_cast<uintptr_t>(start), Pool::kLarge));
  if (aligned > start) munmap(start, aligned - start);
  char* end = start + size + Pool::kLarge;
  if (end > aligned + size) munmap(aligned + size, end - (aligned + size));
  madvise(aligned, size, MADV_HUGEPAGE);  // where the system has none, it says no, and that is all
  return aligned;
}

void unmap(char* data, size_t size) { munmap(data, size); }

#else

char* map(size_t size) {
  if (size > SIZE_MAX / 4) throw std::bad_alloc();
  void* data = std::aligned_alloc(kSmallestBlock, size);
  if (data == nullptr) throw std::bad_alloc();
  std::memset(data, 0, size);
  return static_cast<char*>(data);
}

void unmap(char* data, size_t) { std::free(data); }

#endif

}  // namespace

Pool::~Pool() {
  for (const Chunk& chunk : chunks_) unmap(chunk.data, chunk.size);
}

size_t Pool::rounded(size_t size) {
  if (size > SIZE_MAX / 4) throw std::bad_alloc();
  if (size > kLarge / 2) return multiple(size, kLarge);
  size_t block = kSmallestBlock;
  while (block < size) block *= 2;
  return block;
}

char* Pool::allocate(size_t size) { return allocate(size, false); }

char* Pool::allocate_zeroed(size_t size) { return allocate(size, true); }

char* Pool::allocate(size_t size, bool zeroed) {
  if (size >= kLarge) {
    char* block = map(size);
    count(static_cast<int64_t>(size));
    return block;
  }
  const int wanted = logarithm(size);
  Free* found = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    int at = wanted;
    while (at < static_cast<int>(free_.size()) && free_[at] == nullptr) ++at;
    if (at == static_cast<int>(free_.size())) return cut(size);  // fresh memory is zeroed
    found = free_[at];
    free_[at] = found->next;
    for (; at > wanted; --at) {  // the upper halves stay free
      auto* half = reinterpret_cast<Free*>(reinterpret_cast<char*>(found) + (size_t{1} << (at - 1)));
      half->next = free_[at - 1];
      free_[at - 1] = half;
    }
  }
  if (zeroed) std::memset(static_cast<void*>(found), 0, size);
  return reinterpret_cast<char*>(found);
}

void Pool::release(char* block, size_t size) {
  if (size >= kLarge) {
    unmap(block, size);
    count(-static_cast<int64_t>(size));
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  auto* freed = reinterpret_cast<Free*>(block);
  freed->next = free_[logarithm(size)];
  free_[logarithm(size)] = freed;
}

void Pool::populate(char* block, size_t size) {
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
  if (size >= kLarge && madvise(block, size, MADV_POPULATE_WRITE) == 0) return;
#endif
  std::memset(block, 0, size);
}

char* Pool::cut(size_t size) {
  if (static_cast<size_t>(end_ - next_) < size) add_chunk(size);
  char* block = next_;
  next_ += size;
  count(static_cast<int64_t>(size));
  return block;
}

void Pool::add_chunk(size_t size) {
  const size_t wanted = std::clamp(chunk_bytes_ / 8, kSmallestChunk, kLargestChunk);
  const size_t chunk = chunk_bytes_ < kLarge ? std::max({kSmallestChunk, chunk_bytes_, size})
                                             : multiple(std::max(wanted, size), kLarge);
  chunks_.reserve(chunks_.size() + 1);
  char* data = map(chunk);
  while (next_ < end_) {  // the rest of the chunk before becomes smaller blocks
    const int block = logarithm(static_cast<size_t>(end_ - next_));
    auto* freed = reinterpret_cast<Free*>(next_);
    freed->next = free_[block];
    free_[block] = freed;
    next_ += size_t{1} << block;
  }
  next_ = data;
  end_ = next_ + chunk;
  chunks_.push_back({next_, chunk});
  chunk_bytes_ += chunk;
}

}  // namespace elasticdl
