"""The port `Evaluation`: states of the user's metrics over the minibatches of a task, and results of merged states.

`arrays_of` converts outputs of a model to arrays; `load_weights` loads the values of a model without its optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elasticdl.frameworks.framework import Batch, Floats, MetricState, Parameters
from elasticdl.frameworks.keras.metrics import Evaluated, KerasMeasure, TensorMeasure
from elasticdl.frameworks.keras.model import BuiltModel, unique_names
from elasticdl.frameworks.keras.samples import masks_of, with_masks
from elasticdl.frameworks.metrics import Array, results_of
from elasticdl_client.errors import CheckpointError

_log = logging.getLogger("elasticdl.keras")

Evaluate = Callable[[Batch, Parameters | None, Mapping[str, Floats]], Evaluated]


class Measures:
    """The metrics of a process, compiled once.  Their own variables are scratch: states live in `KerasEvaluation`."""

    def __init__(self, measures: Sequence[TensorMeasure], example: Callable[[], Evaluated]) -> None:
        """
        Args:
            measures: The user's metrics.
            example: Returns a minibatch of the right shapes, for metrics that create their variables in an update.
        """
        self._measures = tuple(measures)
        self._example = example
        self._checked = False
        self._compiled = True
        self._traced = False
        self._advance = tf.function(self._advanced, autograph=False, reduce_retracing=True)

    def __iter__(self) -> Any:
        return iter(self._measures)

    def advance(self, starts: list[list[Array]], batch: Evaluated) -> list[list[Array]]:
        """Return the states after a minibatch, one per metric; an empty start is a reset metric."""
        masks = masks_of(batch.predictions)
        if not self._checked:
            for measure in self._measures:
                measure.check(batch)
            self._checked = True
            return _arrays(self._advanced(starts, batch, masks))
        if self._compiled:
            try:
                if not self._traced and not any(starts):
                    # Trace for any number of samples: the last minibatch may be smaller.
                    self._advance.get_concrete_function(starts, _of_any_size(batch), _of_any_size(masks))
                self._traced = True
                return _arrays(self._advance(starts, batch, masks))
            except Exception as error:  # noqa: BLE001  it worked eagerly: then it may use NumPy
                _log.info("Metrics run eagerly, as they cannot be compiled: %s", str(error).partition("\n")[0])
                self._compiled = False
        return _arrays(self._advanced(starts, batch, masks))

    def make_variables(self) -> None:
        """Create the variables of all metrics: update once with an example, if some metric has none yet."""
        if any(isinstance(measure, KerasMeasure) and measure.num_variables() == 0 for measure in self._measures):
            example = self._example()
            self._advanced([[] for _ in self._measures], example, masks_of(example.predictions))

    def _advanced(self, starts: list[list[Any]], batch: Evaluated, masks: list[Any]) -> list[list[Any]]:
        with_masks(batch.predictions, masks)
        return [measure.advance(start, batch) for measure, start in zip(self._measures, starts, strict=True)]


class KerasEvaluation:
    """See `Evaluation`.  There may be several at a time."""

    def __init__(self, measures: Measures, evaluate: Evaluate) -> None:
        self._measures = measures
        self._evaluate = evaluate
        self._states: list[list[Array]] = [[] for _ in measures]

    def update(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> None:
        evaluated = self._evaluate(batch, parameters, rows)
        starts = [
            [] if measure.additive else state for measure, state in zip(self._measures, self._states, strict=True)
        ]
        new = self._measures.advance(starts, evaluated)
        self._states = [
            [a + b for a, b in zip(old, state, strict=True)] if measure.additive and old else state
            for measure, old, state in zip(self._measures, self._states, new, strict=True)
        ]

    def states(self) -> list[MetricState]:
        if not all(self._states):
            self._measures.make_variables()
        return [
            MetricState(measure.name, tuple(state or measure.reset()), measure.additive)
            for measure, state in zip(self._measures, self._states, strict=True)
        ]

    def results(self, merged: Sequence[MetricState]) -> dict[str, float]:
        self._measures.make_variables()
        return results_of(self._measures, merged)


def _of_any_size(parts: Any) -> Any:
    """Return specs of tensors with any number of samples; values that are not ordinary tensors are not changed."""
    return tf.nest.map_structure(
        lambda part: (
            tf.TensorSpec([None, *part.shape[1:]], part.dtype) if tf.is_tensor(part) and part.shape.rank else part
        ),
        parts,
    )


def _arrays(states: list[list[Any]]) -> list[list[Array]]:
    return [[np.asarray(value, np.float64) for value in state] for state in states]


_PREFIX = "model/"  # prefix of the model's variables in a state; see `KerasFramework.state`


def arrays_of(outputs: Any) -> Any:
    """Convert a structure of tensors to one of arrays; sparse tensors become dense, bfloat16 becomes float32.

    Raises:
        TypeError: An output is ragged.
    """
    return tf.nest.map_structure(_array, outputs)


def _array(output: Any) -> npt.NDArray[Any]:
    if isinstance(output, tf.RaggedTensor):
        raise TypeError("the model has a ragged output: return a tensor, for example output.to_tensor()")
    tensor = tf.sparse.to_dense(output) if isinstance(output, tf.SparseTensor) else tf.convert_to_tensor(output)
    return np.asarray(tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor)


def assign_all(variables: Mapping[str, Any], state: Mapping[str, npt.NDArray[Any]], whose: str, advice: str) -> None:
    """Assign the values of a checkpoint to variables, by name.

    Args:
        variables: Variables by name.
        state: Values by name.
        whose: Owner of the variables, for the message.
        advice: Advice for the message.

    Raises:
        CheckpointError: The names or shapes differ; nothing is assigned.
    """
    wrong = sorted(set(state) ^ set(variables)) or [
        name for name, variable in variables.items() if not _fits(state[name], variable)
    ]
    if wrong:
        raise CheckpointError(
            f"The checkpoint is of another {whose}: {', '.join(wrong)}.",
            f"Use the module that the checkpoint was written with, {advice}.",
        )
    for name, variable in variables.items():
        value = state[name]  # NumPy files store bfloat16 and similar types as bytes
        variable.assign(value.view(_own_dtype(variable)) if _is_bytes(value) else value)


def _fits(value: npt.NDArray[Any], variable: Any) -> bool:
    """Return whether a value that was read from a file has the variable's shape, and as bytes may be of its type."""
    if tuple(value.shape) != tuple(variable.shape):
        return False
    own = _own_dtype(variable)
    return not _is_bytes(value) or (own.kind == "V" and own.itemsize == value.dtype.itemsize)


def _is_bytes(value: npt.NDArray[Any]) -> bool:
    return value.dtype.type is np.void


def _own_dtype(variable: Any) -> np.dtype[Any]:
    own: np.dtype[Any] = np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
    return own


def load_weights(path: str, built: BuiltModel, state: Mapping[str, npt.NDArray[Any]]) -> None:
    """See `Framework.load_weights`.

    Args:
        path: Path of the user's module, for messages.
        built: The model.
        state: The state to load.
    """
    weights = [*built.trainable, *built.non_trainable, *built.own]
    variables = {_PREFIX + name: variable for name, variable in zip(unique_names(weights), weights, strict=True)}
    given = {name: value for name, value in state.items() if name.startswith(_PREFIX)}
    assign_all(variables, given, f"model than {path}", "and its --model_params")
