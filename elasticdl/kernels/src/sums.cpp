#include "sums.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "floats.hpp"
#include "multiversion.hpp"

namespace elasticdl {
namespace {

constexpr size_t kBlock = 1024;  // elements that stay in the nearest cache while all sources are added

template <typename T>
inline __attribute__((always_inline)) void add_two(const T* one, const T* other, size_t count, T* sum) {
#pragma GCC ivdep  // `sum` may be one of them
  for (size_t i = 0; i < count; ++i) sum[i] = static_cast<T>(one[i] + other[i]);
}

template <typename T>
inline __attribute__((always_inline)) void sum_all(const void* const* sources, size_t num_sources, size_t count,
                                                   void* sum) {
  T block[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t size = std::min(kBlock, count - start);
    const auto source = [&](size_t n) { return static_cast<const T*>(sources[n]) + start; };
    T* result = static_cast<T*>(sum) + start;
    if (num_sources == 2) {
      add_two(source(0), source(1), size, result);
      continue;
    }
    std::memcpy(block, source(0), size * sizeof(T));
    for (size_t n = 1; n < num_sources; ++n) add_two<T>(block, source(n), size, block);
    std::memcpy(result, block, size * sizeof(T));
  }
}

ELASTICDL_CLONES void sum_float32(const void* const* sources, size_t num_sources, size_t count, void* sum) {
  sum_all<float>(sources, num_sources, count, sum);
}
ELASTICDL_CLONES void sum_float64(const void* const* sources, size_t num_sources, size_t count, void* sum) {
  sum_all<double>(sources, num_sources, count, sum);
}
// Unsigned, so that they wrap round: a signed sum that overflows is undefined.
ELASTICDL_CLONES void sum_int8(const void* const* sources, size_t num_sources, size_t count, void* sum) {
  sum_all<uint8_t>(sources, num_sources, count, sum);
}
ELASTICDL_CLONES void sum_int32(const void* const* sources, size_t num_sources, size_t count, void* sum) {
  sum_all<uint32_t>(sources, num_sources, count, sum);
}
ELASTICDL_CLONES void sum_int64(const void* const* sources, size_t num_sources, size_t count, void* sum) {
  sum_all<uint64_t>(sources, num_sources, count, sum);
}

template <void (*kFrom)(const uint16_t*, int64_t, float*), void (*kTo)(const float*, int64_t, uint16_t*)>
void sum_short(const void* const* sources, size_t num_sources, size_t count, void* sum) {
  float total[kBlock], part[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t size = std::min(kBlock, count - start);
    kFrom(static_cast<const uint16_t*>(sources[0]) + start, static_cast<int64_t>(size), total);
    for (size_t n = 1; n < num_sources; ++n) {
      kFrom(static_cast<const uint16_t*>(sources[n]) + start, static_cast<int64_t>(size), part);
      for (size_t i = 0; i < size; ++i) total[i] += part[i];
    }
    kTo(total, static_cast<int64_t>(size), static_cast<uint16_t*>(sum) + start);
  }
}

struct Named {
  const char* name;
  ElementType type;
};

constexpr Named kTypes[] = {
    {"float32", {&sum_float32, 1, 4}},
    {"float64", {&sum_float64, 2, 8}},
    {"float16", {&sum_short<&from_half, &to_half>, 3, 2}},
    {"bfloat16", {&sum_short<&from_bfloat16, &to_bfloat16>, 4, 2}},
    {"int8", {&sum_int8, 5, 1}},
    {"uint8", {&sum_int8, 6, 1}},
    {"int32", {&sum_int32, 7, 4}},
    {"int64", {&sum_int64, 8, 8}},
};

}  // namespace

const ElementType* element_type(const std::string& name) {
  for (const Named& one : kTypes) {
    if (name == one.name) return &one.type;
  }
  return nullptr;
}

}  // namespace elasticdl
