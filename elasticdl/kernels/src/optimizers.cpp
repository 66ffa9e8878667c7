#include "optimizers.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "multiversion.hpp"

namespace elasticdl {
namespace {

#define INLINE inline __attribute__((always_inline))
#define EACH(i) _Pragma("GCC ivdep") for (size_t i = 0; i < n; ++i)
#define KERNEL(name)                                                                                              \
  ELASTICDL_CLONES void name(float* __restrict__ w, [[maybe_unused]] float* const* slots,                         \
                             const float* __restrict__ gradient, size_t n, [[maybe_unused]] const float* scalars, \
                             [[maybe_unused]] const float* options, float limit)

INLINE float clipped(float value, float limit) {  // keeps NaN
  value = value > limit ? limit : value;
  return value < -limit ? -limit : value;
}

ELASTICDL_CLONES void decay(float* __restrict__ w, size_t n, float weight_decay, float rate) {
  EACH(i) w[i] -= w[i] * weight_decay * rate;
}

KERNEL(sgd) {
  const float rate = scalars[0];
  EACH(i) w[i] -= clipped(gradient[i], limit) * rate;
}

KERNEL(sgd_momentum) {
  float* __restrict__ velocity = slots[0];
  const float rate = scalars[0], momentum = options[0];
  EACH(i) {
    const float v = velocity[i] * momentum - clipped(gradient[i], limit) * rate;
    velocity[i] = v;
    w[i] += v;
  }
}

KERNEL(sgd_nesterov) {
  float* __restrict__ velocity = slots[0];
  const float rate = scalars[0], momentum = options[0];
  EACH(i) {
    const float change = clipped(gradient[i], limit) * rate;
    const float v = velocity[i] * momentum - change;
    velocity[i] = v;
    w[i] += v * momentum - change;
  }
}

KERNEL(adam) {
  float *__restrict__ first = slots[0], *__restrict__ second = slots[1];
  const float alpha = scalars[2], rest_1 = options[0], rest_2 = options[1], epsilon = options[2];
  EACH(i) {
    const float g = clipped(gradient[i], limit);
    const float m = first[i] + (g - first[i]) * rest_1;
    const float v = second[i] + (g * g - second[i]) * rest_2;
    first[i] = m;
    second[i] = v;
    w[i] -= m * alpha / (std::sqrt(v) + epsilon);
  }
}

KERNEL(adam_amsgrad) {
  float *__restrict__ first = slots[0], *__restrict__ second = slots[1], *__restrict__ largest = slots[2];
  const float alpha = scalars[2], rest_1 = options[0], rest_2 = options[1], epsilon = options[2];
  EACH(i) {
    const float g = clipped(gradient[i], limit);
    const float m = first[i] + (g - first[i]) * rest_1;
    const float v = second[i] + (g * g - second[i]) * rest_2;
    const float v_hat = largest[i] > v ? largest[i] : v;
    first[i] = m;
    second[i] = v;
    largest[i] = v_hat;
    w[i] -= m * alpha / (std::sqrt(v_hat) + epsilon);
  }
}

KERNEL(adamax) {
  float *__restrict__ first = slots[0], *__restrict__ norm = slots[1];
  const float rate = scalars[0], correction = scalars[2], rest_1 = options[0], beta_2 = options[1];
  const float epsilon = options[2];
  EACH(i) {
    const float g = clipped(gradient[i], limit);
    const float m = first[i] + (g - first[i]) * rest_1;
    const float decayed = beta_2 * norm[i], size = std::fabs(g);
    const float u = decayed > size ? decayed : size;
    first[i] = m;
    norm[i] = u;
    w[i] -= rate * m / (correction * (u + epsilon));
  }
}

KERNEL(nadam) {
  float *__restrict__ first = slots[0], *__restrict__ second = slots[1];
  const float rate = scalars[0], next_u = scalars[2], next_rest = scalars[3], rest_u = scalars[4];
  const float rest = scalars[5], correction = scalars[6];
  const float rest_1 = options[0], rest_2 = options[1], epsilon = options[2];
  EACH(i) {
    const float g = clipped(gradient[i], limit);
    const float m = first[i] + (g - first[i]) * rest_1;
    const float v = second[i] + (g * g - second[i]) * rest_2;
    first[i] = m;
    second[i] = v;
    const float m_hat = next_u * m / next_rest + rest_u * g / rest;
    w[i] -= m_hat * rate / (std::sqrt(v / correction) + epsilon);
  }
}

KERNEL(adagrad) {
  float* __restrict__ accumulator = slots[0];
  const float rate = scalars[0], epsilon = options[0];
  EACH(i) {
    const float g = clipped(gradient[i], limit);
    const float a = accumulator[i] + g * g;
    accumulator[i] = a;
    w[i] -= rate * g / std::sqrt(a + epsilon);
  }
}

INLINE float moved(float average, float value, float rho, float rest) { return rho * average + rest * value; }

KERNEL(rmsprop) {
  float* __restrict__ velocity = slots[0];
  const float rate = scalars[0], rho = options[0], rest = options[1], epsilon = options[3];
  EACH(i) {
    const float g = clipped(gradient[i], limit);
    velocity[i] = moved(velocity[i], g * g, rho, rest);
    w[i] -= rate * g / std::sqrt(velocity[i] + epsilon);
  }
}

KERNEL(rmsprop_momentum) {
  float *__restrict__ velocity = slots[0], *__restrict__ momenta = slots[1];
  const float rate = scalars[0], rho = options[0], rest = options[1], momentum = options[2], epsilon = options[3];
  EACH(i) {
    const float g = clipped(gradient[i], limit);
    velocity[i] = moved(velocity[i], g * g, rho, rest);
    momenta[i] = momentum * momenta[i] + rate * g / std::sqrt(velocity[i] + epsilon);
    w[i] -= momenta[i];
  }
}

KERNEL(rmsprop_centered) {
  float *__restrict__ velocity = slots[0], *__restrict__ average = slots[1];
  const float rate = scalars[0], rho = options[0], rest = options[1], epsilon = options[3];
  EACH(i) {
    const float g = clipped(gradient[i], limit);
    velocity[i] = moved(velocity[i], g * g, rho, rest);
    average[i] = moved(average[i], g, rho, rest);
    w[i] -= rate * g / std::sqrt(velocity[i] - average[i] * average[i] + epsilon);
  }
}

KERNEL(rmsprop_momentum_centered) {
  float *__restrict__ velocity = slots[0], *__restrict__ momenta = slots[1], *__restrict__ average = slots[2];
  const float rate = scalars[0], rho = options[0], rest = options[1], momentum = options[2], epsilon = options[3];
  EACH(i) {
    const float g = clipped(gradient[i], limit);
    velocity[i] = moved(velocity[i], g * g, rho, rest);
    average[i] = moved(average[i], g, rho, rest);
    const float denominator = std::sqrt(velocity[i] - average[i] * average[i] + epsilon);
    momenta[i] = momentum * momenta[i] + rate * g / denominator;
    w[i] -= momenta[i];
  }
}

KERNEL(adadelta) {
  float *__restrict__ gradients = slots[0], *__restrict__ changes = slots[1];
  const float rate = scalars[0], rho = options[0], rest = options[1], epsilon = options[2];
  EACH(i) {
    const float g = clipped(gradient[i], limit);
    gradients[i] = moved(gradients[i], g * g, rho, rest);
    const float change = -(std::sqrt(changes[i] + epsilon) * g / std::sqrt(gradients[i] + epsilon));
    changes[i] = moved(changes[i], change * change, rho, rest);
    w[i] += rate * change;
  }
}

template <class Power>
INLINE void ftrl_with(Power power, float* __restrict__ w, float* const* slots, const float* __restrict__ gradient,
                      size_t n, const float* scalars, const float* options, float limit) {
  float *__restrict__ accumulator = slots[0], *__restrict__ linear = slots[1];
  const float rate = scalars[0], twice_l2 = scalars[2], exponent = options[0], l1 = options[1];
  const float twice_shrinkage = options[2];
  EACH(i) {
    const float g = clipped(gradient[i], limit);
    const float a = accumulator[i] + g * g;
    const float powered = power(a, exponent);
    const float l = linear[i] + (g + twice_shrinkage * w[i] - (powered - power(accumulator[i], exponent)) / rate * w[i]);
    linear[i] = l;
    w[i] = (clipped(l, l1) - l) / (powered / rate + twice_l2);
    accumulator[i] = a;
  }
}

KERNEL(ftrl) {
  ftrl_with([](float value, float) { return std::sqrt(value); }, w, slots, gradient, n, scalars, options, limit);
}

KERNEL(ftrl_power) {
  ftrl_with([](float value, float exponent) { return std::pow(value, exponent); }, w, slots, gradient, n, scalars,
            options, limit);
}

// Keras's options with its defaults; no option may be left after the last one read.
class Options {
 public:
  Options(std::string kind, const std::map<std::string, double>& given) : kind_(std::move(kind)), left_(given) {}

  double take(const std::string& name, double otherwise) {
    const auto found = left_.find(name);
    if (found == left_.end()) return otherwise;
    const double value = found->second;
    left_.erase(found);
    return value;
  }

  void done() const {
    if (left_.empty()) return;
    throw std::invalid_argument("the optimizer " + kind_ + " has no option " + left_.begin()->first);
  }

 private:
  std::string kind_;
  std::map<std::string, double> left_;
};

}  // namespace

Rule::Rule(Kernel kernel, size_t num_slots, size_t num_scalars, std::vector<float> options)
    : kernel_(kernel), num_slots_(num_slots), num_scalars_(num_scalars), options_(std::move(options)) {}

void Rule::apply(float* weights, float* const* slots, const float* gradient, size_t n, const float* scalars,
                 float clip) const {
  const float limit = clip > 0 ? clip : std::numeric_limits<float>::infinity();
  if (scalars[1] == 0.0f) {
    kernel_(weights, slots, gradient, n, scalars, options_.data(), limit);
    return;
  }
  constexpr size_t kBlock = 4096;  // floats: decayed values are still in the cache when the kernel reads them
  float* block_slots[3] = {};
  for (size_t start = 0; start < n; start += kBlock) {
    const size_t count = std::min(kBlock, n - start);
    for (size_t s = 0; s < num_slots_; ++s) block_slots[s] = slots[s] + start;
    decay(weights + start, count, scalars[1], scalars[0]);
    kernel_(weights + start, block_slots, gradient + start, count, scalars, options_.data(), limit);
  }
}

Rule make_rule(const std::string& kind, const std::map<std::string, double>& given) {
  Options options(kind, given);
  const auto built = [&options](Rule::Kernel kernel, size_t num_slots, size_t num_scalars, std::vector<double> values) {
    options.done();
    return Rule(kernel, num_slots, num_scalars, std::vector<float>(values.begin(), values.end()));
  };
  if (kind == "SGD") {
    const double momentum = options.take("momentum", 0.0);
    const bool nesterov = options.take("nesterov", 0.0) != 0.0;
    if (momentum == 0.0) return built(sgd, 0, 2, {});
    return built(nesterov ? sgd_nesterov : sgd_momentum, 1, 2, {momentum});
  }
  if (kind == "Adagrad") {
    options.take("initial_accumulator_value", 0.1);
    return built(adagrad, 1, 2, {options.take("epsilon", 1e-7)});
  }
  if (kind == "Ftrl") {
    options.take("initial_accumulator_value", 0.1);
    options.take("l2_regularization_strength", 0.0);
    options.take("beta", 0.0);
    const double power = options.take("learning_rate_power", -0.5), l1 = options.take("l1_regularization_strength", 0.0);
    const double shrinkage = options.take("l2_shrinkage_regularization_strength", 0.0);
    return built(power == -0.5 ? ftrl : ftrl_power, 2, 3, {-power, l1, 2.0 * shrinkage});
  }
  if (kind == "RMSprop" || kind == "Adadelta") {
    const double rho = options.take("rho", kind == "RMSprop" ? 0.9 : 0.95), epsilon = options.take("epsilon", 1e-7);
    if (kind == "Adadelta") return built(adadelta, 2, 2, {rho, 1.0 - rho, epsilon});
    const double momentum = options.take("momentum", 0.0);
    const bool centered = options.take("centered", 0.0) != 0.0;
    const std::vector<double> values = {rho, 1.0 - rho, momentum, epsilon};
    if (momentum > 0.0) return built(centered ? rmsprop_momentum_centered : rmsprop_momentum, centered ? 3 : 2, 2, values);
    return built(centered ? rmsprop_centered : rmsprop, centered ? 2 : 1, 2, values);
  }
  const double beta_1 = options.take("beta_1", 0.9), beta_2 = options.take("beta_2", 0.999);
  const double epsilon = options.take("epsilon", 1e-7);
  if (kind == "Adamax") return built(adamax, 2, 3, {1.0 - beta_1, beta_2, epsilon});
  if (kind == "Nadam") {  // Keras subtracts in float32 here, in double elsewhere
    return built(nadam, 2, 7, {1.0f - static_cast<float>(beta_1), 1.0f - static_cast<float>(beta_2), epsilon});
  }
  if (kind == "Adam" || kind == "AdamW") {
    const bool amsgrad = options.take("amsgrad", 0.0) != 0.0;
    return built(amsgrad ? adam_amsgrad : adam, amsgrad ? 3 : 2, 3, {1.0 - beta_1, 1.0 - beta_2, epsilon});
  }
  throw std::invalid_argument("the optimizer " + kind + " is not known");
}

}  // namespace elasticdl
