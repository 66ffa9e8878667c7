"""Layers for numbers: `Normalizer`, and three that make ids of them: `Discretization`, `LogRound`, `RoundIdentity`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from elasticdl_preprocessing.layer import PACKAGE, ElementwiseLayer, Tensor


@keras.saving.register_keras_serializable(package=PACKAGE)
class Normalizer(ElementwiseLayer):
    """(x − subtractor) / divisor as float32; of integers and float64 computed in float64: times in seconds keep digits.

    Minimum and range give values in [0, 1]; mean and standard deviation give mean 0 and deviation 1.  Cells that a
    sparse tensor does not store stay unstored.

    Raises:
        ValueError: the divisor is 0.
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
    """The number of the bucket of each value, int64: that of boundaries that are not larger than it.

    Buckets hold their left boundary: with bins [0, 1] they are (−∞, 0), [0, 1) and [1, ∞), the last one with NaN.
    Integers and float64 are compared as float64, so that times in seconds keep their digits; others as float32.

    Args:
        bins: boundaries, rising; of equal ones, as quantiles may have them, the buckets between stay empty.
    """

    def __init__(self, bins: Sequence[float], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bins = [float(boundary) for boundary in bins]
        if any(not a <= b for a, b in zip(self.bins, self.bins[1:], strict=False)) or any(map(math.isnan, self.bins)):
            raise ValueError(f"Discretization: the boundaries fall, or are no numbers: {self.bins}.")

    def num_bins(self) -> int:
        """Number of buckets."""
        return len(self.bins) + 1

    def values(self, values: Tensor) -> Tensor:
        values = _widened(values)
        flat = tf.reshape(values, [-1])
        bins = tf.constant([self.bins], values.dtype)
        # Not tf.searchsorted, which fails in a graph on a static shape without values.
        ids = tf.raw_ops.UpperBound(sorted_inputs=bins, values=flat[tf.newaxis], out_type=tf.int64)[0]
        ids = tf.where(tf.math.is_nan(flat), tf.constant(len(self.bins), tf.int64), ids)  # XLA's search says 0
        return tf.ensure_shape(tf.reshape(ids, tf.shape(values)), values.shape)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "bins": self.bins}


@keras.saving.register_keras_serializable(package=PACKAGE)
class LogRound(ElementwiseLayer):
    """The logarithm of each value, rounded to an id, halves to the even one.

    Where that is not in [0, num_bins), or there is no logarithm, it is `default_value`.

    Args:
        base: of the logarithm; None: e.
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
    """Each value, rounded to an id, halves to the even one; `default_value` where that is not in [0, num_buckets)."""

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
    """Numbers as float64 where float32 would round them: integers and float64; others as float32."""
    is_wide = values.dtype.is_integer or values.dtype == tf.float64
    return tf.cast(values, tf.float64 if is_wide else tf.float32)


def _count(layer: str, name: str, number: int) -> int:
    if number is None or number <= 0:
        raise ValueError(f"{layer}: {name} must be positive, not {number}.")
    return int(number)


def _ids(rounded: Tensor, count: int, default: int) -> Tensor:
    """Whole numbers as ids; one that is not in [0, count), or no number at all, becomes the default."""
    bound = tf.cast(count, rounded.dtype)
    is_id = tf.logical_and(rounded >= 0, rounded < bound)
    known = tf.where(is_id, rounded, tf.zeros_like(rounded))
    return tf.where(is_id, tf.cast(known, tf.int64), tf.constant(default, tf.int64))
