#include "slabs.hpp"

#include <algorithm>
#include <cstring>

namespace elasticdl {
namespace {

constexpr int64_t kFewestRows = 4;
constexpr int64_t kSlabBytes = 256 << 10;  // or eight rows, if that is more
constexpr uint64_t kSavedRows = 64;

}  // namespace

Slabs::Slabs(int64_t stride, Pool* pool) : stride_(stride), pool_(pool) {}

Slabs::~Slabs() {
  for (const Slab& slab : slabs_) pool_->release(slab.memory, slab.size);
}

float* Slabs::add(int64_t id) {
  if (slabs_.empty() || slabs_.back().num_rows == slabs_.back().capacity) add_slab();
  Slab& slab = slabs_.back();
  slab.ids[slab.num_rows] = id;
  ++num_rows_;
  return slab.rows + slab.num_rows++ * stride_;
}

void Slabs::add_slab() {
  const int64_t row_bytes = stride_ * static_cast<int64_t>(sizeof(float)) + static_cast<int64_t>(sizeof(int64_t));
  const int64_t most = std::max<int64_t>(8, kSlabBytes / row_bytes);
  const int64_t wanted = std::max({kFewestRows, num_rows_, num_expected_ - num_rows_});
  if (slabs_.size() == slabs_.capacity()) slabs_.reserve(2 * slabs_.size() + 4);
  by_address_.reserve(slabs_.capacity());
  Slab slab{};
  slab.size = Pool::rounded(static_cast<size_t>(std::min(most, wanted)) * static_cast<size_t>(row_bytes));
  slab.capacity = static_cast<int64_t>(slab.size) / row_bytes;
  slab.memory = pool_->allocate(slab.size);
  slab.rows = reinterpret_cast<float*>(slab.memory);
  slab.ids = reinterpret_cast<int64_t*>(slab.memory + slab.size) - slab.capacity;
  const std::pair<const float*, size_t> begins{slab.rows, slabs_.size()};
  by_address_.insert(std::upper_bound(by_address_.begin(), by_address_.end(), begins), begins);
  slabs_.push_back(std::move(slab));
}

void Slabs::append_ids(std::vector<int64_t>* ids) const {
  for (const Slab& slab : slabs_) ids->insert(ids->end(), slab.ids, slab.ids + slab.num_rows);
}

void Slabs::freeze() {
  for (Slab& slab : slabs_) slab.num_frozen = slab.num_rows;
  num_frozen_ = num_rows_;
}

void Slabs::thaw() {
  for (Slab& slab : slabs_) {
    slab.num_frozen = 0;
    slab.saved_at.reset();
  }
  pool_->count(-static_cast<int64_t>(saved_.size() * kSavedRows * stride_ * sizeof(float)));
  saved_.clear();
  num_saved_ = 0;
  num_frozen_ = 0;
}

const float* Slabs::next_frozen(Cursor* cursor, int64_t* id) const {
  for (; cursor->slab < slabs_.size(); ++cursor->slab, cursor->row = 0) {
    const Slab& slab = slabs_[cursor->slab];
    if (cursor->row >= slab.num_frozen) continue;
    const int64_t row = cursor->row++;
    *id = slab.ids[row];
    const uint64_t saved = slab.saved_at ? slab.saved_at[row] : 0;
    if (saved == 0) return slab.rows + row * stride_;
    return saved_[(saved - 1) / kSavedRows].get() + static_cast<int64_t>((saved - 1) % kSavedRows) * stride_;
  }
  return nullptr;
}

void Slabs::save(const float* row) {
  Slab& slab = slab_of(row);
  const int64_t number = (row - slab.rows) / stride_;
  if (number >= slab.num_frozen) return;
  if (!slab.saved_at) slab.saved_at = std::make_unique<uint64_t[]>(slab.num_frozen);
  if (slab.saved_at[number] != 0) return;
  if (num_saved_ == saved_.size() * kSavedRows) {
    saved_.push_back(std::unique_ptr<float[]>(new float[kSavedRows * stride_]));
    pool_->count(static_cast<int64_t>(kSavedRows * stride_ * sizeof(float)));
  }
  std::memcpy(saved_.back().get() + num_saved_ % kSavedRows * stride_, row, stride_ * sizeof(float));
  slab.saved_at[number] = ++num_saved_;
}

Slabs::Slab& Slabs::slab_of(const float* row) {
  auto after = std::upper_bound(by_address_.begin(), by_address_.end(), row,
                                [](const float* address, const auto& begins) { return address < begins.first; });
  return slabs_[std::prev(after)->second];
}

}  // namespace elasticdl
