// Short floats on the wire: IEEE float16 and bfloat16, rounded to nearest even.  And a look for NaN and infinity.
#pragma once

#include <cstdint>

namespace elasticdl {

void to_half(const float* values, int64_t n, uint16_t* halves);
void from_half(const uint16_t* halves, int64_t n, float* values);
void to_bfloat16(const float* values, int64_t n, uint16_t* halves);
void from_bfloat16(const uint16_t* halves, int64_t n, float* values);
bool all_finite(const float* values, int64_t n);

}  // namespace elasticdl
