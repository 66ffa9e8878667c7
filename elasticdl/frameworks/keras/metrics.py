"""The user's metrics: the state of each as float64 arrays, and the result of merged states.

A state is updated with one minibatch at a time; metrics do not depend on tasks or models.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.compile_utils import get_metric

from elasticdl.frameworks.metrics import Array, Measure, State, make_measures, select
from elasticdl_client.errors import ModelDefinitionError

_DIRECTIONS = {"up": True, "down": False}  # Keras's attribute → whether higher is better
_ACCURACY = ("accuracy", "acc")  # one of three metrics, depending on the shapes of labels and predictions
_log = logging.getLogger("elasticdl.keras")


class Evaluated(NamedTuple):
    """A minibatch with the model's predictions.

    Attributes:
        loss: Loss of the minibatch, a scalar; None: there is no `LossMeasure`.
    """

    labels: Any
    predictions: Any
    loss: Any = None


class TensorMeasure(Measure, Protocol):
    """One metric of the user's, of either kind."""

    def advance(self, start: Sequence[Any], batch: Evaluated) -> list[Any]:
        """Return the state after a minibatch, as float64 tensors; empty `start`: a reset metric.  Traceable."""
        ...

    def reset(self) -> list[Array]:
        """Return the initial state; a metric that creates its variables at the first update must have been updated."""
        ...

    def check(self, batch: Evaluated) -> None:
        """Check eagerly, with the first minibatch, that states can be merged by addition.

        Raises:
            ModelDefinitionError: They cannot, although the metric declares that they can.
        """
        ...


class FunctionMeasure:
    """A function f(labels, predictions): the mean of its values over samples."""

    additive = True
    maximize: bool | None = None

    def __init__(self, name: str, function: Callable[[Any, Any], Any], output: str | None) -> None:
        self.name = name
        self._function = function
        self._output = output

    def advance(self, start: Sequence[Any], batch: Evaluated) -> list[Any]:
        labels, predictions = select(batch.labels, batch.predictions, self._output)
        value = tf.cast(tf.convert_to_tensor(self._function(labels, predictions)), tf.float64)
        if value.shape.rank == 0:
            samples = _num_samples(predictions)
            total = value * samples
        else:
            samples = tf.cast(tf.shape(value)[0], tf.float64)
            total = tf.reduce_sum(tf.reduce_mean(tf.reshape(value, [tf.shape(value)[0], -1]), axis=1))
        before = start or [tf.zeros((), tf.float64), tf.zeros((), tf.float64)]
        return [before[0] + total, before[1] + samples]

    def reset(self) -> list[Array]:
        return [np.zeros((), np.float64), np.zeros((), np.float64)]

    def check(self, batch: Evaluated) -> None:
        """Do nothing: a sum and a count can always be added."""

    def results(self, states: Sequence[State]) -> Any:
        total, count = states[0]
        return total / count if count else np.float64(0)


class LossMeasure(FunctionMeasure):
    """The mean over samples of the losses of minibatches, as `keras.Model.evaluate` has it."""

    maximize: bool | None = False

    def __init__(self) -> None:
        super().__init__("loss", lambda labels, predictions: None, None)

    def advance(self, start: Sequence[Any], batch: Evaluated) -> list[Any]:
        samples = _num_samples(batch.predictions)
        total = tf.cast(batch.loss, tf.float64) * samples
        return [start[0] + total, start[1] + samples] if start else [total, samples]


class KerasMeasure:
    """A `keras.metrics.Metric`.  One of the user's own that defines `merge_state` is not additive."""

    def __init__(self, name: str, metric: Any, output: str | None) -> None:
        self.name = name
        self.maximize = _DIRECTIONS.get(getattr(metric, "_direction", ""))
        self._own = not type(metric).__module__.startswith("keras.")
        self.additive = not (self._own and callable(getattr(metric, "merge_state", None)))
        self._metric = metric
        self._output = output

    def advance(self, start: Sequence[Any], batch: Evaluated) -> list[Any]:
        labels, predictions = select(batch.labels, batch.predictions, self._output)
        self._metric.reset_state()
        for variable, value in zip(self._metric.variables, start, strict=False):
            variable.assign(tf.cast(value, variable.dtype))
        self._metric.update_state(labels, predictions)
        return [tf.cast(tf.identity(variable.value), tf.float64) for variable in self._metric.variables]

    def reset(self) -> list[Array]:
        self._metric.reset_state()
        return _numpy([variable.numpy() for variable in self._metric.variables])

    def check(self, batch: Evaluated) -> None:
        if self._own and self.additive and not self._adds_up(batch):
            raise ModelDefinitionError(
                f"The state of metric {self.name!r} ({type(self._metric).__name__}) of several tasks cannot be added: "
                "state(A) + state(B) is not state(A and B).",
                "Let its variables start at zero and be sums over samples, or define merge_state(states), which "
                "is given the variables of each task and sets its own.",
            )

    def _adds_up(self, batch: Evaluated) -> bool:
        count = int(_num_samples(batch.predictions))
        halves = [_cut(batch, 0, (count + 1) // 2), _cut(batch, count // 2, count)]
        first = _numpy(self.advance([], halves[0]))
        second = _numpy(self.advance([], halves[1]))
        both = _numpy(self.advance(first, halves[1]))
        self._metric.reset_state()
        if any(np.any(np.asarray(variable.numpy())) for variable in self._metric.variables):
            return False
        whole = _numpy(self.advance([], batch)) if count % 2 == 0 else both
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
        """Return the number of variables; 0 before the first update of a metric that creates them there."""
        return len(self._metric.variables)


def measures_of(path: str, defined: Any, example: Callable[[], Evaluated]) -> list[TensorMeasure]:
    """Return the metrics of `eval_metrics_fn()`, given by name, or in the form of `metrics` of Keras's `compile`.

    Args:
        path: Path of the user's module, for messages.
        defined: The result of `eval_metrics_fn()`.
        example: Returns a minibatch of the right shapes, for "accuracy".

    Raises:
        ModelDefinitionError: The result has another form, or contains a name unknown to Keras.
    """
    if isinstance(defined, str | list | tuple):
        if tf.nest.is_nested(example().predictions):
            raise _unclear(path, f"{defined!r}, and the model has several outputs")
        defined = metrics_by_name(path, defined)
    elif isinstance(defined, Mapping):
        defined = {
            key: metrics_by_name(path, value) if isinstance(value, list | tuple) else value
            for key, value in defined.items()
        }
    return make_measures(path, defined, partial(_make_measure, example))


def metric_name(identifier: Any) -> str:
    """Return Keras's name of a metric given to `compile`."""
    if isinstance(identifier, str):
        return identifier
    metric = keras.metrics.get(identifier)
    return str(getattr(metric, "name", None) or getattr(metric, "__name__", type(metric).__name__))


def metrics_by_name(path: str, metrics: Any) -> dict[str, Any]:
    """Return metrics by name; as in Keras, repeated names get the suffixes _1, _2 …, and functions ignore masks.

    Args:
        path: Path of the user's module, for messages.
        metrics: Metrics of one output, in the form of `compile`.

    Raises:
        ModelDefinitionError: There are metrics for several outputs, or a name unknown to Keras.
    """
    named: dict[str, Any] = {}
    for metric in [metrics] if isinstance(metrics, str) else metrics:
        if metric is None or isinstance(metric, list | tuple):
            raise _unclear(path, f"{metrics!r}, metrics of several outputs")
        known = _known(path, metric)
        name = unsuffixed = metric if isinstance(metric, str) else metric_name(known)
        number = 0
        while name in named:
            number += 1
            name = f"{unsuffixed}_{number}"
        is_function = not isinstance(known, str | keras.metrics.Metric)
        named[name] = keras.metrics.MeanMetricWrapper(known, name=name) if is_function else known
    return named


def _unclear(path: str, what: str) -> ModelDefinitionError:
    hint = 'Name the output that metrics are of: {"output": ["accuracy"]}.'
    return ModelDefinitionError(f"{path}: eval_metrics_fn() returned {what}.", hint)


def _known(path: str, metric: Any) -> Any:
    """Return a metric given by its class, name or config as an object; "accuracy" is returned unchanged.

    Raises:
        ModelDefinitionError: Keras does not know the metric.
    """
    if isinstance(metric, str) and metric.lower() in _ACCURACY:
        return metric
    if isinstance(metric, str | dict) or inspect.isclass(metric):
        try:
            return keras.metrics.get(metric)
        except (ValueError, TypeError) as error:
            raise ModelDefinitionError(
                f"{path}: eval_metrics_fn() has the metric {metric!r}, which Keras does not know: {error}",
                "Give it a name or an object of keras.metrics, or a function f(labels, predictions).",
            ) from error
    return metric


def _make_measure(
    example: Callable[[], Evaluated], path: str, name: str, metric: Any, output: str | None
) -> TensorMeasure:
    metric = _known(path, metric)
    if isinstance(metric, str):
        metric = _accuracy(path, metric, output, example())
    if isinstance(metric, keras.metrics.Metric):
        return KerasMeasure(name, metric, output)
    if callable(metric):
        return FunctionMeasure(name, metric, output)
    raise ModelDefinitionError(
        f"{path}: eval_metrics_fn() gives {name!r} a {type(metric).__name__}.",
        "Give it a keras.metrics.Metric, the name of one, or a function f(labels, predictions).",
    )


def _accuracy(path: str, name: str, output: str | None, example: Evaluated) -> Any:
    """Return the accuracy metric that Keras uses for labels and predictions of these shapes."""
    labels, predictions = select(example.labels, example.predictions, output)
    if tf.nest.is_nested(predictions) or tf.nest.is_nested(labels):
        raise _unclear(path, f"{name!r}, and the model has several outputs")
    if predictions.shape.rank < 2:
        raise ModelDefinitionError(
            f"{path}: eval_metrics_fn() has {name!r}, and which accuracy that is cannot be seen from predictions that "
            "are one number for each sample.",
            "Give one of keras.metrics: BinaryAccuracy, SparseCategoricalAccuracy, CategoricalAccuracy.",
        )
    return get_metric(name, labels, predictions)


def _num_samples(predictions: Any) -> Any:
    return tf.cast(tf.shape(tf.nest.flatten(predictions)[0])[0], tf.float64)


def _cut(batch: Evaluated, start: int, end: int) -> Evaluated:
    return Evaluated(*tf.nest.map_structure(lambda part: part[start:end], (batch.labels, batch.predictions)))


def _numpy(state: Sequence[Any]) -> list[Array]:
    return [np.asarray(value, np.float64) for value in state]
