// Constraints of a row after an update: those of Keras, along the row.
#pragma once

#include <cstdint>
#include <string>

namespace elasticdl {

class Constraint {
 public:
  // kind: "none", "non_neg", "max_norm" (a), "unit_norm", "min_max_norm" (a, b, rate).
  // Throws std::invalid_argument for another kind.
  Constraint(const std::string& kind, double a, double b, double rate);

  void apply(int64_t dim, float* row) const {
    if (kind_ != Kind::kNone) change(dim, row);
  }

 private:
  enum class Kind { kNone, kNonNeg, kMaxNorm, kUnitNorm, kMinMaxNorm };

  void change(int64_t dim, float* row) const;

  Kind kind_;
  float a_;
  float b_;
  float rate_;
};

}  // namespace elasticdl
