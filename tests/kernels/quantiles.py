"""The quantile function of the normal distribution, from correctly rounded operations alone.

Wichura, "Algorithm AS 241: The Percentage Points of the Normal Distribution", Applied Statistics 37 (1988), PPND16:
relative accuracy 1e-16.  Its logarithm is computed here too, because that of a C library differs between machines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

TWO_SIGMA_TAIL = 0.022750131948179195  # the probability of less than -2

_CENTRAL = (
    (
        3.3871328727963666080e0,
        1.3314166789178437745e2,
        1.9715909503065514427e3,
        1.3731693765509461125e4,
        4.5921953931549871457e4,
        6.7265770927008700853e4,
        3.3430575583588128105e4,
        2.5090809287301226727e3,
    ),
    (
        1.0,
        4.2313330701600911252e1,
        6.8718700749205790830e2,
        5.3941960214247511077e3,
        2.1213794301586595867e4,
        3.9307895800092710610e4,
        2.8729085735721942674e4,
        5.2264952788528545610e3,
    ),
)
_MIDDLE = (
    (
        1.42343711074968357734e0,
        4.63033784615654529590e0,
        5.76949722146069140550e0,
        3.64784832476320460504e0,
        1.27045825245236838258e0,
        2.41780725177450611770e-1,
        2.27238449892691845833e-2,
        7.74545014278341407640e-4,
    ),
    (
        1.0,
        2.05319162663775882187e0,
        1.67638483018380384940e0,
        6.89767334985100004550e-1,
        1.48103976427480074590e-1,
        1.51986665636164571966e-2,
        5.47593808499534494600e-4,
        1.05075007164441684324e-9,
    ),
)
_FAR = (
    (
        6.65790464350110377720e0,
        5.46378491116411436990e0,
        1.78482653991729133580e0,
        2.96560571828504891230e-1,
        2.65321895265761230930e-2,
        1.24266094738807843860e-3,
        2.71155556874348757815e-5,
        2.01033439929228813265e-7,
    ),
    (
        1.0,
        5.99832206555887937690e-1,
        1.36929880922735805310e-1,
        1.48753612908506148525e-2,
        7.86869131145613259100e-4,
        1.84631831751005468180e-5,
        1.42151175831644588870e-7,
        2.04426310338993978564e-15,
    ),
)
_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476


def normal_quantile(probability: Doubles) -> Doubles:
    """x with P(X ≤ x) = probability, X standard normal; probabilities in (0, 1)."""
    centred = probability - 0.5
    result = centred * _ratio(_CENTRAL, 0.180625 - centred * centred)
    tail = np.abs(centred) > 0.425
    if tail.any():
        below = np.minimum(probability[tail], 1.0 - probability[tail])
        root = np.sqrt(-_log(below))
        value = np.where(root <= 5.0, _ratio(_MIDDLE, root - 1.6), _ratio(_FAR, root - 5.0))
        result[tail] = np.where(centred[tail] < 0.0, -value, value)
    return result


def _ratio(coefficients: tuple[Sequence[float], Sequence[float]], x: Doubles) -> Doubles:
    return _polynomial(coefficients[0], x) / _polynomial(coefficients[1], x)


def _polynomial(coefficients: Sequence[float], x: Doubles) -> Doubles:
    """Horner's scheme; the lowest coefficient comes first."""
    result = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result *= x
        result += coefficient
    return result


def _log(x: Doubles) -> Doubles:
    """log(m · 2^e) = e · log 2 + 2 · artanh((m − 1) / (m + 1)) with m in [√½, √2): the series converges fast."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < _SQRT_HALF
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    exponent = exponent - small
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial([1.0 / (2 * k + 1) for k in range(12)], ratio * ratio)
    return exponent * _LN2 + 2.0 * ratio * series
