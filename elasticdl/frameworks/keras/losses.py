"""The loss of a minibatch: the user's `loss`, weights of samples, and what the model's layers add.

Knows in which ways a minibatch may be filled up with samples of weight 0 so that its loss stays the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticdl.frameworks.keras.examples import Examples
from elasticdl_client.errors import ModelDefinitionError

Loss = Callable[..., Any]


class TotalLoss:
    """The mean loss of a minibatch and the model's own losses."""

    def __init__(self, model: Any, loss: Loss) -> None:
        self._model = model
        self._loss = loss
        self._takes_weights = _takes_weights(loss)
        self._shape: tuple[Any, Any, int] | None = None  # specs of labels and predictions, rank of the loss

    def __call__(self, examples: Examples, presence: Any = None) -> Any:
        """Traceable; a float32 scalar.

        Args:
            presence: weight [batch] of each sample beside the user's, see `presence`; None: all are there.
        """
        predictions = self._model(examples.features, training=True)
        value = self._mean(examples, predictions, presence)
        total = tf.cast(value, tf.float32)
        for extra in self._model.losses:
            total += tf.cast(tf.reduce_sum(extra), tf.float32)
        return total

    def can_weigh(self) -> bool:
        """Whether `presence` counts; known once traced with it."""
        if self._shape is None:
            return False
        labels, predictions, rank = self._shape
        if isinstance(self._loss, keras.losses.Loss) or rank > 0:
            return True
        return self._takes_weights and _is_mean(self._loss, labels, predictions)

    def presence(self, count: int, size: int) -> Any:
        """Weights [size] with which the loss of `size` samples is that of the first `count`."""
        weights = np.zeros(size, np.float32)
        is_sum = isinstance(self._loss, keras.losses.Loss) and self._loss.reduction == "sum"
        weights[:count] = 1.0 if is_sum else size / count
        return weights

    def _mean(self, examples: Examples, predictions: Any, presence: Any) -> Any:
        weights = examples.weights
        if presence is not None:
            weights = presence if weights is None else _times(weights, presence)
        if weights is not None and self._takes_weights:
            values = tf.convert_to_tensor(self._loss(examples.labels, predictions, weights))
            value = tf.reduce_mean(values)
        else:
            values = tf.convert_to_tensor(self._loss(examples.labels, predictions))
            is_weighted = weights is not None and (values.shape.rank or examples.weights is not None)
            value = _weighted_mean(values, weights) if is_weighted else tf.reduce_mean(values)
        if presence is not None:
            specs = [tf.nest.map_structure(_spec, part) for part in (examples.labels, predictions)]
            self._shape = (specs[0], specs[1], values.shape.rank)
        return value


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


def _spec(tensor: Any) -> Any:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _is_mean(loss: Loss, labels: Any, predictions: Any) -> bool:
    """Whether a loss that returns one number is a mean over samples, tried on numbers."""
    try:
        shown = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), labels)
        guessed = tf.nest.map_structure(
            lambda spec: tf.random.stateless_uniform(spec.shape, (1, 2), 0.1, 0.9), predictions
        )
        size = tf.nest.flatten(predictions)[0].shape[0]
        count = size // 2 + 1
        some = tf.nest.map_structure(lambda part: part[:count], (shown, guessed))
        weights = tf.concat([tf.fill([count], size / count), tf.zeros([size - count])], 0)
        expected = float(loss(*some, tf.ones([count])))
        return bool(np.isclose(float(loss(shown, guessed, weights)), expected, rtol=1e-4, atol=1e-6))
    except Exception:  # noqa: BLE001  it takes no such numbers: then nothing is known of it
        return False
