"""The loss of a minibatch: the user's `loss`, weights of samples, and what the model's layers add.

Knows in which ways a minibatch may be filled up with samples of weight 0 so that its loss stays the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticdl.frameworks.framework import Floats
from elasticdl.frameworks.keras.examples import Examples
from elasticdl_client.errors import ModelDefinitionError

Loss = Callable[..., Any]


class TotalLoss:
    """The mean loss of a minibatch and the model's own losses."""

    def __init__(self, model: Any, loss: Loss) -> None:
        self._model = model
        self._loss = loss
        self._takes_weights = _takes_weights(loss)
        self.heeds_presence = False  # known once traced with `presence`

    def __call__(self, examples: Examples, presence: Any = None) -> Any:
        """Traceable; a float32 scalar.

        Args:
            presence: weight [batch] of each sample beside the user's, see `presence`; without effect where that would
                not be exact, see `heeds_presence`.  None: all samples are there.
        """
        predictions = self._model(examples.features, training=True)
        if presence is not None:
            self.heeds_presence = self._is_exact(examples, predictions)
        weights = examples.weights
        if presence is not None and self.heeds_presence:
            weights = presence if weights is None else _times(weights, presence)
        total = tf.cast(self._mean(examples.labels, predictions, weights), tf.float32)
        for extra in self._model.losses:
            total += tf.cast(tf.reduce_sum(extra), tf.float32)
        return total

    def presence(self, count: int, size: int) -> Floats:
        """Weights [size] with which the loss of `size` samples is that of the first `count`."""
        weights = np.zeros(size, np.float32)
        is_sum = isinstance(self._loss, keras.losses.Loss) and self._loss.reduction == "sum"
        weights[:count] = 1.0 if is_sum else size / count
        return weights

    def _mean(self, labels: Any, predictions: Any, weights: Any) -> Any:
        if weights is None:
            return tf.reduce_mean(tf.convert_to_tensor(self._loss(labels, predictions)))
        if self._takes_weights:
            return tf.reduce_mean(tf.convert_to_tensor(self._loss(labels, predictions, weights)))
        return _weighted_mean(tf.convert_to_tensor(self._loss(labels, predictions)), weights)

    def _is_exact(self, examples: Examples, predictions: Any) -> bool:
        """Whether weights of 1 change nothing, and those of `presence` leave samples out: tried on numbers."""
        parts = (examples.labels, predictions, examples.weights)
        specs = [_mapped(lambda part: tf.TensorSpec(part.shape, part.dtype), part) for part in parts]
        try:
            with tf.init_scope():
                labels, guesses, weights = (_mapped(partial(_numbers, seed), spec) for seed, spec in enumerate(specs))
                size = int(tf.nest.flatten(guesses)[0].shape[0])
                count = size // 2 + 1
                some = [_mapped(lambda part: part[:count], parts) for parts in (labels, guesses, weights)]
                ones = tf.ones([size]) if weights is None else weights
                presence = tf.constant(self.presence(count, size))
                pairs = [
                    (self._mean(labels, guesses, ones), self._mean(labels, guesses, weights)),
                    (self._mean(labels, guesses, _times(ones, presence)), self._mean(*some)),
                ]
                return all(np.isclose(float(a), float(b), rtol=1e-4, atol=1e-6) for a, b in pairs)
        except Exception:  # noqa: BLE001  it takes no such numbers: then nothing is known of it
            return False


def _takes_weights(loss: Loss) -> bool:
    if isinstance(loss, keras.losses.Loss):
        return True
    try:
        parameters = inspect.signature(loss).parameters
    except ValueError:
        return False
    return "sample_weight" in parameters


def _weighted_mean(values: Any, weights: Any) -> Any:
    if values.shape.rank == 0:
        raise ModelDefinitionError(
            "feed returns sample weights, but loss(labels, predictions) returns one number for the whole minibatch.",
            "Let loss return one value per sample, or take a third argument sample_weight.",
        )
    weights = tf.cast(weights, values.dtype)
    per_sample = tf.reduce_mean(tf.reshape(values, [tf.shape(values)[0], -1]), axis=1)
    return tf.reduce_mean(per_sample * tf.reshape(weights, [-1]))


def _times(weights: Any, presence: Any) -> Any:
    shape = [-1, *[1] * (weights.shape.rank - 1)]
    return weights * tf.reshape(tf.cast(presence, weights.dtype), shape)


def _mapped(function: Callable[[Any], Any], parts: Any) -> Any:
    return None if parts is None else tf.nest.map_structure(function, parts)


def _numbers(seed: int, spec: Any) -> Any:
    """A tensor of the spec: numbers between 0 and 1, zeros where they are whole."""
    if not spec.dtype.is_floating:
        return tf.zeros(spec.shape, spec.dtype)
    return tf.cast(tf.random.stateless_uniform(spec.shape, (seed, 2), 0.1, 0.9), spec.dtype)
