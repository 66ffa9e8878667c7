// An embedding table: ids to rows of floats with the optimizer's slots beside them.  Any method may be called from any
// thread at any time.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "batch.hpp"
#include "constraint.hpp"
#include "index.hpp"
#include "initializer.hpp"
#include "optimizers.hpp"
#include "slabs.hpp"

namespace elasticdl {

// Ids are spread over stripes, each with a lock.  A batch is sorted by stripe, so that each lock is taken once.
// Several locks are taken in their order.
class Table {
 public:
  static constexpr int64_t kLargestBatch = INT32_MAX;  // ids of one call

  // slot_initial: of each of the rule's slots.
  Table(int64_t dim, const Initializer& initializer, const Rule& rule, std::vector<float> slot_initial,
        const Constraint& constraint, int64_t expected_rows);

  int64_t dim() const { return dim_; }
  const Rule& rule() const { return rule_; }
  int64_t size() const { return num_rows_.load(std::memory_order_relaxed); }
  int64_t memory_bytes() const { return pool_.num_bytes(); }

  // Rows into `out` [n, dim]; a missing one is created, or only computed.
  void pull(const int64_t* ids, int64_t n, bool create, float* out);

  // One update of each row by its gradient of [n, dim], those of repeated ids summed first, in their order.
  void apply(const int64_t* ids, const float* gradients, int64_t n, const float* scalars, float clip);

  // Inserts rows [n, dim]; a slot that is null starts fresh.  Throws std::invalid_argument for an id that is there.
  void load(const int64_t* ids, const float* rows, const std::vector<const float*>& slots, int64_t n);

  std::vector<int64_t> ids();

  // Keeps the table as it is now, until `thaw` with the number that it returns.  Throws std::runtime_error if the
  // table is frozen.
  uint64_t freeze();
  void thaw(uint64_t view);
  // Rows when it was frozen.
  int64_t num_frozen() const { return num_frozen_.load(std::memory_order_relaxed); }

  struct Cursor {
    int stripe = 0;
    Slabs::Cursor in_stripe;
  };

  // The next n rows of a frozen table, or as many as there are left; returns how many.  Throws std::invalid_argument if
  // `view` has been thawed.
  int64_t read_frozen(uint64_t view, Cursor* cursor, int64_t n, int64_t* ids, float* rows,
                      const std::vector<float*>& slots);

 private:
  struct alignas(64) Stripe {
    Stripe(double max_load, int64_t stride, Pool* pool) : index(max_load, pool), slabs(stride, pool) {}

    std::mutex mutex;
    Index index;
    Slabs slabs;
    uint64_t view = 0;  // frozen for it; 0: not frozen
  };
  class Walk;

  float* create_row(Stripe* stripe, int64_t id, uint64_t hash);
  // Adds a row that is not there, with fresh slots; its values are still to be filled in.
  float* add_row(Stripe* stripe, int64_t id, uint64_t hash);
  void prefetch_entry(const SortedBatch& batch, int64_t at) const {
    if (at < batch.size()) stripes_[stripe_of(batch.hash(at))]->index.prefetch(batch.hash(at));
  }

  const int64_t dim_;
  const int64_t stride_;
  const Initializer initializer_;
  const Rule rule_;
  const std::vector<float> slot_initial_;
  const Constraint constraint_;
  std::atomic<int64_t> num_rows_{0};
  Pool pool_;  // outlives what it gave to the stripes
  std::vector<std::unique_ptr<Stripe>> stripes_;

  std::mutex freezing_;
  uint64_t last_view_ = 0;
  uint64_t open_view_ = 0;  // 0: none
  std::atomic<int64_t> num_frozen_{0};
};

}  // namespace elasticdl
