"""The compiled functions of a model: gradients at given values, one step with its own optimizer, predictions.

Owns the functions and chooses the one for a minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elasticdl.frameworks.framework import Floats, Ids, Mode, Parameters, Step
from elasticdl.frameworks.keras.compiled import call_model
from elasticdl.frameworks.keras.computation import apply_gradients, build_optimizer
from elasticdl.frameworks.keras.losses import TotalLoss
from elasticdl.frameworks.keras.model import BuiltModel, as_int64, assign_flat
from elasticdl.frameworks.keras.operations import first_run, operations_of_graph, tell_uncompiled, warn_of_chance
from elasticdl.frameworks.keras.optimizer import Clipping
from elasticdl.frameworks.keras.samples import KerasMinibatch, full_spec, masks_of, take_apart, with_masks
from elasticdl.frameworks.keras.step.gradient_graph import GradientGraph
from elasticdl.layers.placement import Given

_RELATIVE = 1e-5


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
        """See `Framework.gradients`; `spec` is the spec of the minibatch's element."""
        mode = minibatch.mode
        if mode not in self._gradients:
            clipping = Clipping.of(self._optimizer)
            self._gradients[mode] = GradientStep(
                self._built, self._loss, clipping, mode, spec, self._minibatch_size, self._jit_compile
            )
        self._assigned_from = None
        return self._gradients[mode](minibatch, size, parameters, rows, seed)

    def train(self, minibatch: KerasMinibatch, spec: Any, seed: int, learning_rate: float | None) -> tuple[float, bool]:
        """See `Framework.train`; return the loss, and whether the gradient is finite."""
        if learning_rate is not None:
            self._optimizer.learning_rate = np.float32(learning_rate)  # see `as_int64`
        key = ("train", minibatch.mode)
        if key not in self._functions:
            build_optimizer(self._optimizer, self._built.trainable)
            signature = [spec, tf.TensorSpec((), tf.int64)]
            self._functions[key] = _compiled(self._training(minibatch.mode), signature)
        self._assigned_from = None
        loss, is_finite = self._functions[key](minibatch.element, tf.constant(as_int64(seed), tf.int64))
        return float(loss), bool(is_finite)

    def predictions(
        self, minibatch: KerasMinibatch, spec: Any, parameters: Parameters | None, rows: Mapping[str, Floats]
    ) -> Any:
        """Return the model's outputs with masks, training=False; `parameters` None: its variables' current values."""
        key = ("predictions", minibatch.mode)
        return with_masks(*self._run(key, self._forward_and_masks, minibatch, spec, parameters, rows))

    def evaluated(
        self, minibatch: KerasMinibatch, spec: Any, parameters: Parameters | None, rows: Mapping[str, Floats]
    ) -> tuple[Any, Any]:
        """Return the outputs as in `predictions`, and the loss."""
        key = ("evaluated", minibatch.mode)
        outputs, masks, loss = self._run(key, self._forward_and_loss, minibatch, spec, parameters, rows)
        return with_masks(outputs, masks), loss

    def assign(self, parameters: Parameters) -> None:
        """Set the model's variables."""
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
        """Call a function of rows and an element; it is compiled at the first call."""
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
        may_overflow = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)  # it skips a step with an overflow

        def train(element: Any, seed: Any) -> tuple[Any, Any]:
            built.seeds.assign(seed)
            with tf.GradientTape() as tape:
                loss = total_loss(take_apart(mode, element))
                scaled = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, [v.value for v in built.trainable])
            apply_gradients(optimizer, gradients, built.trainable)
            return loss, tf.constant(True) if may_overflow else _are_finite(gradients)

        return train

    def _forward(self, mode: Mode) -> Callable[..., Any]:
        placement = self._built.placement

        def forward(rows: dict[str, Any], element: Any) -> Any:
            with nullcontext() if placement is None else placement.using(Given(rows)):
                return call_model(self._built.model, take_apart(mode, element).features, training=False)

        return forward

    def _forward_and_masks(self, mode: Mode) -> Callable[..., Any]:
        forward = self._forward(mode)

        def predict(rows: dict[str, Any], element: Any) -> Any:
            outputs = forward(rows, element)
            return outputs, masks_of(outputs)

        return predict

    def _forward_and_loss(self, mode: Mode) -> Callable[..., Any]:
        forward, loss = self._forward(mode), self._loss

        def evaluate(rows: dict[str, Any], element: Any) -> Any:
            outputs = forward(rows, element)
            return outputs, masks_of(outputs), loss.of_predictions(take_apart(mode, element), outputs)

        return evaluate

    def _flat_signature(self) -> list[Any]:
        initial = self._built.initial
        return [tf.TensorSpec(initial.trainable.shape), tf.TensorSpec(initial.non_trainable.shape)]


def _are_finite(gradients: Sequence[Any]) -> Any:
    """Return whether all gradients are finite: check their sum first (one fast pass), then, if it overflows, each."""
    parts = [part for part in tf.nest.flatten(gradients, expand_composites=True) if part is not None]
    floating = [part for part in parts if part.dtype.is_floating]
    total = tf.reduce_sum([tf.reduce_sum(tf.cast(part, tf.float32)) for part in floating])

    def look_at_each() -> Any:
        return tf.reduce_all(tf.stack([tf.constant(True), *(tf.reduce_all(tf.math.is_finite(x)) for x in floating)]))

    return tf.cond(tf.math.is_finite(total), lambda: tf.constant(True), look_at_each)


def _compiled(function: Callable[..., Any], signature: list[Any]) -> Any:
    compiled = tf.function(function, input_signature=signature, autograph=False)
    warn_of_chance(operations_of_graph(compiled.get_concrete_function().graph))
    return compiled


class GradientStep:
    """The gradients of one mode of a model; see `Framework.gradients`.

    A full minibatch runs through a graph for exactly its shapes, compiled by XLA; so does a short one, filled up with
    samples of weight 0, if that changes nothing.  Everything else runs through a graph for any shape, which is not
    compiled: short minibatches of other models, varying numbers of ids, operations not supported by XLA.
    """

    def __init__(
        self,
        built: BuiltModel,
        loss: TotalLoss,
        clipping: Clipping,
        mode: Mode,
        spec: Any,
        size: int,
        jit_compile: bool,
    ) -> None:
        """
        Args:
            built: The model.
            loss: The loss.
            clipping: How gradients are clipped.
            mode: Mode of the minibatches.
            spec: Spec of a minibatch's element.
            size: Samples in a full minibatch.
            jit_compile: Try XLA.
        """
        self._loss = loss
        self._spec = spec
        self._size = size
        self._all = tf.ones([size])
        self._make: Callable[..., GradientGraph] = lambda *shape: GradientGraph(built, loss, clipping, mode, *shape)
        self._padding = Padding(built, mode, size)
        self._full_spec = full_spec(spec, size) if jit_compile else None
        self._full: GradientGraph | None = None
        self._any: GradientGraph | None = None

    def __call__(
        self, minibatch: KerasMinibatch, size: int, parameters: Parameters, rows: Mapping[str, Floats], seed: int
    ) -> Step:
        """See `Framework.gradients`; `size` is the number of samples in the minibatch."""
        step = None
        leaves = minibatch.leaves
        if self._full_spec is not None and size == self._size:
            if self._full is None:
                num_rows = {name: len(ids) for name, ids in minibatch.ids.items()}
                found: tuple[GradientGraph, Step] | None = first_run(
                    lambda: self._make(self._full_spec, num_rows, True),
                    lambda full: full(parameters, rows, minibatch.ids, leaves, self._all, seed),
                )
                if found is None:
                    self._full_spec = None
                else:
                    self._full, step = found
            elif self._full.fits(rows):
                step = self._full(parameters, rows, minibatch.ids, leaves, self._all, seed)
            else:
                tell_uncompiled("the number of ids of a minibatch varies")
                self._full_spec = self._full = None
        elif self._full is not None and self._loss.heeds_presence:
            presence = self._loss.presence(size, self._size)
            step = self._padding.run(self._full, parameters, rows, minibatch, presence, size, seed)
        if step is not None:
            return step
        if self._any is None:
            self._any = self._make(self._spec, None, False)
            warn_of_chance(self._any.operations)
        return self._any(parameters, rows, minibatch.ids, leaves, None, seed)


class Graph(Protocol):
    """A graph for one minibatch; see `GradientGraph`."""

    def __call__(
        self,
        parameters: Parameters,
        rows: Mapping[str, Floats],
        ids: Mapping[str, Ids],
        leaves: Any,
        presence: Any,
        seed: int,
    ) -> Step: ...

    def fits(self, rows: Mapping[str, Floats]) -> bool: ...


class Padding:
    """Runs short minibatches through the graph of full ones, filled up with copies of their own samples of weight 0.

    That is exact where samples do not see each other.  Whether they do is tried once, with two different fillings:
    batch normalisation, negatives taken from the minibatch and the like give two different results.
    """

    def __init__(self, built: BuiltModel, mode: Mode, size: int) -> None:
        """
        Args:
            built: The model.
            mode: Mode of the minibatches.
            size: Samples in a full minibatch.
        """
        self._built = built
        self._mode = mode
        self._size = size
        # The added samples would change the model's own state.
        self._is_exact: bool | None = False if built.keeps_state else None

    def run(
        self,
        graph: Graph,
        parameters: Parameters,
        rows: Mapping[str, Floats],
        minibatch: KerasMinibatch,
        presence: Floats,
        count: int,
        seed: int,
    ) -> Step | None:
        """Return the step of a minibatch with `count` samples, filled up; None: it would not be exact."""

        def filled(samples: npt.NDArray[np.int64]) -> Step | None:
            copies = [tf.gather(leaf, samples) for leaf in minibatch.leaves]
            ids = self._ids(minibatch, copies)
            where = {name: _find(minibatch.ids[name], own) for name, own in ids.items()}
            given = {name: rows[name][place] for name, place in where.items()}
            if not graph.fits(given):
                return None
            step = graph(parameters, given, ids, copies, presence, seed)
            gradients = {
                name: _returned(of_copies, where[name], len(rows[name]))
                for name, of_copies in step.row_gradients.items()
            }
            return replace(step, row_gradients=gradients)

        if self._is_exact is False or (self._is_exact is None and count == 1):
            return None
        numbers = np.arange(self._size)
        step = filled(np.where(numbers < count, numbers, 0))
        if self._is_exact is None:
            other = filled(numbers % count)
            self._is_exact = step is not None and other is not None and _same(step, other)
        return step if self._is_exact else None

    def _ids(self, minibatch: KerasMinibatch, leaves: list[Any]) -> Mapping[str, Ids]:
        if not minibatch.ids:
            return {}
        element = tf.nest.pack_sequence_as(minibatch.spec, leaves, expand_composites=True)
        make_ids = self._built.make_ids(take_apart(self._mode, minibatch.spec).features, self._mode)
        found = {name: part.numpy() for name, part in make_ids(take_apart(self._mode, element).features).items()}
        return {name: found.get(name, ids) for name, ids in minibatch.ids.items()}


def _find(ids: Ids, wanted: Ids) -> npt.NDArray[np.intp]:
    """Return an index in `ids` for each wanted id."""
    order = np.argsort(ids, kind="stable")
    return order[np.searchsorted(ids[order], wanted)]


def _returned(gradients: Floats, place: npt.NDArray[np.intp], count: int) -> Floats:
    """Sum gradients of copied rows to [count, dim]; the gradient of an id may be at any of its positions."""
    total = np.zeros((count, gradients.shape[1]), np.float32)
    np.add.at(total, place, gradients)
    return total


def _same(one: Step, other: Step) -> bool:
    """Return whether two steps are equal except for rounding by another order of sums."""
    pairs = [(one.gradient, other.gradient), (one.change, other.change)]
    pairs += [(one.row_gradients[name], other.row_gradients[name]) for name in one.row_gradients]
    largest = max((float(np.abs(a).max(initial=0.0)) for a, _ in pairs), default=0.0)
    close = (np.allclose(a, b, rtol=_RELATIVE, atol=_RELATIVE * largest) for a, b in pairs)
    return bool(np.isclose(one.loss, other.loss, rtol=_RELATIVE)) and all(close)
