#include "rows.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

#include "hashing.hpp"
#include "multiversion.hpp"

namespace elasticdl {
namespace {

constexpr int64_t kAhead = 16;  // rows prefetched ahead
constexpr int64_t kHashedAtOnce = 128;

template <int64_t kDim>
void gather_fixed(const float* rows, const int32_t* positions, int64_t n, float* out) {
  const int64_t warm = std::max<int64_t>(0, n - kAhead);
  for (int64_t i = 0; i < warm; ++i) {
    __builtin_prefetch(rows + positions[i + kAhead] * kDim);
    std::memcpy(out + i * kDim, rows + positions[i] * kDim, kDim * sizeof(float));
  }
  for (int64_t i = warm; i < n; ++i) std::memcpy(out + i * kDim, rows + positions[i] * kDim, kDim * sizeof(float));
}

ELASTICDL_CLONES void hash_ids(const int64_t* ids, int64_t n, uint64_t* hashes) {
  for (int64_t i = 0; i < n; ++i) hashes[i] = hash_id(ids[i]);
}

ELASTICDL_CLONES void add(const float* __restrict source, int64_t n, float* __restrict target) {
  for (int64_t i = 0; i < n; ++i) target[i] += source[i];
}

ELASTICDL_CLONES void add_16(const float* gradients, const int32_t* positions, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float* source = gradients + i * 16;
    float* target = out + positions[i] * 16LL;
    float sum[16];
    for (int k = 0; k < 16; ++k) sum[k] = target[k] + source[k];
    std::memcpy(target, sum, sizeof(sum));
  }
}

}  // namespace

int64_t find_unique(const int64_t* ids, int64_t n, int64_t* unique, int32_t* positions) {
  uint64_t places = 16;
  while (places < 2 * static_cast<uint64_t>(n)) places *= 2;
  const uint64_t mask = places - 1;
  auto table = std::unique_ptr<int32_t[]>(new int32_t[places]);  // -1: free
  std::memset(table.get(), 0xFF, places * sizeof(int32_t));
  int64_t count = 0;
  uint64_t hashes[kHashedAtOnce];
  for (int64_t start = 0; start < n; start += kHashedAtOnce) {
    const int64_t size = std::min(kHashedAtOnce, n - start);
    hash_ids(ids + start, size, hashes);
    for (int64_t i = 0; i < size; ++i) __builtin_prefetch(&table[hashes[i] & mask]);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t id = ids[start + i];
      uint64_t place = hashes[i] & mask;
      int32_t found;
      while ((found = table[place]) >= 0 && unique[found] != id) place = (place + 1) & mask;
      if (found < 0) {
        found = static_cast<int32_t>(count++);
        table[place] = found;
        unique[found] = id;
      }
      positions[start + i] = found;
    }
  }
  return count;
}

void gather_rows(const float* rows, const int32_t* positions, int64_t n, int64_t dim, float* out) {
  switch (dim) {
    case 1: return gather_fixed<1>(rows, positions, n, out);
    case 4: return gather_fixed<4>(rows, positions, n, out);
    case 8: return gather_fixed<8>(rows, positions, n, out);
    case 16: return gather_fixed<16>(rows, positions, n, out);
    case 32: return gather_fixed<32>(rows, positions, n, out);
    default: break;
  }
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      const char* next = reinterpret_cast<const char*>(rows + positions[i + kAhead] * dim);
      for (int64_t at = 0; at < dim * 4 && at < 512; at += 64) __builtin_prefetch(next + at);
    }
    std::memcpy(out + i * dim, rows + positions[i] * dim, dim * sizeof(float));
  }
}

void sum_rows(const float* gradients, const int32_t* positions, int64_t n, int64_t dim, int64_t num_unique,
              float* out) {
  std::memset(out, 0, num_unique * dim * sizeof(float));
  if (dim == 1) {
    for (int64_t i = 0; i < n; ++i) out[positions[i]] += gradients[i];
  } else if (dim == 16) {
    add_16(gradients, positions, n, out);
  } else {
    for (int64_t i = 0; i < n; ++i) add(gradients + i * dim, dim, out + positions[i] * dim);
  }
}

ELASTICDL_CLONES bool all_within(const int32_t* positions, int64_t n, int64_t bound) {
  const uint32_t largest = bound > 0 ? static_cast<uint32_t>(std::min<int64_t>(bound - 1, INT32_MAX)) : 0;
  bool outside = n > 0 && bound <= 0;
  for (int64_t i = 0; i < n; ++i) outside |= static_cast<uint32_t>(positions[i]) > largest;
  return !outside;
}

ELASTICDL_CLONES bool ids_within(const int64_t* ids, int64_t n, int64_t bound) {
  bool outside = false;
  for (int64_t i = 0; i < n; ++i) outside |= ids[i] < 0 || ids[i] >= bound;
  return !outside;
}

ELASTICDL_CLONES void find_buckets(const int64_t* ids, int64_t n, uint16_t* buckets) {
  for (int64_t i = 0; i < n; ++i) buckets[i] = static_cast<uint16_t>(hash_id(ids[i]) >> kBucketShift);
}

void find_owners(const int64_t* ids, int64_t n, const uint16_t* owners, uint16_t* found) {
  find_buckets(ids, n, found);
  for (int64_t i = 0; i < n; ++i) found[i] = owners[found[i]];
}

}  // namespace elasticdl
