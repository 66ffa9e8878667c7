#include "crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace elasticdl {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // reflected

using Table = std::array<uint32_t, 256>;

struct Tables {
  std::array<Table, 8> slices;

  Tables() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t remainder = byte;
      for (int bit = 0; bit < 8; ++bit) remainder = (remainder >> 1) ^ (remainder & 1 ? kPolynomial : 0);
      slices[0][byte] = remainder;
    }
    for (int slice = 1; slice < 8; ++slice) {
      for (int byte = 0; byte < 256; ++byte) {
        const uint32_t before = slices[slice - 1][byte];
        slices[slice][byte] = (before >> 8) ^ slices[0][before & 0xFF];
      }
    }
  }
};

const Tables& tables() {
  static const Tables made;
  return made;
}

#if defined(__x86_64__)

// A remainder before and after a fixed number of zero bytes: one table for each of its four bytes.
struct Shift {
  std::array<Table, 4> by_byte;

  explicit Shift(size_t num_zeros) {
    for (int bit = 0; bit < 32; ++bit) {
      uint32_t remainder = uint32_t{1} << bit;
      for (size_t i = 0; i < num_zeros; ++i) remainder = (remainder >> 8) ^ tables().slices[0][remainder & 0xFF];
      of_bit[bit] = remainder;
    }
    for (int byte = 0; byte < 4; ++byte) {
      for (int value = 0; value < 256; ++value) {
        uint32_t sum = 0;
        for (int bit = 0; bit < 8; ++bit) {
          if (value >> bit & 1) sum ^= of_bit[8 * byte + bit];
        }
        by_byte[byte][value] = sum;
      }
    }
  }

  uint32_t operator()(uint32_t remainder) const {
    return by_byte[0][remainder & 0xFF] ^ by_byte[1][remainder >> 8 & 0xFF] ^ by_byte[2][remainder >> 16 & 0xFF] ^
           by_byte[3][remainder >> 24];
  }

 private:
  std::array<uint32_t, 32> of_bit{};
};

inline uint64_t word_at(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

// The instruction has a latency of three cycles, so three blocks of the data run beside each other.
template <size_t kBlock>
__attribute__((target("sse4.2"))) uint64_t three_blocks(uint64_t remainder, const uint8_t*& bytes, size_t& size) {
  static const Shift shift(kBlock);
  while (size >= 3 * kBlock) {
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < kBlock; i += 8) {
      remainder = _mm_crc32_u64(remainder, word_at(bytes + i));
      second = _mm_crc32_u64(second, word_at(bytes + kBlock + i));
      third = _mm_crc32_u64(third, word_at(bytes + 2 * kBlock + i));
    }
    remainder = shift(static_cast<uint32_t>(remainder)) ^ static_cast<uint32_t>(second);
    remainder = shift(static_cast<uint32_t>(remainder)) ^ static_cast<uint32_t>(third);
    bytes += 3 * kBlock;
    size -= 3 * kBlock;
  }
  return remainder;
}

__attribute__((target("sse4.2"))) uint32_t crc32c_by_instruction(uint32_t checksum, const uint8_t* bytes,
                                                                 size_t size) {
  uint64_t remainder = static_cast<uint32_t>(~checksum);
  remainder = three_blocks<4096>(remainder, bytes, size);
  remainder = three_blocks<256>(remainder, bytes, size);
  for (; size >= 8; size -= 8, bytes += 8) remainder = _mm_crc32_u64(remainder, word_at(bytes));
  for (; size > 0; --size, ++bytes) remainder = _mm_crc32_u8(static_cast<uint32_t>(remainder), *bytes);
  return ~static_cast<uint32_t>(remainder);
}

#endif

}  // namespace

uint32_t crc32c_portable(uint32_t checksum, const void* data, size_t size) {
  const auto& slices = tables().slices;
  const auto* bytes = static_cast<const uint8_t*>(data);
  uint32_t remainder = ~checksum;
  for (; size >= 8; size -= 8, bytes += 8) {
    const uint32_t low = remainder ^ (bytes[0] | bytes[1] << 8 | bytes[2] << 16 | uint32_t{bytes[3]} << 24);
    remainder = slices[7][low & 0xFF] ^ slices[6][low >> 8 & 0xFF] ^ slices[5][low >> 16 & 0xFF] ^ slices[4][low >> 24] ^
                slices[3][bytes[4]] ^ slices[2][bytes[5]] ^ slices[1][bytes[6]] ^ slices[0][bytes[7]];
  }
  for (; size > 0; --size, ++bytes) remainder = (remainder >> 8) ^ slices[0][(remainder ^ *bytes) & 0xFF];
  return ~remainder;
}

uint32_t crc32c(uint32_t checksum, const void* data, size_t size) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return crc32c_by_instruction(checksum, static_cast<const uint8_t*>(data), size);
#endif
  return crc32c_portable(checksum, data, size);
}

}  // namespace elasticdl
