#include "index.hpp"

#include <new>

namespace elasticdl {
namespace {

constexpr uint64_t kFewestPlaces = 16;
constexpr uint64_t kMostPlaces = uint64_t{1} << 48;  // below the hash's bits that choose stripes

}  // namespace

Index::Index(double max_load, Pool* pool) : max_load_(max_load), pool_(pool) { grow(1); }

void Index::populate() { Pool::populate(memory_, size_); }

void Index::grow(int64_t num_entries) {
  uint64_t places = kFewestPlaces;
  while (static_cast<int64_t>(max_load_ * static_cast<double>(places)) < num_entries) {
    if (places >= kMostPlaces) throw std::bad_alloc();
    places *= 2;
  }
  const size_t size = Pool::rounded(places * sizeof(Entry));
  char* memory = pool_->allocate_zeroed(size);
  auto* entries = reinterpret_cast<Entry*>(memory);
  const Entry* old = entries_.load(std::memory_order_relaxed);
  const uint64_t num_old = old == nullptr ? 0 : mask_.load(std::memory_order_relaxed) + 1;
  for (uint64_t i = 0; i < num_old; ++i) {
    if (old[i].row != nullptr) place_entry(entries, places - 1, old[i].hash, old[i].row);
  }
  entries_.store(entries, std::memory_order_relaxed);
  mask_.store(places - 1, std::memory_order_relaxed);
  limit_ = static_cast<int64_t>(max_load_ * static_cast<double>(places));
  if (memory_ != nullptr) pool_->release(memory_, size_);
  memory_ = memory;
  size_ = size;
}

}  // namespace elasticdl
