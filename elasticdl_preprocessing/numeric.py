"""Layers for numbers: `Normalizer`, and three that return ids: `Discretization`, `LogRound`, `RoundIdentity`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from elasticdl_preprocessing.layer import PACKAGE, ElementwiseLayer, Tensor


@keras.saving.register_keras_serializable(package=PACKAGE)
class Normalizer(ElementwiseLayer):
    """Computes (x − subtractor) / divisor as float32: `Normalizer(2, 4)([2, 4, 6])` is [0.0, 0.5, 1.0].

    Integers and float64 are computed in float64, so that large numbers such as Unix times keep their digits.  Cells not
    stored in a sparse tensor remain not stored.

    Args:
        subtractor: The minimum, for results in [0, 1]; or the mean, for results with mean 0.
        divisor: The range (maximum − minimum), or the standard deviation.

    Raises:
        ValueError: A number is not finite, or the divisor is 0.
    """

    output_dtype = "float32"

    def __init__(self, subtractor: float, divisor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.subtractor = float(subtractor)
        self.divisor = float(divisor)
        if self.divisor == 0 or not math.isfinite(self.divisor) or not math.isfinite(self.subtractor):
            raise ValueError(
                f"Normalizer({subtractor}, {divisor}): the numbers must be finite, and the divisor not 0.  A column "
                "with one value only needs no Normalizer."
            )

    def values(self, values: Tensor) -> Tensor:
        return tf.cast((_widened(values) - self.subtractor) / self.divisor, tf.float32)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "subtractor": self.subtractor, "divisor": self.divisor}


@keras.saving.register_keras_serializable(package=PACKAGE)
class Discretization(ElementwiseLayer):
    """Maps each value to the number of its bucket, int64: `Discretization([0, 1])([-1.0, 0.0, 1.0])` is [0, 1, 2].

    A bucket contains its left boundary: bins [0, 1] make the buckets (−∞, 0), [0, 1) and [1, ∞).  NaN is in the last
    one.  Integers and float64 are compared as float64, so that large numbers such as Unix times keep their digits;
    other types as float32.

    Args:
        bins: Boundaries in ascending order.  Equal boundaries, possible among quantiles, have empty buckets between
            them.

    Raises:
        ValueError: The boundaries are not ascending, or contain NaN.
    """

    def __init__(self, bins: Sequence[float], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bins = [float(boundary) for boundary in bins]
        if any(not a <= b for a, b in zip(self.bins, self.bins[1:], strict=False)) or any(map(math.isnan, self.bins)):
            raise ValueError(f"Discretization: the boundaries fall, or are no numbers: {self.bins}.")

    def num_bins(self) -> int:
        """Return the number of buckets."""
        return len(self.bins) + 1

    def values(self, values: Tensor) -> Tensor:
        values = _widened(values)
        flat = tf.reshape(values, [-1])
        bins = tf.constant([self.bins], values.dtype)
        # Not tf.searchsorted: in a graph it fails for a static shape without elements.
        ids = tf.raw_ops.UpperBound(sorted_inputs=bins, values=flat[tf.newaxis], out_type=tf.int64)[0]
        ids = tf.where(tf.math.is_nan(flat), tf.constant(len(self.bins), tf.int64), ids)  # XLA's search returns 0
        return tf.ensure_shape(tf.reshape(ids, tf.shape(values)), values.shape)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "bins": self.bins}


@keras.saving.register_keras_serializable(package=PACKAGE)
class LogRound(ElementwiseLayer):
    """Maps each value to its rounded logarithm, int64: `LogRound(5, base=10)([1, 90, 1000])` is [0, 2, 3].

    Halves are rounded to the even integer.

    Args:
        num_bins: Number of ids: they are in [0, num_bins).
        default_value: Result for values without a logarithm, or with a rounded logarithm out of range.
        base: Base of the logarithm; None: e.

    Raises:
        ValueError: `num_bins` is not positive, or `base` is not the base of a logarithm.
    """

    def __init__(self, num_bins: int, default_value: int = 0, base: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_bins = _count("LogRound", "num_bins", num_bins)
        self.default_value = int(default_value)
        self.base = None if base is None else float(base)
        if self.base is not None and (not self.base > 0 or self.base == 1):
            raise ValueError(f"LogRound: {base} is no base of a logarithm.")

    def values(self, values: Tensor) -> Tensor:
        logarithm = tf.math.log(tf.cast(values, tf.float64))
        if self.base is not None:
            logarithm /= math.log(self.base)
        return _ids(tf.round(logarithm), self.num_bins, self.default_value)

    def get_config(self) -> dict[str, Any]:
        own = {"num_bins": self.num_bins, "default_value": self.default_value, "base": self.base}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable(package=PACKAGE)
class RoundIdentity(ElementwiseLayer):
    """Rounds each value to an integer id, int64: `RoundIdentity(5)([0.6, 4.4, 7.0])` is [1, 4, 0].

    Halves are rounded to the even integer.

    Args:
        num_buckets: Number of ids: they are in [0, num_buckets).
        default_value: Result for values that are NaN, or out of range after rounding.

    Raises:
        ValueError: `num_buckets` is not positive.
    """

    def __init__(self, num_buckets: int, default_value: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_buckets = _count("RoundIdentity", "num_buckets", num_buckets)
        self.default_value = int(default_value)

    def values(self, values: Tensor) -> Tensor:
        rounded = tf.round(tf.cast(values, tf.float64)) if values.dtype.is_floating else tf.cast(values, tf.int64)
        return _ids(rounded, self.num_buckets, self.default_value)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "num_buckets": self.num_buckets, "default_value": self.default_value}


def _widened(values: Tensor) -> Tensor:
    """Return integers and float64 as float64, since float32 would round them, and other numbers as float32."""
    is_wide = values.dtype.is_integer or values.dtype == tf.float64
    return tf.cast(values, tf.float64 if is_wide else tf.float32)


def _count(layer: str, name: str, number: int) -> int:
    if number is None or number <= 0:
        raise ValueError(f"{layer}: {name} must be positive, not {number}.")
    return int(number)


def _ids(rounded: Tensor, count: int, default: int) -> Tensor:
    """Return whole numbers as int64 ids; NaN and numbers outside of [0, count) become the default."""
    bound = tf.cast(count, rounded.dtype)
    is_id = tf.logical_and(rounded >= 0, rounded < bound)
    known = tf.where(is_id, rounded, tf.zeros_like(rounded))
    return tf.where(is_id, tf.cast(known, tf.int64), tf.constant(default, tf.int64))
