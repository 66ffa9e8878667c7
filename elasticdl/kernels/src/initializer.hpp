// Initial values of rows: functions of (key, id, column) alone.
#pragma once

#include <cstdint>
#include <string>

namespace elasticdl {

// One counter-based hash per element, and from it additions, multiplications, divisions and square roots alone, each
// correctly rounded: the same bits on every machine.
class Initializer {
 public:
  // kind: "constant" (a), "uniform" (in [a, b)), "normal" and "truncated_normal" (mean a, standard deviation b).
  // Throws std::invalid_argument for another kind.
  Initializer(const std::string& kind, uint64_t key, double a, double b);

  void fill_row(int64_t id, int64_t dim, float* row) const;

 private:
  enum class Kind { kConstant, kUniform, kNormal, kTruncatedNormal };

  Kind kind_;
  uint64_t key_;
  double a_;
  double b_;
};

}  // namespace elasticdl
