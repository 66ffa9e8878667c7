"""The compiled functions of a model: forward, forward and backward at given values, one step with its own optimizer.

Each is traced once per mode, whatever the size of a minibatch or the number of its ids.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticdl.frameworks.framework import Floats, Mode, Parameters, Step
from elasticdl.frameworks.keras.clipping import Clipping
from elasticdl.frameworks.keras.examples import Examples, Minibatch, take_apart
from elasticdl.frameworks.keras.model import BuiltModel, assign_flat, flat_tensor
from elasticdl.frameworks.keras.operations import operations_of_graph, stateful_random
from elasticdl.frameworks.keras.seeds import as_int64
from elasticdl.layers.placement import Gathered
from elasticdl_client.errors import ModelDefinitionError

_log = logging.getLogger("elasticdl.keras")

_FEWEST_ROWS = 8
Loss = Callable[..., Any]


class Steps:
    """Compiled functions of one model."""

    def __init__(self, built: BuiltModel, loss: Loss | None, optimizer: Any, jit_compile: bool) -> None:
        self._built = built
        self._loss = loss
        self._weighted_loss = loss is not None and _takes_weights(loss)
        self._optimizer = optimizer
        self._clipping = Clipping.of(optimizer)
        self._jit_compile = jit_compile
        self._dims = {table.name: table.dim for table in built.tables()}
        self._assign = tf.function(self._assigned, input_signature=self._flat_signature(), autograph=False)
        self._functions: dict[tuple[str, Mode], Any] = {}
        self._assigned_from: Parameters | None = None

    def gradients(
        self, minibatch: Minibatch, spec: Any, parameters: Parameters, rows: Mapping[str, Floats], seed: int
    ) -> Step:
        """See `Framework.gradients`; `spec` is that of the minibatch's element."""
        key = ("gradients", minibatch.mode)
        if key not in self._functions:
            signature = [*self._flat_signature(), *self._batch_signature(spec), tf.TensorSpec((), tf.int64)]
            self._functions[key] = self._compiled(self._gradient(minibatch.mode), signature)
        self._assigned_from = None
        loss, gradient, change, row_gradients = self._functions[key](
            parameters.trainable,
            parameters.non_trainable,
            self._padded(rows),
            minibatch.positions,
            minibatch.element,
            tf.constant(as_int64(seed), tf.int64),
        )
        return Step(
            float(loss),
            gradient.numpy(),
            change.numpy(),
            {name: value.numpy()[: len(rows.get(name, ()))] for name, value in row_gradients.items()},
        )

    def train(self, minibatch: Minibatch, spec: Any, seed: int, learning_rate: float | None) -> float:
        """See `Framework.train`."""
        if learning_rate is not None:
            self._optimizer.learning_rate = learning_rate
        key = ("train", minibatch.mode)
        if key not in self._functions:
            self._optimizer.build(self._built.trainable)
            signature = [*self._batch_signature(spec)[2:], tf.TensorSpec((), tf.int64)]
            self._functions[key] = self._compiled(self._training(minibatch.mode), signature)
        self._assigned_from = None
        return float(self._functions[key](minibatch.element, tf.constant(as_int64(seed), tf.int64)))

    def predictions(
        self, minibatch: Minibatch, spec: Any, parameters: Parameters | None, rows: Mapping[str, Floats]
    ) -> Any:
        """The model's outputs, training=False; `parameters` None: at the values that its variables have."""
        key = ("predictions", minibatch.mode)
        if key not in self._functions:
            self._functions[key] = self._compiled(self._forward(minibatch.mode), self._batch_signature(spec))
        if parameters is not None and parameters is not self._assigned_from:
            self.assign(parameters)
            self._assigned_from = parameters
        return self._functions[key](self._padded(rows), minibatch.positions, minibatch.element)

    def assign(self, parameters: Parameters) -> None:
        """Sets the model's variables."""
        self._assigned_from = None
        self._assign(parameters.trainable, parameters.non_trainable)

    def _assigned(self, trainable: Any, non_trainable: Any) -> None:
        assign_flat(self._built.trainable, trainable)
        assign_flat(self._built.non_trainable, non_trainable)

    def _gradient(self, mode: Mode) -> Callable[..., Any]:
        built = self._built

        def gradient(
            trainable: Any, non_trainable: Any, rows: dict[str, Any], positions: dict[str, Any], element: Any, seed: Any
        ) -> Any:
            self._assigned(trainable, non_trainable)
            built.seeds.assign(seed)
            with tf.GradientTape() as tape:
                tape.watch(rows)
                with self._rows(rows, positions):
                    loss = self._total_loss(take_apart(mode, element))
            sources = [v.value for v in built.trainable]
            found = tape.gradient(loss, [sources, rows], unconnected_gradients=tf.UnconnectedGradients.ZERO)
            dense, sparse = tf.nest.map_structure(tf.convert_to_tensor, found)
            dense, sparse = self._clipping.apply(dense, sparse)
            parts = [tf.reshape(part, [-1]) for part in dense]
            flat = tf.concat(parts, 0) if parts else tf.zeros([0])
            return loss, flat, flat_tensor(built.non_trainable) - non_trainable, sparse

        return gradient

    def _training(self, mode: Mode) -> Callable[..., Any]:
        built, optimizer = self._built, self._optimizer

        def train(element: Any, seed: Any) -> Any:
            built.seeds.assign(seed)
            with tf.GradientTape() as tape:
                loss = self._total_loss(take_apart(mode, element))
                scaled = optimizer.scale_loss(loss)
            optimizer.apply(tape.gradient(scaled, [v.value for v in built.trainable]), built.trainable)
            return loss

        return train

    def _forward(self, mode: Mode) -> Callable[..., Any]:
        def forward(rows: dict[str, Any], positions: dict[str, Any], element: Any) -> Any:
            with self._rows(rows, positions):
                return self._built.model(take_apart(mode, element).features, training=False)

        return forward

    def _total_loss(self, examples: Examples) -> Any:
        assert self._loss is not None
        predictions = self._built.model(examples.features, training=True)
        if examples.weights is None:
            value = tf.reduce_mean(tf.convert_to_tensor(self._loss(examples.labels, predictions)))
        elif self._weighted_loss:
            value = tf.reduce_mean(self._loss(examples.labels, predictions, examples.weights))
        else:
            value = _weighted_mean(self._loss(examples.labels, predictions), examples.weights)
        total = tf.cast(value, tf.float32)
        for extra in self._built.model.losses:
            total += tf.cast(tf.reduce_sum(extra), tf.float32)
        return total

    def _rows(self, rows: dict[str, Any], positions: dict[str, Any]) -> Any:
        placement = self._built.placement
        return _Nothing() if placement is None else placement.using(Gathered(rows, positions))

    def _compiled(self, function: Callable[..., Any], signature: list[Any]) -> Any:
        jit = self._jit_compile or None
        compiled = tf.function(function, input_signature=signature, autograph=False, jit_compile=jit)
        found = stateful_random(operations_of_graph(compiled.get_concrete_function().graph))
        if found:
            _log.warning(
                "The model or loss uses random operations (%s) whose values depend on what a worker did before; use "
                "keras.random with a SeedGenerator to get the same steps everywhere",
                ", ".join(found),
            )
        return compiled

    def _flat_signature(self) -> list[Any]:
        initial = self._built.initial
        return [tf.TensorSpec(initial.trainable.shape), tf.TensorSpec(initial.non_trainable.shape)]

    def _batch_signature(self, spec: Any) -> list[Any]:
        rows = {name: tf.TensorSpec((None, dim)) for name, dim in self._dims.items()}
        positions = {name: tf.TensorSpec((None,), tf.int32) for name in self._dims}
        return [rows, positions, spec]

    def _padded(self, rows: Mapping[str, Floats]) -> dict[str, Floats]:
        """Rows of all tables, zeros after them up to a power of two: few shapes, so few compilations."""
        return {name: _pad(rows.get(name), dim) for name, dim in self._dims.items()}


class _Nothing:
    """A context that does nothing."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _pad(rows: Floats | None, dim: int) -> Floats:
    if rows is None:
        return np.zeros((_FEWEST_ROWS, dim), np.float32)
    count = max(_FEWEST_ROWS, 1 << max(len(rows) - 1, 0).bit_length())
    padded = np.zeros((count, dim), np.float32)
    padded[: len(rows)] = rows
    return padded


def _takes_weights(loss: Loss) -> bool:
    if isinstance(loss, keras.losses.Loss):
        return True
    try:
        parameters = inspect.signature(loss).parameters
    except ValueError:
        return False
    return "sample_weight" in parameters


def _weighted_mean(values: Any, weights: Any) -> Any:
    values = tf.convert_to_tensor(values)
    if values.shape.rank == 0:
        raise ModelDefinitionError(
            "feed returns sample weights, but loss(labels, predictions) returns one number for the whole minibatch.",
            "Let loss return one value per sample, or take a third argument sample_weight.",
        )
    weights = tf.cast(weights, values.dtype)
    per_sample = tf.reduce_mean(tf.reshape(values, [tf.shape(values)[0], -1]), axis=1)
    return tf.reduce_mean(per_sample * tf.reshape(weights, [-1]))
