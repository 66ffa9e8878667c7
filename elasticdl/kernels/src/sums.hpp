// Sums of several members' pieces of one type, always in the order of ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace elasticdl {

// Adds `num_sources` arrays of `count` elements into `sum`, which may be one of them.
using Sum = void (*)(const void* const* sources, size_t num_sources, size_t count, void* sum);

struct ElementType {
  Sum sum;
  uint16_t id;
  size_t size;  // bytes of one element
};

// Of float32, float64, float16, bfloat16, int8, uint8, int32, int64; nullptr: another name.  Short floats are summed as
// float32 and rounded once; whole numbers wrap round.
const ElementType* element_type(const std::string& name);

}  // namespace elasticdl
