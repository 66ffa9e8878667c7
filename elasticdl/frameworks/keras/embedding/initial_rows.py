"""Initial rows as operations of TensorFlow: what an exported model answers for ids that were never trained.

The same numbers as those of the parameter servers (kernels/src/initializer.cpp): uniform ones to the bit, normal ones
to the last bit but one, because the quantiles are TensorFlow's own.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from elasticdl.frameworks.framework import InitialRow

Tensor = Any

_GOLDEN = 0x9E3779B97F4A7C15
_TWO_SIGMA_TAIL = 0.022750131948179195  # the probability of less than -2 of a standard normal


def initial_rows(initial: InitialRow, ids: Tensor, dim: int) -> Tensor:
    """[n, dim] float32 for `ids` [n] int64."""
    if initial.kind == "constant":
        return tf.fill([tf.size(ids), dim], tf.constant(initial.a, tf.float32))
    numbers = _uniform_numbers(initial.key, ids, dim)
    if initial.kind == "uniform":
        return tf.cast(initial.a + (initial.b - initial.a) * numbers, tf.float32)
    if initial.kind == "truncated_normal":
        numbers = _TWO_SIGMA_TAIL + (1.0 - 2.0 * _TWO_SIGMA_TAIL) * numbers
    return tf.cast(initial.a + initial.b * tf.math.ndtri(numbers), tf.float32)


def _uniform_numbers(key: int, ids: Tensor, dim: int) -> Tensor:
    """Float64 numbers in (0, 1) of (key, id, column) alone."""
    columns = tf.bitcast(tf.range(dim, dtype=tf.int64), tf.uint64) * _unsigned(_GOLDEN)
    row_keys = _mix64(tf.bitwise.bitwise_xor(_mix64(tf.bitcast(ids, tf.uint64)), _unsigned(key)))
    hashes = tf.bitwise.right_shift(_mix64(row_keys[:, None] + columns), _unsigned(11))
    return (tf.cast(tf.bitcast(hashes, tf.int64), tf.float64) + 0.5) * 2.0**-53


def _mix64(values: Tensor) -> Tensor:
    """See kernels/src/hashing.hpp."""
    mixed = values + _unsigned(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, _unsigned(shift))) * _unsigned(factor)
    return tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, _unsigned(31)))


def _unsigned(value: int) -> Tensor:
    return tf.constant(value, tf.uint64)
