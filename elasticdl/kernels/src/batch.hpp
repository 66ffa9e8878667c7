// The ids of one call in the order of their stripes.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "hashing.hpp"
#include "multiversion.hpp"

namespace elasticdl {

constexpr int kStripeShift = 48;  // below the bits of the bucket, which all ids of a PS may share in part
constexpr int kStripes = 64;

inline int stripe_of(uint64_t hash) { return static_cast<int>(hash >> kStripeShift) & (kStripes - 1); }

// A counting sort: within a stripe ids keep their order.
class SortedBatch {
 public:
  explicit SortedBatch(int64_t capacity);

  void sort(const int64_t* ids, int64_t n);

  int64_t size() const { return begins_[kStripes]; }
  int64_t begin(int stripe) const { return begins_[stripe]; }
  int64_t end(int stripe) const { return begins_[stripe + 1]; }
  uint64_t hash(int64_t at) const { return hashes_[at]; }
  // Where the id was in the call.
  int64_t position(int64_t at) const { return positions_[at]; }

 private:
  std::unique_ptr<uint64_t[]> unsorted_;
  std::unique_ptr<uint64_t[]> hashes_;
  std::unique_ptr<int32_t[]> positions_;
  std::array<int64_t, kStripes + 1> begins_{};
};

}  // namespace elasticdl
