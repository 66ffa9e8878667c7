// From the hash of an id to its row: open addressing with linear probing.  The hash is a bijection, so it stands for
// the id.
#pragma once

#include <atomic>
#include <cstdint>

#include "pool.hpp"

namespace elasticdl {

class Index {
 public:
  // max_load: entries per place before it grows.
  Index(double max_load, Pool* pool);
  ~Index() { pool_->release(memory_, size_); }
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;

  // Null if there is none.
  float* find(uint64_t hash) const {
    const uint64_t mask = mask_.load(std::memory_order_relaxed);
    const Entry* entries = entries_.load(std::memory_order_relaxed);
    uint64_t place = hash & mask;
    while (entries[place].row != nullptr && entries[place].hash != hash) place = (place + 1) & mask;
    return entries[place].row;
  }

  // Makes room for `num_more` entries, so that `insert` cannot fail.  Throws std::bad_alloc and has changed nothing.
  void reserve(int64_t num_more) {
    if (num_entries_ + num_more > limit_) grow(num_entries_ + num_more);
  }

  // `hash` is not there yet.
  void insert(uint64_t hash, float* row) {
    place_entry(entries_.load(std::memory_order_relaxed), mask_.load(std::memory_order_relaxed), hash, row);
    ++num_entries_;
  }

  // Any thread may, without a lock: the prefetched memory may be gone, and nothing is read.
  void prefetch(uint64_t hash) const {
    const uint64_t mask = mask_.load(std::memory_order_relaxed);
    __builtin_prefetch(entries_.load(std::memory_order_relaxed) + (hash & mask));
  }

  // Touches all its memory now; it is empty.
  void populate();

 private:
  struct Entry {
    uint64_t hash;
    float* row;  // null: free
  };

  static void place_entry(Entry* entries, uint64_t mask, uint64_t hash, float* row) {
    uint64_t place = hash & mask;
    while (entries[place].row != nullptr) place = (place + 1) & mask;
    entries[place] = {hash, row};
  }

  void grow(int64_t num_entries);

  double max_load_;
  Pool* pool_;
  int64_t num_entries_ = 0;
  int64_t limit_ = 0;
  char* memory_ = nullptr;
  size_t size_ = 0;
  std::atomic<Entry*> entries_{nullptr};
  std::atomic<uint64_t> mask_{0};
};

}  // namespace elasticdl
