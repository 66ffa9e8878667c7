#include "crc32.hpp"

#include <array>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace elasticdl {

#if defined(__x86_64__)

namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // reflected
constexpr size_t kLane = sizeof(__m128i);
constexpr size_t kLanes = 4;  // beside each other: a multiplication has a latency of several cycles

using Table = std::array<uint32_t, 256>;

constexpr Table table_of_bytes() {
  Table table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit) remainder = (remainder >> 1) ^ (remainder & 1 ? kPolynomial : 0);
    table[byte] = remainder;
  }
  return table;
}

constexpr Table kTable = table_of_bytes();

inline __m128i lane_at(const uint8_t* bytes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)); }

// A lane moved on by the distance of the factors, and the bytes that lie there.
__attribute__((target("pclmul,sse4.1"))) inline __m128i folded(__m128i lane, __m128i factors, __m128i bytes) {
  const __m128i low = _mm_clmulepi64_si128(lane, factors, 0x00);
  const __m128i high = _mm_clmulepi64_si128(lane, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), bytes);
}

// Of whole lanes, at least kLanes.  Factors, reduction and their order: "Fast CRC Computation for Generic Polynomials
// Using PCLMULQDQ Instruction", Intel, 2009, section 4, of the reflected polynomial.
__attribute__((target("pclmul,sse4.1"))) uint32_t of_lanes(uint32_t remainder, const uint8_t* bytes, size_t size) {
  __m128i lanes[kLanes];
  for (size_t i = 0; i < kLanes; ++i) lanes[i] = lane_at(bytes + i * kLane);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(remainder)));
  size_t position = kLanes * kLane;
  const __m128i by_four_lanes = _mm_set_epi64x(0x01C6E41596, 0x0154442BD4);
  for (; position + kLanes * kLane <= size; position += kLanes * kLane) {
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = folded(lanes[i], by_four_lanes, lane_at(bytes + position + i * kLane));
  }
  const __m128i by_lane = _mm_set_epi64x(0x00CCAA009E, 0x01751997D0);
  __m128i all = lanes[0];
  for (size_t i = 1; i < kLanes; ++i) all = folded(all, by_lane, lanes[i]);
  for (; position < size; position += kLane) all = folded(all, by_lane, lane_at(bytes + position));

  const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);
  all = _mm_xor_si128(_mm_srli_si128(all, 8), _mm_clmulepi64_si128(all, by_lane, 0x10));
  const __m128i by_word = _mm_set_epi64x(0, 0x0163CD6124);
  all = _mm_xor_si128(_mm_srli_si128(all, 4), _mm_clmulepi64_si128(_mm_and_si128(all, low_words), by_word, 0x00));
  const __m128i barrett = _mm_set_epi64x(0x01F7011641, 0x01DB710641);
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(all, low_words), barrett, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), barrett, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(all, quotient), 1));
}

}  // namespace

bool has_crc32() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

uint32_t crc32(uint32_t checksum, const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  uint32_t remainder = ~checksum;
  if (size >= kLanes * kLane) {
    const size_t whole = size / kLane * kLane;
    remainder = of_lanes(remainder, bytes, whole);
    bytes += whole;
    size -= whole;
  }
  for (; size > 0; --size, ++bytes) remainder = (remainder >> 8) ^ kTable[(remainder ^ *bytes) & 0xFF];
  return ~remainder;
}

#else

bool has_crc32() { return false; }

uint32_t crc32(uint32_t, const void*, size_t) { throw std::logic_error("no such instructions: use zlib"); }

#endif

}  // namespace elasticdl
