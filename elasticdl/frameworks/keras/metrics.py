"""The user's metrics: the state of each as float64 arrays, and what it makes of merged states.

It knows how to advance a state by one minibatch and nothing of tasks or models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from elasticdl.frameworks.metrics import Array, Measure, State, select
from elasticdl_client.errors import ModelDefinitionError

_DIRECTIONS = {"up": True, "down": False}  # as Keras's metrics say it of themselves
_log = logging.getLogger("elasticdl.keras")


class TensorMeasure(Measure, Protocol):
    """One metric of the user's, of either kind."""

    def advance(self, start: Sequence[Any], labels: Any, predictions: Any) -> list[Any]:
        """The state after a minibatch, as float64 tensors; `start` empty: from a reset metric.  Traceable."""
        ...

    def reset(self) -> list[Array]:
        """The state before any minibatch; a metric that makes its variables at the first update must have had one."""
        ...

    def check(self, labels: Any, predictions: Any) -> None:
        """Looks at the first minibatch, eagerly, whether states may be added.

        Raises:
            ModelDefinitionError: they may not, and the metric says of itself that they may.
        """
        ...


class FunctionMeasure:
    """A function f(labels, predictions): the mean of its values over samples."""

    def __init__(
        self, name: str, function: Callable[[Any, Any], Any], output: str | None, maximize: bool | None = None
    ) -> None:
        self.name = name
        self.maximize = maximize
        self.additive = True
        self._function = function
        self._output = output

    def advance(self, start: Sequence[Any], labels: Any, predictions: Any) -> list[Any]:
        labels, predictions = select(labels, predictions, self._output)
        value = tf.cast(tf.convert_to_tensor(self._function(labels, predictions)), tf.float64)
        if value.shape.rank == 0:
            samples = tf.cast(tf.shape(tf.nest.flatten(predictions)[0])[0], tf.float64)
            total = value * samples
        else:
            samples = tf.cast(tf.shape(value)[0], tf.float64)
            total = tf.reduce_sum(tf.reduce_mean(tf.reshape(value, [tf.shape(value)[0], -1]), axis=1))
        before = start or [tf.zeros((), tf.float64), tf.zeros((), tf.float64)]
        return [before[0] + total, before[1] + samples]

    def reset(self) -> list[Array]:
        return [np.zeros((), np.float64), np.zeros((), np.float64)]

    def check(self, labels: Any, predictions: Any) -> None:
        """A sum and a count may always be added."""

    def results(self, states: Sequence[State]) -> Any:
        total, count = states[0]
        return total / count if count else np.float64(0)


class KerasMeasure:
    """A `keras.metrics.Metric`.  One of the user's own that defines `merge_state` is not additive."""

    def __init__(self, name: str, metric: Any, output: str | None) -> None:
        self.name = name
        self.maximize = _DIRECTIONS.get(getattr(metric, "_direction", ""))
        self._own = not type(metric).__module__.startswith("keras.")
        self.additive = not (self._own and callable(getattr(metric, "merge_state", None)))
        self._metric = metric
        self._output = output

    def advance(self, start: Sequence[Any], labels: Any, predictions: Any) -> list[Any]:
        labels, predictions = select(labels, predictions, self._output)
        self._metric.reset_state()
        for variable, value in zip(self._metric.variables, start, strict=False):
            variable.assign(tf.cast(value, variable.dtype))
        self._metric.update_state(labels, predictions)
        return [tf.cast(tf.identity(variable.value), tf.float64) for variable in self._metric.variables]

    def reset(self) -> list[Array]:
        self._metric.reset_state()
        return _numpy([variable.numpy() for variable in self._metric.variables])

    def check(self, labels: Any, predictions: Any) -> None:
        if self._own and self.additive and not self._adds_up(labels, predictions):
            raise ModelDefinitionError(
                f"The state of metric {self.name!r} ({type(self._metric).__name__}) of several tasks cannot be added: "
                "state(A) + state(B) is not state(A and B).",
                "Let its variables start at zero and be sums over samples, or define merge_state(states), which "
                "is given the variables of each task and sets its own.",
            )

    def _adds_up(self, labels: Any, predictions: Any) -> bool:
        count = int(tf.shape(tf.nest.flatten(predictions)[0])[0])
        halves = [_cut(labels, predictions, 0, (count + 1) // 2), _cut(labels, predictions, count // 2, count)]
        first = _numpy(self.advance([], *halves[0]))
        second = _numpy(self.advance([], *halves[1]))
        both = _numpy(self.advance(first, *halves[1]))
        self._metric.reset_state()
        if any(np.any(np.asarray(variable.numpy())) for variable in self._metric.variables):
            return False
        whole = _numpy(self.advance([], labels, predictions)) if count % 2 == 0 else both
        return all(
            np.allclose(a + b, c, rtol=1e-4, atol=1e-5) and np.allclose(c, d, rtol=1e-4, atol=1e-5)
            for a, b, c, d in zip(first, second, both, whole, strict=True)
        )

    def results(self, states: Sequence[State]) -> Any:
        self._metric.reset_state()
        if self.additive:
            for variable, value in zip(self._metric.variables, states[0], strict=True):
                variable.assign(tf.cast(value, variable.dtype))
        else:
            self._metric.merge_state([list(state) for state in states])
        return self._metric.result()

    def num_variables(self) -> int:
        """0 for a metric that makes its variables at the first update."""
        return len(self._metric.variables)


def make_measure(path: str, name: str, metric: Any, output: str | None) -> TensorMeasure:
    if isinstance(metric, keras.metrics.Metric):
        return KerasMeasure(name, metric, output)
    if callable(metric):
        return FunctionMeasure(name, metric, output)
    raise ModelDefinitionError(
        f"{path}: eval_metrics_fn() gives {name!r} a {type(metric).__name__}.",
        "Give it a keras.metrics.Metric or a function f(labels, predictions).",
    )


def _cut(labels: Any, predictions: Any, start: int, end: int) -> tuple[Any, Any]:
    cut = tf.nest.map_structure(lambda part: part[start:end], (labels, predictions))
    return cut[0], cut[1]


def _numpy(state: Sequence[Any]) -> list[Array]:
    return [np.asarray(value, np.float64) for value in state]
