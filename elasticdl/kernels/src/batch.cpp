#include "batch.hpp"

namespace elasticdl {
namespace {

ELASTICDL_CLONES void hash_ids(const int64_t* ids, int64_t n, uint64_t* hashes) {
  for (int64_t i = 0; i < n; ++i) hashes[i] = hash_id(ids[i]);
}

}  // namespace

SortedBatch::SortedBatch(int64_t capacity)
    : unsorted_(new uint64_t[capacity]), hashes_(new uint64_t[capacity]), positions_(new int32_t[capacity]) {}

void SortedBatch::sort(const int64_t* ids, int64_t n) {
  hash_ids(ids, n, unsorted_.get());
  std::array<int64_t, kStripes> counts{};
  for (int64_t i = 0; i < n; ++i) ++counts[stripe_of(unsorted_[i])];
  std::array<int64_t, kStripes> next{};
  begins_[0] = 0;
  for (int stripe = 0; stripe < kStripes; ++stripe) {
    next[stripe] = begins_[stripe];
    begins_[stripe + 1] = begins_[stripe] + counts[stripe];
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = next[stripe_of(unsorted_[i])]++;
    hashes_[at] = unsorted_[i];
    positions_[at] = static_cast<int32_t>(i);
  }
}

}  // namespace elasticdl
