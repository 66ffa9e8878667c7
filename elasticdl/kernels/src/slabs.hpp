// The rows of one stripe: in slabs that never move, each row's floats followed by its optimizer slots.  Callers hold the
// stripe's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "pool.hpp"

namespace elasticdl {

class Slabs {
 public:
  // stride: floats from a row to the next.
  Slabs(int64_t stride, Pool* pool);
  ~Slabs();
  Slabs(const Slabs&) = delete;
  Slabs& operator=(const Slabs&) = delete;

  int64_t size() const { return num_rows_; }

  // Slabs made from now on are as large as that many rows want them.
  void expect(int64_t num_rows) { num_expected_ = num_rows; }

  // A row, its floats undefined.  Throws std::bad_alloc and has changed nothing.
  float* add(int64_t id);

  // Appends the ids of all rows.
  void append_ids(std::vector<int64_t>* ids) const;

  // From now on `preserve` keeps rows as they are now, until `thaw`.
  void freeze();
  void thaw();
  int64_t num_frozen() const { return num_frozen_; }

  // Call it before a row changes.
  void preserve(const float* row) {
    if (num_frozen_ > 0) save(row);
  }

  struct Cursor {
    size_t slab = 0;
    int64_t row = 0;
  };

  // The next row as it was when frozen; null after the last one.
  const float* next_frozen(Cursor* cursor, int64_t* id) const;

 private:
  struct Slab {
    char* memory;
    size_t size;
    float* rows;
    int64_t* ids;
    int64_t capacity;
    int64_t num_rows = 0;
    int64_t num_frozen = 0;
    std::unique_ptr<uint64_t[]> saved_at;  // by row, from 1; 0: not saved
  };

  void add_slab();
  void save(const float* row);
  Slab& slab_of(const float* row);

  int64_t stride_;
  Pool* pool_;
  int64_t num_rows_ = 0;
  int64_t num_expected_ = 0;
  int64_t num_frozen_ = 0;
  uint64_t num_saved_ = 0;
  std::vector<std::unique_ptr<float[]>> saved_;  // rows as they were when frozen, kSavedRows in each
  std::vector<Slab> slabs_;
  std::vector<std::pair<const float*, size_t>> by_address_;  // where slabs begin, ascending
};

}  // namespace elasticdl
