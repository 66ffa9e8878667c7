#include "table.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "rows.hpp"

namespace elasticdl {
namespace {

// Rows sorted at a time: few enough that their ids and gradients stay in the cache.
constexpr int64_t kMostAtOnce = 8192;
constexpr int64_t kFewestAtOnce = 1024;
constexpr int64_t kBytesAtOnce = 512 << 10;
constexpr int64_t kFloatBytes = sizeof(float);
constexpr int64_t kEntriesAhead = 32;    // index entries prefetched ahead
constexpr int64_t kRowsAhead = 16;       // rows found and prefetched before they are used
constexpr int64_t kLinesAhead = 16;      // cache lines of one row that are prefetched
constexpr int64_t kFloatsPerLine = 16;
constexpr size_t kMostSlots = 8;

// Stripes fill at the same rate: different limits keep them from growing at the same time.
double max_load(int stripe) { return 0.5 + 0.2 * stripe / kStripes; }

// Floats from a row to the next: whole cache lines if that costs an eighth at most, else whole quarters of one.
int64_t stride_of(int64_t floats) {
  const int64_t lines = (floats + kFloatsPerLine - 1) / kFloatsPerLine * kFloatsPerLine;
  return 8 * (lines - floats) <= floats ? lines : floats < 4 ? floats : (floats + 3) / 4 * 4;
}

// A number of rows that a stripe hardly exceeds.
int64_t expected_in_stripe(int64_t expected_rows) {
  const double mean = static_cast<double>(expected_rows) / kStripes;
  return static_cast<int64_t>(mean + 4.0 * std::sqrt(mean));
}

template <int kWrite>
inline void prefetch_row(const float* row, int64_t num_floats) {
  const int64_t end = std::min(num_floats, kLinesAhead * kFloatsPerLine);
  for (int64_t at = 0; at < end; at += kFloatsPerLine) __builtin_prefetch(row + at, kWrite);
}

void prefetch_all(const float* values, int64_t num_floats) {
  for (int64_t at = 0; at < num_floats; at += kFloatsPerLine) __builtin_prefetch(values + at, 0, 2);
}

inline void copy_row(const float* row, int64_t dim, float* out) {
  switch (dim) {
    case 1: *out = *row; return;
    case 8: std::memcpy(out, row, 8 * sizeof(float)); return;
    case 16: std::memcpy(out, row, 16 * sizeof(float)); return;
    case 32: std::memcpy(out, row, 32 * sizeof(float)); return;
    case 64: std::memcpy(out, row, 64 * sizeof(float)); return;
    default: std::memcpy(out, row, dim * sizeof(float));
  }
}

}  // namespace

Table::Table(int64_t dim, const Initializer& initializer, const Rule& rule,
             std::vector<float> slot_initial, const Constraint& constraint, int64_t expected_rows)
    : dim_(dim),
      stride_(stride_of(dim * (1 + static_cast<int64_t>(rule.num_slots())))),
      initializer_(initializer),
      rule_(rule),
      slot_initial_(std::move(slot_initial)),
      constraint_(constraint) {
  if (rule.num_slots() > kMostSlots) throw std::invalid_argument("a rule has more than eight slots");
  const int64_t in_stripe = expected_in_stripe(expected_rows);
  for (int number = 0; number < kStripes; ++number) {
    stripes_.push_back(std::make_unique<Stripe>(max_load(number), stride_, &pool_));
    stripes_.back()->slabs.expect(in_stripe);
    stripes_.back()->index.reserve(in_stripe);
    stripes_.back()->index.populate();
  }
}

// The rows of a batch, found some way ahead of their use, so that they are on their way meanwhile.  Stripes are locked in
// their order and until their last row has been used: no two threads wait for each other.
class Table::Walk {
 public:
  Walk(Table* table, const SortedBatch& batch) : table_(table), batch_(batch) {}
  ~Walk() {
    for (int number = first_locked_; number < end_locked_; ++number) unlock(number);
  }
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  // find(stripe, at) returns a row and prefetches it, use(stripe, row, at) follows kRowsAhead calls later.
  template <class Find, class Use>
  void run(Find find, Use use) {
    const int64_t n = batch_.size();
    for (int64_t at = 0; at < std::min(n, kEntriesAhead); ++at) table_->prefetch_entry(batch_, at);
    float* rows[kRowsAhead];
    int64_t found = 0;
    for (int64_t used = -kRowsAhead; used < n; ++used) {
      if (used >= 0) {
        const int number = stripe_of(batch_.hash(used));
        use(*table_->stripes_[number], rows[used % kRowsAhead], used);
        if (used + 1 == batch_.end(number)) unlock_to(number + 1);
      }
      if (found < n) {
        const int number = stripe_of(batch_.hash(found));
        if (number >= end_locked_) lock_to(number);
        table_->prefetch_entry(batch_, found + kEntriesAhead);
        rows[found % kRowsAhead] = find(table_->stripes_[number].get(), found);
        ++found;
      }
    }
  }

 private:
  bool is_in_batch(int number) const { return batch_.begin(number) < batch_.end(number); }
  void unlock(int number) {
    if (is_in_batch(number)) table_->stripes_[number]->mutex.unlock();
  }
  void lock_to(int number) {
    table_->stripes_[number]->mutex.lock();  // those between have no rows in the batch
    end_locked_ = number + 1;
  }
  void unlock_to(int end) {
    for (; first_locked_ < end; ++first_locked_) unlock(first_locked_);
  }

  Table* table_;
  const SortedBatch& batch_;
  int first_locked_ = 0;
  int end_locked_ = 0;
};

void Table::pull(const int64_t* ids, int64_t n, bool create, float* out) {
  SortedBatch batch(std::min(n, kMostAtOnce));
  std::vector<int64_t> missing;
  for (int64_t start = 0; start < n; start += kMostAtOnce) {
    const int64_t* of_batch = ids + start;
    float* rows = out + start * dim_;
    batch.sort(of_batch, std::min(kMostAtOnce, n - start));
    Walk(this, batch).run(
        [&](Stripe* stripe, int64_t at) {
          const int64_t position = batch.position(at);
          float* row = stripe->index.find(batch.hash(at));
          if (row == nullptr && create) row = create_row(stripe, of_batch[position], batch.hash(at));
          if (row != nullptr) prefetch_row<0>(row, dim_);
          __builtin_prefetch(rows + position * dim_, 1);
          return row;
        },
        [&](Stripe&, const float* row, int64_t at) {
          const int64_t position = batch.position(at);
          if (row != nullptr) {
            copy_row(row, dim_, rows + position * dim_);
          } else {
            missing.push_back(position);
          }
        });
    for (const int64_t position : missing) initializer_.fill_row(of_batch[position], dim_, rows + position * dim_);
    missing.clear();
  }
}

void Table::apply(const int64_t* ids, const float* gradients, int64_t n, const float* scalars, float clip) {
  std::unique_ptr<int64_t[]> unique(new int64_t[n]);
  std::unique_ptr<int32_t[]> positions(new int32_t[n]);
  std::unique_ptr<float[]> sums;
  const int64_t num_unique = find_unique(ids, n, unique.get(), positions.get());
  if (num_unique < n) {
    sums.reset(new float[num_unique * dim_]);
    sum_rows(gradients, positions.get(), n, dim_, num_unique, sums.get());
    gradients = sums.get();
  }
  const int64_t batch_size = std::clamp(kBytesAtOnce / (dim_ * kFloatBytes), kFewestAtOnce, kMostAtOnce);
  SortedBatch batch(std::min(num_unique, batch_size));
  for (int64_t start = 0; start < num_unique; start += batch_size) {
    batch.sort(unique.get() + start, std::min(batch_size, num_unique - start));
    const float* of_batch = gradients + start * dim_;
    const int64_t* ids_of_batch = unique.get() + start;
    prefetch_all(of_batch, batch.size() * dim_);
    float* slots[kMostSlots];
    Walk(this, batch).run(
        [&](Stripe* stripe, int64_t at) {
          const int64_t position = batch.position(at);
          float* row = stripe->index.find(batch.hash(at));
          if (row == nullptr) row = create_row(stripe, ids_of_batch[position], batch.hash(at));
          prefetch_row<1>(row, stride_);
          return row;
        },
        [&](Stripe& stripe, float* row, int64_t at) {
          stripe.slabs.preserve(row);
          for (size_t slot = 0; slot < slot_initial_.size(); ++slot) slots[slot] = row + (slot + 1) * dim_;
          const float* gradient = of_batch + batch.position(at) * dim_;
          rule_.apply(row, slots, gradient, static_cast<size_t>(dim_), scalars, clip);
          constraint_.apply(dim_, row);
        });
  }
}

void Table::load(const int64_t* ids, const float* rows, const std::vector<const float*>& slots, int64_t n) {
  SortedBatch batch(n);
  batch.sort(ids, n);
  for (int number = 0; number < kStripes; ++number) {
    Stripe& stripe = *stripes_[number];
    const std::lock_guard<std::mutex> lock(stripe.mutex);
    stripe.index.reserve(batch.end(number) - batch.begin(number));
    for (int64_t at = batch.begin(number); at < batch.end(number); ++at) {
      prefetch_entry(batch, at + kEntriesAhead);
      const int64_t position = batch.position(at);
      const uint64_t hash = batch.hash(at);
      if (stripe.index.find(hash) != nullptr) {
        throw std::invalid_argument("a row of id " + std::to_string(ids[position]) + " is there already");
      }
      float* row = add_row(&stripe, ids[position], hash);
      copy_row(rows + position * dim_, dim_, row);
      for (size_t slot = 0; slot < slots.size(); ++slot) {
        if (slots[slot] != nullptr) copy_row(slots[slot] + position * dim_, dim_, row + (slot + 1) * dim_);
      }
    }
  }
}

float* Table::create_row(Stripe* stripe, int64_t id, uint64_t hash) {
  float* row = add_row(stripe, id, hash);
  initializer_.fill_row(id, dim_, row);
  return row;
}

float* Table::add_row(Stripe* stripe, int64_t id, uint64_t hash) {
  stripe->index.reserve(1);
  float* row = stripe->slabs.add(id);
  for (size_t slot = 0; slot < slot_initial_.size(); ++slot) {
    std::fill_n(row + (slot + 1) * dim_, dim_, slot_initial_[slot]);
  }
  stripe->index.insert(hash, row);
  num_rows_.fetch_add(1, std::memory_order_relaxed);
  return row;
}

std::vector<int64_t> Table::ids() {
  std::vector<int64_t> found;
  found.reserve(size());
  for (const auto& stripe : stripes_) {
    const std::lock_guard<std::mutex> lock(stripe->mutex);
    stripe->slabs.append_ids(&found);
  }
  return found;
}

uint64_t Table::freeze() {
  const std::lock_guard<std::mutex> freezing(freezing_);
  if (open_view_ != 0) throw std::runtime_error("the table is frozen: the earlier frozen view must be closed first");
  std::vector<std::unique_lock<std::mutex>> locks;
  locks.reserve(kStripes);
  for (const auto& stripe : stripes_) locks.emplace_back(stripe->mutex);
  open_view_ = ++last_view_;
  int64_t num_frozen = 0;
  for (const auto& stripe : stripes_) {
    stripe->slabs.freeze();
    stripe->view = open_view_;
    num_frozen += stripe->slabs.num_frozen();
  }
  num_frozen_.store(num_frozen, std::memory_order_relaxed);
  return open_view_;
}

void Table::thaw(uint64_t view) {
  const std::lock_guard<std::mutex> freezing(freezing_);
  if (open_view_ != view) return;
  for (const auto& stripe : stripes_) {
    const std::lock_guard<std::mutex> lock(stripe->mutex);
    stripe->slabs.thaw();
    stripe->view = 0;
  }
  open_view_ = 0;
}

int64_t Table::read_frozen(uint64_t view, Cursor* cursor, int64_t n, int64_t* ids, float* rows,
                           const std::vector<float*>& slots) {
  constexpr int64_t kRowsPerLock = 1024;
  int64_t done = 0;
  while (done < n && cursor->stripe < kStripes) {
    Stripe& stripe = *stripes_[cursor->stripe];
    const std::lock_guard<std::mutex> lock(stripe.mutex);
    if (stripe.view != view) throw std::invalid_argument("the frozen view is closed");
    const int64_t end = std::min(n, done + kRowsPerLock);
    const float* row = nullptr;
    while (done < end && (row = stripe.slabs.next_frozen(&cursor->in_stripe, ids + done)) != nullptr) {
      copy_row(row, dim_, rows + done * dim_);
      for (size_t slot = 0; slot < slots.size(); ++slot) {
        copy_row(row + (slot + 1) * dim_, dim_, slots[slot] + done * dim_);
      }
      ++done;
    }
    if (done < end) {
      ++cursor->stripe;
      cursor->in_stripe = {};
    }
  }
  return done;
}

}  // namespace elasticdl
