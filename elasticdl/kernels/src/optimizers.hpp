// Update rules of Keras 3's optimizers on floats that lie side by side: a row, or any slice of a dense vector.
//
// All are element-wise and keep no state of their own, so any thread may use a rule at any time.  The order of
// operations is Keras's and nothing is contracted or reassociated: results are the same bits on every processor,
// and those of the NumPy oracle.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace elasticdl {

class Rule {
 public:
  // Scalars that every update has: [0] the learning rate, [1] the weight decay.  Then by kind:
  //   Adam, AdamW  [2] rate · sqrt(1 - beta_2^t) / (1 - beta_1^t)
  //   Adamax       [2] 1 - beta_1^t
  //   Nadam        [2] u_(t+1)  [3] 1 - U_(t+1)  [4] 1 - u_t  [5] 1 - U_t  [6] 1 - beta_2^t, U the product of all u
  //   Ftrl         [2] 2 · (l2 + beta / (2 · rate))
  size_t num_slots() const { return num_slots_; }
  size_t num_scalars() const { return num_scalars_; }

  // One update of n weights in place.
  //   slots: num_slots() arrays of n floats; changed.
  //   gradient: n floats; not changed.
  //   scalars: num_scalars() of this update.
  //   clip: each gradient is clipped to [-clip, clip] first; 0: not.
  // Arrays must not overlap.
  void apply(float* weights, float* const* slots, const float* gradient, size_t n, const float* scalars,
             float clip = 0.0f) const;

 private:
  using Kernel = void (*)(float* weights, float* const* slots, const float* gradient, size_t n, const float* scalars,
                          const float* options, float limit);
  friend Rule make_rule(const std::string& kind, const std::map<std::string, double>& options);

  Rule(Kernel kernel, size_t num_slots, size_t num_scalars, std::vector<float> options);

  Kernel kernel_;
  size_t num_slots_;
  size_t num_scalars_;
  std::vector<float> options_;  // as the kernel wants them
};

// kind and options by Keras's names, without the learning rate; booleans are 0 and 1; missing ones have Keras's default.
// Throws std::invalid_argument: the kind or an option is not known; named.
Rule make_rule(const std::string& kind, const std::map<std::string, double>& options);

}  // namespace elasticdl
