// Operations that move rows between ids and tensors: unique ids, gathering, summing, splitting by bucket.
#pragma once

#include <cstdint>
#include <vector>

namespace elasticdl {

// Unique ids in order of first appearance into `unique` [n], each id's position among them into `positions` [n].
// Returns how many there are.
int64_t find_unique(const int64_t* ids, int64_t n, int64_t* unique, int32_t* positions);

// out[i] = rows[positions[i]], rows of `dim` floats.
void gather_rows(const float* rows, const int32_t* positions, int64_t n, int64_t dim, float* out);

// out[positions[i]] += gradients[i] in order of i; `out` [num_unique, dim] is overwritten.
void sum_rows(const float* gradients, const int32_t* positions, int64_t n, int64_t dim, int64_t num_unique, float* out);

// Whether all positions are in [0, bound).
bool all_within(const int32_t* positions, int64_t n, int64_t bound);

// Whether all ids are in [0, bound).
bool ids_within(const int64_t* ids, int64_t n, int64_t bound);

// The bucket of each id.
void find_buckets(const int64_t* ids, int64_t n, uint16_t* buckets);

// The owner of each id's bucket.
void find_owners(const int64_t* ids, int64_t n, const uint16_t* owners, uint16_t* found);

}  // namespace elasticdl
