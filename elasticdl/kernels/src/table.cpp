#include "table.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace elasticdl {
namespace {

constexpr int64_t kPullBatch = 8192;     // ids sorted at a time, so that what belongs to them stays in the cache
constexpr int64_t kEntriesAhead = 32;    // index entries prefetched ahead
constexpr int64_t kRowsAhead = 32;       // rows found and prefetched before they are used
constexpr int64_t kLinesAhead = 16;      // cache lines of one row that are prefetched
constexpr int64_t kFloatsPerLine = 16;

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
  const int64_t in_stripe = expected_in_stripe(expected_rows);
  for (int number = 0; number < kStripes; ++number) {
    stripes_.push_back(std::make_unique<Stripe>(max_load(number), stride_, &pool_));
    stripes_.back()->slabs.expect(in_stripe);
    stripes_.back()->index.reserve(in_stripe);
    stripes_.back()->index.populate();
  }
}

void Table::pull(const int64_t* ids, int64_t n, bool create, float* out) {
  SortedBatch batch(std::min(n, kPullBatch));
  std::vector<int64_t> missing;
  for (int64_t start = 0; start < n; start += kPullBatch) {
    batch.sort(ids + start, std::min(kPullBatch, n - start));
    for (int64_t at = 0; at < kEntriesAhead; ++at) prefetch_entry(batch, at);
    float* out_start = out + start * dim_;
    for (int number = 0; number < kStripes; ++number) {
      if (batch.begin(number) < batch.end(number)) {
        pull_stripe(batch, number, ids + start, create, out_start, &missing);
      }
    }
    for (const int64_t position : missing) initializer_.fill_row(ids[start + position], dim_, out_start + position * dim_);
    missing.clear();
  }
}

void Table::pull_stripe(const SortedBatch& batch, int number, const int64_t* ids, bool create, float* out,
                        std::vector<int64_t>* missing) {
  Stripe& stripe = *stripes_[number];
  const float* rows[kRowsAhead];
  const std::lock_guard<std::mutex> lock(stripe.mutex);
  for (int64_t start = batch.begin(number); start < batch.end(number); start += kRowsAhead) {
    const int64_t n = std::min(kRowsAhead, batch.end(number) - start);
    for (int64_t i = 0; i < n; ++i) {
      prefetch_entry(batch, start + i + kEntriesAhead);
      const uint64_t hash = batch.hash(start + i);
      rows[i] = stripe.index.find(hash);
      if (rows[i] == nullptr && create) rows[i] = create_row(&stripe, ids[batch.position(start + i)], hash);
      if (rows[i] != nullptr) prefetch_row<0>(rows[i], dim_);
    }
    for (int64_t i = 0; i < n; ++i) {
      const int64_t position = batch.position(start + i);
      if (rows[i] != nullptr) {
        copy_row(rows[i], dim_, out + position * dim_);
      } else {
        missing->push_back(position);
      }
    }
  }
}

// Applies the gradients of one call; what it needs for a stripe is allocated once.
class Table::Updater {
 public:
  Updater(Table* table, const SortedBatch& batch, const int64_t* ids, const float* gradients, const float* scalars,
          float clip)
      : table_(*table), batch_(batch), ids_(ids), gradients_(gradients), scalars_(scalars), clip_(clip),
        sum_(new float[table->dim_]), slots_(table->rule_.num_slots()) {
    int64_t most = 0;
    for (int number = 0; number < kStripes; ++number) most = std::max(most, batch.end(number) - batch.begin(number));
    uint64_t places = 4;
    while (places < 2 * static_cast<uint64_t>(most)) places *= 2;
    mask_ = places - 1;
    places_.reset(new int32_t[places]);
    firsts_.reset(new int32_t[most]);
    lasts_.reset(new int32_t[most]);
    following_.reset(new int32_t[most]);
  }

  void update_stripe(int number) {
    begin_ = batch_.begin(number);
    const int64_t num_unique = find_repeated(batch_.end(number) - begin_);
    Stripe& stripe = *table_.stripes_[number];
    float* rows[kRowsAhead];
    const std::lock_guard<std::mutex> lock(stripe.mutex);
    for (int64_t start = 0; start < num_unique; start += kRowsAhead) {
      const int64_t n = std::min(kRowsAhead, num_unique - start);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t at = begin_ + firsts_[start + i];
        table_.prefetch_entry(batch_, at + kEntriesAhead);
        const uint64_t hash = batch_.hash(at);
        const int64_t position = batch_.position(at);
        rows[i] = stripe.index.find(hash);
        if (rows[i] == nullptr) rows[i] = table_.create_row(&stripe, ids_[position], hash);
        prefetch_row<1>(rows[i], table_.stride_);
        prefetch_row<0>(gradients_ + position * table_.dim_, table_.dim_);
      }
      for (int64_t i = 0; i < n; ++i) {
        stripe.slabs.preserve(rows[i]);
        update_row(rows[i], gradient(firsts_[start + i]));
      }
    }
  }

 private:
  // Chains what a stripe's part of the batch repeats; returns how many ids it has.
  int64_t find_repeated(int64_t n) {
    uint64_t mask = 3;
    while (mask + 1 < 2 * static_cast<uint64_t>(n)) mask = 2 * mask + 1;
    std::memset(places_.get(), 0xFF, (mask + 1) * sizeof(int32_t));
    int64_t num_unique = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t hash = batch_.hash(begin_ + i);
      uint64_t place = hash >> 16 & mask;
      int32_t found;
      while ((found = places_[place]) >= 0 && batch_.hash(begin_ + firsts_[found]) != hash) place = (place + 1) & mask;
      following_[i] = -1;
      if (found < 0) {
        places_[place] = static_cast<int32_t>(num_unique);
        firsts_[num_unique] = lasts_[num_unique] = static_cast<int32_t>(i);
        ++num_unique;
      } else {
        following_[lasts_[found]] = static_cast<int32_t>(i);
        lasts_[found] = static_cast<int32_t>(i);
      }
    }
    return num_unique;
  }

  // Summed over a chain.
  const float* gradient(int32_t at) {
    const int64_t dim = table_.dim_;
    const float* only = of(at);
    if (following_[at] < 0) return only;
    std::memcpy(sum_.get(), only, dim * sizeof(float));
    for (at = following_[at]; at >= 0; at = following_[at]) {
      const float* another = of(at);
      for (int64_t k = 0; k < dim; ++k) sum_[k] += another[k];
    }
    return sum_.get();
  }

  const float* of(int32_t at) const { return gradients_ + batch_.position(begin_ + at) * table_.dim_; }

  void update_row(float* row, const float* gradient) {
    for (size_t slot = 0; slot < slots_.size(); ++slot) slots_[slot] = row + (slot + 1) * table_.dim_;
    table_.rule_.apply(row, slots_.data(), gradient, static_cast<size_t>(table_.dim_), scalars_, clip_);
    table_.constraint_.apply(table_.dim_, row);
  }

  Table& table_;
  const SortedBatch& batch_;
  const int64_t* ids_;
  const float* gradients_;
  const float* scalars_;
  const float clip_;
  std::unique_ptr<float[]> sum_;
  std::vector<float*> slots_;
  int64_t begin_ = 0;  // of the stripe in the batch; the arrays below count from there
  uint64_t mask_ = 0;
  std::unique_ptr<int32_t[]> places_;     // of a small hash table: numbers of unique ids; -1: free
  std::unique_ptr<int32_t[]> firsts_;     // by unique id
  std::unique_ptr<int32_t[]> lasts_;      // by unique id
  std::unique_ptr<int32_t[]> following_;  // where the same id comes next; -1: nowhere
};

void Table::apply(const int64_t* ids, const float* gradients, int64_t n, const float* scalars, float clip) {
  SortedBatch batch(n);
  batch.sort(ids, n);
  Updater updater(this, batch, ids, gradients, scalars, clip);
  for (int64_t at = 0; at < kEntriesAhead; ++at) prefetch_entry(batch, at);
  for (int number = 0; number < kStripes; ++number) {
    if (batch.begin(number) < batch.end(number)) updater.update_stripe(number);
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
