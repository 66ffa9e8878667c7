// The CRC-32 of gzip and RecordIO, by multiplication without carry.
#pragma once

#include <cstddef>
#include <cstdint>

namespace elasticdl {

// Whether this processor has the instructions; zlib computes the same elsewhere.
bool has_crc32();

// Continues from `checksum`, that of the bytes before; 0 at the start.
uint32_t crc32(uint32_t checksum, const void* data, size_t size);

}  // namespace elasticdl
