#include "initializer.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "hashing.hpp"
#include "multiversion.hpp"

namespace elasticdl {
namespace {

constexpr double kTwoSigmaTail = 0.022750131948179195;  // the probability of less than -2 of a standard normal
constexpr int64_t kBlock = 64;                          // columns at a time

// Wichura, "Algorithm AS 241: The Percentage Points of the Normal Distribution", Applied Statistics 37 (1988), PPND16.
constexpr double kCentral[2][8] = {
    {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3},
    {1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3, 2.1213794301586595867e4,
     3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3}};
constexpr double kMiddle[2][8] = {
    {1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4},
    {1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1, 1.48103976427480074590e-1,
     1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9}};
constexpr double kFar[2][8] = {
    {6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7},
    {1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2, 7.86869131145613259100e-4,
     1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15}};

// Horner's scheme; the lowest coefficient comes first.
template <int kTerms>
inline double polynomial(const double (&coefficients)[kTerms], double x) {
  double result = coefficients[kTerms - 1];
  for (int term = kTerms - 2; term >= 0; --term) result = result * x + coefficients[term];
  return result;
}

inline double ratio(const double (&coefficients)[2][8], double x) {
  return polynomial(coefficients[0], x) / polynomial(coefficients[1], x);
}

// log(m · 2^e) = e · log 2 + 2 · artanh((m − 1) / (m + 1)) with m in [√½, √2).
double natural_log(double x) {
  constexpr double kSeries[12] = {1.0 / 1,  1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11,
                                  1.0 / 13, 1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21, 1.0 / 23};
  int exponent;
  double mantissa = std::frexp(x, &exponent);
  if (mantissa < 0.7071067811865476) {
    mantissa *= 2.0;
    --exponent;
  }
  const double quotient = (mantissa - 1.0) / (mantissa + 1.0);
  return exponent * 0.6931471805599453 + 2.0 * quotient * polynomial(kSeries, quotient * quotient);
}

double tail_quantile(double probability) {
  const double root = std::sqrt(-natural_log(std::min(probability, 1.0 - probability)));
  const double value = root <= 5.0 ? ratio(kMiddle, root - 1.6) : ratio(kFar, root - 5.0);
  return probability - 0.5 < 0.0 ? -value : value;
}

// Numbers in (0, 1) of the columns first … first + n - 1.
ELASTICDL_CLONES void uniform_numbers(uint64_t row_key, int64_t first, int64_t n, double* uniform) {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = mix64(row_key + static_cast<uint64_t>(first + i) * kGolden);
    uniform[i] = (static_cast<double>(static_cast<int64_t>(hash >> 11)) + 0.5) * 0x1p-53;
  }
}

ELASTICDL_CLONES void central_quantiles(const double* probabilities, int64_t n, double* quantiles) {
  for (int64_t i = 0; i < n; ++i) {
    const double centred = probabilities[i] - 0.5;
    quantiles[i] = centred * ratio(kCentral, 0.180625 - centred * centred);
  }
}

void normal_quantiles(const double* probabilities, int64_t n, double* quantiles) {
  central_quantiles(probabilities, n, quantiles);
  for (int64_t i = 0; i < n; ++i) {
    if (std::fabs(probabilities[i] - 0.5) > 0.425) quantiles[i] = tail_quantile(probabilities[i]);
  }
}

}  // namespace

Initializer::Initializer(const std::string& kind, uint64_t key, double a, double b) : key_(key), a_(a), b_(b) {
  if (kind == "constant") {
    kind_ = Kind::kConstant;
  } else if (kind == "uniform") {
    kind_ = Kind::kUniform;
  } else if (kind == "normal") {
    kind_ = Kind::kNormal;
  } else if (kind == "truncated_normal") {
    kind_ = Kind::kTruncatedNormal;
  } else {
    throw std::invalid_argument("there is no initializer " + kind);
  }
}

void Initializer::fill_row(int64_t id, int64_t dim, float* row) const {
  if (kind_ == Kind::kConstant) {
    std::fill_n(row, dim, static_cast<float>(a_));
    return;
  }
  const uint64_t row_key = mix64(hash_id(id) ^ key_);
  double uniform[kBlock], quantiles[kBlock];
  for (int64_t first = 0; first < dim; first += kBlock) {
    const int64_t n = std::min(kBlock, dim - first);
    uniform_numbers(row_key, first, n, uniform);
    if (kind_ == Kind::kUniform) {
      for (int64_t i = 0; i < n; ++i) row[first + i] = static_cast<float>(a_ + (b_ - a_) * uniform[i]);
      continue;
    }
    if (kind_ == Kind::kTruncatedNormal) {
      constexpr double kKept = 1.0 - 2.0 * kTwoSigmaTail;
      for (int64_t i = 0; i < n; ++i) uniform[i] = kTwoSigmaTail + kKept * uniform[i];
    }
    normal_quantiles(uniform, n, quantiles);
    for (int64_t i = 0; i < n; ++i) row[first + i] = static_cast<float>(a_ + b_ * quantiles[i]);
  }
}

}  // namespace elasticdl
