#include "floats.hpp"

#include <algorithm>
#include <cstring>

#include "multiversion.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace elasticdl {
namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint16_t half_of(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
  if (magnitude >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);  // rounds to 2^16 or more
  if (magnitude >= 0x38800000) {  // normal: 2^-14 or more
    const uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1) - 0x38000000;
    return static_cast<uint16_t>(sign | rounded >> 13);
  }
  // Subnormal: adding 0.5 makes the floating-point unit round to the last place of a subnormal half, 2^-24.
  return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5F) - 0x3F000000));
}

float float_of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7FFF;
  if (magnitude > 0x7C00) return float_of(sign | 0x7FC00000 | magnitude << 13);
  if (magnitude == 0x7C00) return float_of(sign | 0x7F800000);
  if (magnitude >= 0x400) return float_of(sign | ((magnitude << 13) + 0x38000000));
  return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24F));
}

void to_half_portable(const float* values, int64_t n, uint16_t* halves) {
  for (int64_t i = 0; i < n; ++i) halves[i] = half_of(values[i]);
}

void from_half_portable(const uint16_t* halves, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = float_of_half(halves[i]);
}

#if defined(__x86_64__)

bool has_f16c() {
  static const bool has = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  return has;
}

__attribute__((target("avx,f16c"))) int64_t to_half_eights(const float* values, int64_t n, uint16_t* halves) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + i), eight);
  }
  return i;
}

__attribute__((target("avx,f16c"))) int64_t from_half_eights(const uint16_t* halves, int64_t n, float* values) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i));
    _mm256_storeu_ps(values + i, _mm256_cvtph_ps(eight));
  }
  return i;
}

#endif

ELASTICDL_CLONES bool any_not_finite(const float* values, int64_t n) {
  uint32_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    found |= (bits & 0x7F800000) == 0x7F800000;
  }
  return found != 0;
}

}  // namespace

void to_half(const float* values, int64_t n, uint16_t* halves) {
  int64_t done = 0;
#if defined(__x86_64__)
  if (has_f16c()) done = to_half_eights(values, n, halves);
#endif
  to_half_portable(values + done, n - done, halves + done);
}

void from_half(const uint16_t* halves, int64_t n, float* values) {
  int64_t done = 0;
#if defined(__x86_64__)
  if (has_f16c()) done = from_half_eights(halves, n, values);
#endif
  from_half_portable(halves + done, n - done, values + done);
}

ELASTICDL_CLONES void to_bfloat16(const float* values, int64_t n, uint16_t* halves) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const uint32_t nan = bits >> 16 | 0x40;  // quiet, so that it stays a NaN
    halves[i] = static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
  }
}

ELASTICDL_CLONES void from_bfloat16(const uint16_t* halves, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(halves[i]) << 16;
    std::memcpy(values + i, &bits, sizeof(bits));
  }
}

bool all_finite(const float* values, int64_t n) {
  constexpr int64_t kBlock = 16384;
  for (int64_t start = 0; start < n; start += kBlock) {
    if (any_not_finite(values + start, std::min(kBlock, n - start))) return false;
  }
  return true;
}

}  // namespace elasticdl
