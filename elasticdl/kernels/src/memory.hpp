// Zeroed memory that counts itself: what is large comes from the system directly, in huge pages where there are any.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace elasticdl {

constexpr size_t kHugePage = size_t{2} << 20;

class Memory {
 public:
  Memory() = default;
  // Throws std::bad_alloc.  `counter` outlives this.
  Memory(size_t size, std::atomic<int64_t>* counter);
  ~Memory();
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  // Touches all pages now.
  void populate() const;

 private:
  void swap(Memory& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(counter_, other.counter_);
  }

  char* data_ = nullptr;
  size_t size_ = 0;
  std::atomic<int64_t>* counter_ = nullptr;
};

}  // namespace elasticdl
