// The memory of one table, in huge pages where the system has them: random rows then cost no walk through page tables.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace elasticdl {

// Blocks are cut from chunks that grow with the pool; released blocks are used again, and go back to the system with
// the pool.  Blocks of kLarge or more are mapped one by one, and go back at once.
class Pool {
 public:
  static constexpr size_t kLarge = size_t{2} << 20;

  Pool() = default;
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // The size that `allocate` makes of a size: a power of two, or a multiple of kLarge.  Throws std::bad_alloc.
  static size_t rounded(size_t size);

  // A block of a rounded size, aligned to 64 bytes at least, its contents undefined.  Throws std::bad_alloc.
  char* allocate(size_t size);
  // The same, of zeros.
  char* allocate_zeroed(size_t size);
  void release(char* block, size_t size);

  // Touches all pages of a zeroed block.
  static void populate(char* block, size_t size);

  // All that was ever cut from chunks, large blocks, and what `count` adds.
  int64_t num_bytes() const { return num_bytes_.load(std::memory_order_relaxed); }
  void count(int64_t num_bytes) { num_bytes_.fetch_add(num_bytes, std::memory_order_relaxed); }

 private:
  struct Free {
    Free* next;
  };
  struct Chunk {
    char* data;
    size_t size;
  };

  char* allocate(size_t size, bool zeroed);
  char* cut(size_t size);
  void add_chunk(size_t size);

  std::mutex mutex_;
  std::atomic<int64_t> num_bytes_{0};
  std::array<Free*, 22> free_{};  // by the logarithm of their size
  std::vector<Chunk> chunks_;
  size_t chunk_bytes_ = 0;  // of all chunks
  char* next_ = nullptr;    // the rest of the last chunk, not cut yet
  char* end_ = nullptr;
};

}  // namespace elasticdl
