#include "constraint.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace elasticdl {
namespace {

constexpr float kEpsilon = 1e-7F;  // keras.config.epsilon()

}  // namespace

Constraint::Constraint(const std::string& kind, double a, double b, double rate)
    : a_(static_cast<float>(a)), b_(static_cast<float>(b)), rate_(static_cast<float>(rate)) {
  if (kind == "none") {
    kind_ = Kind::kNone;
  } else if (kind == "non_neg") {
    kind_ = Kind::kNonNeg;
  } else if (kind == "max_norm") {
    kind_ = Kind::kMaxNorm;
  } else if (kind == "unit_norm") {
    kind_ = Kind::kUnitNorm;
  } else if (kind == "min_max_norm") {
    kind_ = Kind::kMinMaxNorm;
  } else {
    throw std::invalid_argument("there is no constraint " + kind);
  }
}

void Constraint::change(int64_t dim, float* row) const {
  if (kind_ == Kind::kNonNeg) {
    for (int64_t i = 0; i < dim; ++i) row[i] = row[i] < 0.0F ? 0.0F : row[i];  // NaN stays NaN
    return;
  }
  double squares = 0.0;
  for (int64_t i = 0; i < dim; ++i) squares += static_cast<double>(row[i]) * row[i];
  const float norm = std::sqrt(static_cast<float>(squares));
  if (kind_ == Kind::kUnitNorm) {
    for (int64_t i = 0; i < dim; ++i) row[i] /= kEpsilon + norm;
    return;
  }
  const float wanted = kind_ == Kind::kMaxNorm
                           ? std::min(std::max(norm, 0.0F), a_)
                           : rate_ * std::min(std::max(norm, a_), b_) + (1.0F - rate_) * norm;
  const float factor = wanted / (kEpsilon + norm);
  for (int64_t i = 0; i < dim; ++i) row[i] *= factor;
}

}  // namespace elasticdl
