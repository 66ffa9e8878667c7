// The 64-bit mix that places ids and draws initial values: splitmix64's finalizer.
#pragma once

#include <cstdint>

namespace elasticdl {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ULL;
constexpr int kBucketShift = 54;  // 1,024 buckets: the top ten bits
constexpr int kNumBuckets = 1024;

inline uint64_t mix64(uint64_t value) {
  uint64_t mixed = value + kGolden;
  mixed ^= mixed >> 30;
  mixed *= 0xBF58476D1CE4E5B9ULL;
  mixed ^= mixed >> 27;
  mixed *= 0x94D049BB133111EBULL;
  mixed ^= mixed >> 31;
  return mixed;
}

inline uint64_t hash_id(int64_t id) { return mix64(static_cast<uint64_t>(id)); }

}  // namespace elasticdl
