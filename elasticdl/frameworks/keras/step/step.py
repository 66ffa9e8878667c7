"""The compiled functions of a model: gradients at given values, one step with its own optimizer, predictions.

Owns which of them exist; what a step of gradients is made of is `gradient_step`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from elasticdl.frameworks.framework import Floats, Mode, Parameters, Step
from elasticdl.frameworks.keras.losses import TotalLoss
from elasticdl.frameworks.keras.model import BuiltModel, assign_flat
from elasticdl.frameworks.keras.operations import operations_of_graph, warn_of_chance
from elasticdl.frameworks.keras.samples import KerasMinibatch, take_apart
from elasticdl.frameworks.keras.seeds import as_int64
from elasticdl.frameworks.keras.step.clipping import Clipping
from elasticdl.frameworks.keras.step.gradient_step import GradientStep
from elasticdl.layers.placement import Given


class CompiledSteps:
    """Compiled functions of one model."""

    def __init__(self, built: BuiltModel, optimizer: Any, minibatch_size: int, jit_compile: bool) -> None:
        self._built = built
        self._optimizer = optimizer
        self._minibatch_size = minibatch_size
        self._jit_compile = jit_compile
        self._dims = {} if built.placement is None else {t.name: t.dim for t in built.placement.tables.values()}
        self._assign = tf.function(self._assigned, input_signature=self._flat_signature(), autograph=False)
        self._gradients: dict[Mode, GradientStep] = {}
        self._functions: dict[tuple[str, Mode], Any] = {}
        self._assigned_from: Parameters | None = None

    def gradients(
        self,
        minibatch: KerasMinibatch,
        size: int,
        spec: Any,
        parameters: Parameters,
        rows: Mapping[str, Floats],
        seed: int,
    ) -> Step:
        """See `Framework.gradients`; `spec` is that of the minibatch's element."""
        mode = minibatch.mode
        if mode not in self._gradients:
            clipping = Clipping.of(self._optimizer)
            self._gradients[mode] = GradientStep(
                self._built, self._loss, clipping, mode, spec, self._minibatch_size, self._jit_compile
            )
        self._assigned_from = None
        return self._gradients[mode](minibatch, size, parameters, rows, seed)

    def train(self, minibatch: KerasMinibatch, spec: Any, seed: int, learning_rate: float | None) -> float:
        """See `Framework.train`."""
        if learning_rate is not None:
            self._optimizer.learning_rate = learning_rate
        key = ("train", minibatch.mode)
        if key not in self._functions:
            self._optimizer.build(self._built.trainable)
            signature = [spec, tf.TensorSpec((), tf.int64)]
            self._functions[key] = _compiled(self._training(minibatch.mode), signature)
        self._assigned_from = None
        return float(self._functions[key](minibatch.element, tf.constant(as_int64(seed), tf.int64)))

    def predictions(
        self, minibatch: KerasMinibatch, spec: Any, parameters: Parameters | None, rows: Mapping[str, Floats]
    ) -> Any:
        """The model's outputs, training=False; `parameters` None: at the values that its variables have."""
        return self._run(("predictions", minibatch.mode), self._forward, minibatch, spec, parameters, rows)

    def evaluated(
        self, minibatch: KerasMinibatch, spec: Any, parameters: Parameters | None, rows: Mapping[str, Floats]
    ) -> tuple[Any, Any]:
        """The same outputs, and the loss."""
        key = ("evaluated", minibatch.mode)
        outputs, loss = self._run(key, self._forward_and_loss, minibatch, spec, parameters, rows)
        return outputs, loss

    def assign(self, parameters: Parameters) -> None:
        """Sets the model's variables."""
        self._assigned_from = None
        self._assign(parameters.trainable, parameters.non_trainable)

    @property
    def _loss(self) -> TotalLoss:
        assert self._built.loss is not None
        return self._built.loss

    def _run(
        self,
        key: tuple[str, Mode],
        make: Callable[[Mode], Callable[..., Any]],
        minibatch: KerasMinibatch,
        spec: Any,
        parameters: Parameters | None,
        rows: Mapping[str, Floats],
    ) -> Any:
        """Calls a function of rows and an element, compiled once."""
        if key not in self._functions:
            signature = [{name: tf.TensorSpec((None, dim)) for name, dim in self._dims.items()}, spec]
            self._functions[key] = _compiled(make(minibatch.mode), signature)
        if parameters is not None and parameters is not self._assigned_from:
            self.assign(parameters)
            self._assigned_from = parameters
        given = {name: rows.get(name, np.zeros((0, dim), np.float32)) for name, dim in self._dims.items()}
        return self._functions[key](given, minibatch.element)

    def _assigned(self, trainable: Any, non_trainable: Any) -> None:
        assign_flat(self._built.trainable, trainable)
        assign_flat(self._built.non_trainable, non_trainable)

    def _training(self, mode: Mode) -> Callable[..., Any]:
        built, optimizer, total_loss = self._built, self._optimizer, self._loss

        def train(element: Any, seed: Any) -> Any:
            built.seeds.assign(seed)
            with tf.GradientTape() as tape:
                loss = total_loss(take_apart(mode, element))
                scaled = optimizer.scale_loss(loss)
            optimizer.apply(tape.gradient(scaled, [v.value for v in built.trainable]), built.trainable)
            return loss

        return train

    def _forward(self, mode: Mode) -> Callable[..., Any]:
        placement = self._built.placement

        def forward(rows: dict[str, Any], element: Any) -> Any:
            with nullcontext() if placement is None else placement.using(Given(rows)):
                return self._built.model(take_apart(mode, element).features, training=False)

        return forward

    def _forward_and_loss(self, mode: Mode) -> Callable[..., Any]:
        forward, loss = self._forward(mode), self._loss

        def evaluate(rows: dict[str, Any], element: Any) -> Any:
            outputs = forward(rows, element)
            return outputs, loss.of_predictions(take_apart(mode, element), outputs)

        return evaluate

    def _flat_signature(self) -> list[Any]:
        initial = self._built.initial
        return [tf.TensorSpec(initial.trainable.shape), tf.TensorSpec(initial.non_trainable.shape)]


def _compiled(function: Callable[..., Any], signature: list[Any]) -> Any:
    compiled = tf.function(function, input_signature=signature, autograph=False)
    warn_of_chance(operations_of_graph(compiled.get_concrete_function().graph))
    return compiled
