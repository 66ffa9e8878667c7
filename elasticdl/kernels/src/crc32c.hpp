// Castagnoli's CRC-32, by the processor's instruction where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace elasticdl {

// Continues from `checksum`, that of the bytes before; 0 at the start.
uint32_t crc32c(uint32_t checksum, const void* data, size_t size);

// The same from tables alone, for processors without the instruction and for tests.
uint32_t crc32c_portable(uint32_t checksum, const void* data, size_t size);

}  // namespace elasticdl
