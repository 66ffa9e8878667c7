"""The compiled function of a step: forward and backward at given values; rows are inputs, row gradients are outputs.

One graph has one set of shapes.  It is called with flat lists of tensors, and its results are read without copies,
because at hundreds of steps per second the Python code around a step matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elasticdl.frameworks.framework import Floats, Ids, Mode, Parameters, Ranges, Step
from elasticdl.frameworks.keras.losses import TotalLoss
from elasticdl.frameworks.keras.model import (
    BuiltModel,
    as_int64,
    assign_flat,
    check_assigned,
    flat_tensor,
    split_flat,
)
from elasticdl.frameworks.keras.operations import (
    IdOutOfRange,
    IdWatch,
    hidden_from_gradients,
    operations_of_graph,
)
from elasticdl.frameworks.keras.optimizer import Clipping
from elasticdl.frameworks.keras.samples import take_apart
from elasticdl.layers.functions import inlined
from elasticdl.layers.placement import Given
from elasticdl_client.errors import ModelDefinitionError


class GivenValues(keras.StatelessScope):  # type: ignore[misc]
    """A scope in which Keras reads the values of some variables from tensors.

    Variables other than the trainable ones stay as they are: a model may keep state of its own.
    """

    def __init__(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        super().__init__(zip(variables, values, strict=True), collect_losses=True, initialize_variables=False)
        self.sources = [self.state_mapping[id(variable)] for variable in variables]

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Assign a variable; it is not trainable, see `check_for_parameter_server`."""
        variable, value = update
        variable._direct_assign(value)

    def get_current_value(self, variable: Any) -> Any:
        return self.state_mapping.get(id(variable), variable._value)


_ALIGNMENT = 64  # bytes


class GradientGraph:
    """Gradients at given values, for minibatches of one shape or of any."""

    def __init__(
        self,
        built: BuiltModel,
        loss: TotalLoss,
        clipping: Clipping,
        mode: Mode,
        spec: Any,
        num_rows: Mapping[str, int] | None,
        jit_compile: bool,
    ) -> None:
        """
        Args:
            built: The model.
            loss: The loss.
            clipping: How gradients are clipped.
            mode: Mode of the minibatches.
            spec: Spec of a minibatch's element.
            num_rows: Number of rows of each table; the graph then takes sample weights.  None: any number.
            jit_compile: Compile with XLA, at the first call.
        """
        self._built = built
        self._loss = loss
        self._clipping = clipping
        self._mode = mode
        self._spec = spec
        self._num_rows = num_rows
        self._tables = {} if built.placement is None else dict(sorted(built.placement.tables.items()))
        self._counted = [
            name for name, table in self._tables.items() if clipping.by_norm or table.regularizer is not None
        ]
        self._lookups = IdWatch()
        self._unreached: Ranges = ()
        self._reached_tables: list[str] = []
        self._no_rows = {name: np.zeros((0, table.dim), np.float32) for name, table in self._tables.items()}
        self._no_change = np.zeros(0, np.float32)
        self._takes_seed = built.seeds.are_needed
        self._assigns = False
        self._call = self._traced(jit_compile)
        self._parts = ["the gradient", *(f"the row gradients of table {name!r}" for name in self._reached_tables)]

    def _traced(self, jit_compile: bool) -> _FlatCall:
        """Return the compiled function; a first trace shows which inputs it needs besides values and samples."""
        while True:
            known = (self._takes_seed, self._assigns)
            jit = True if jit_compile else None
            function = tf.function(self._step, input_signature=self._signature(), autograph=False, jit_compile=jit)
            call = _FlatCall(function.get_concrete_function())
            self._takes_seed |= self._built.seeds.are_needed
            if not known[1]:  # otherwise the graph itself assigns the variables
                check_assigned(self._built, call.graph)
            if known == (self._takes_seed, self._assigns):
                self._check_reached()
                return call

    def _check_reached(self) -> None:
        """Check that the loss depends on a trainable variable, as `fit` does."""
        built = self._built
        num_unreached = sum(end - start for start, end in self._unreached)
        num_trained = len(built.initial.trainable) - num_unreached + len(self._reached_tables)
        if num_trained == 0 and (num_unreached or self._tables):
            raise ModelDefinitionError(
                f"{built.definition.path}: no trainable variable has a gradient: the loss depends on none of them.",
                "A loss through tf.stop_gradient, argmax, round or an integer has no gradient.",
            )

    @property
    def operations(self) -> set[str]:
        """The names of its operations."""
        return operations_of_graph(self._call.graph)

    def fits(self, rows: Mapping[str, Floats]) -> bool:
        """Return whether the graph accepts these numbers of rows."""
        return self._num_rows is None or all(len(rows.get(name, ())) == n for name, n in self._num_rows.items())

    def __call__(
        self,
        parameters: Parameters,
        rows: Mapping[str, Floats],
        ids: Mapping[str, Ids],
        leaves: Sequence[Any],
        presence: Any,
        seed: int,
    ) -> Step:
        """Compute a step.

        Args:
            parameters: Values of the variables.
            rows: Rows of each table.
            ids: Ids of each table.
            leaves: The tensors of a minibatch's element, as a flat list.
            presence: Weight of each sample; required for a graph with `num_rows`, otherwise unused.
            seed: Seed of the step.

        Raises:
            IdOutOfRange: An embedding layer with its own variable has no row for an id.
        """
        inputs: list[Any] = [parameters.trainable]
        if self._built.non_trainable:
            inputs.append(parameters.non_trainable)
        inputs.extend(rows.get(name, none) for name, none in self._no_rows.items())
        for name in self._counted:
            inputs.extend(_occurrences(ids[name]))
        inputs.extend(leaves)
        if presence is not None:
            inputs.append(presence)
        if self._takes_seed:
            inputs.append(as_int64(seed))
        results = [_view(part) for part in self._call(inputs)]
        told, gradient = results[:2]
        change = results.pop(2) if self._built.non_trainable else self._no_change
        self._check_ids(told)
        loss, row_gradients = float(told[0]), results[2:]
        not_finite = self._wrong(loss, [gradient, *row_gradients])
        of_tables = dict(zip(self._reached_tables, row_gradients, strict=True))
        return Step(loss, gradient, change, of_tables, not_finite, self._unreached)

    def _check_ids(self, told: Floats) -> None:
        for bound, in_range in zip(self._lookups.bounds, told[1:], strict=True):
            if not in_range:
                raise IdOutOfRange(bound)

    def _wrong(self, loss: float, gradients: Sequence[Floats]) -> str:
        """Describe values that are not finite; empty: all are.  NumPy checks them ten times faster than XLA."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        wrong = [part for part, found in zip(self._parts, gradients, strict=True) if not np.isfinite(found).all()]
        if not wrong:
            return ""
        return ", ".join(wrong) + (" is" if wrong == ["the gradient"] else " are") + " not finite"

    def _signature(self) -> list[Any]:
        initial = self._built.initial
        signature = [tf.TensorSpec(initial.trainable.shape)]
        if self._built.non_trainable:
            signature.append(tf.TensorSpec(initial.non_trainable.shape))
        counts = {name: None if self._num_rows is None else self._num_rows[name] for name in self._tables}
        signature += [tf.TensorSpec((counts[name], table.dim)) for name, table in self._tables.items()]
        for name in self._counted:
            signature += [tf.TensorSpec((counts[name],), tf.int32), tf.TensorSpec((counts[name],))]
        leaves = tf.nest.flatten(self._spec, expand_composites=True)
        signature += [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves]
        if self._num_rows is not None:
            signature.append(tf.TensorSpec((leaves[0].shape[0],)))
        if self._takes_seed:
            signature.append(tf.TensorSpec((), tf.int64))
        return signature

    def _step(self, *flat: Any) -> list[Any]:
        built, inputs = self._built, iter(flat)
        trainable = next(inputs)
        non_trainable = next(inputs) if built.non_trainable else None
        rows = {name: next(inputs) for name in self._tables}
        places = {name: (next(inputs), next(inputs)) for name in self._counted}
        rest = list(inputs)
        if self._takes_seed:
            built.seeds.assign(rest.pop())
        else:
            built.seeds.install()
        presence = None if self._num_rows is None else rest.pop()
        examples = take_apart(self._mode, tf.nest.pack_sequence_as(self._spec, rest, expand_composites=True))
        if non_trainable is not None:
            assign_flat(built.non_trainable, non_trainable)
        if self._assigns:
            assign_flat(built.trainable, trainable)
        given = GivenValues(built.trainable, split_flat(built.trainable, trainable))
        self._lookups = lookups = IdWatch()
        with tf.GradientTape() as tape:
            tape.watch(rows)
            tape.watch(given.sources)
            rows_given = nullcontext() if built.placement is None else built.placement.using(Given(rows))
            with nullcontext() if self._assigns else given, rows_given, lookups.watched(), inlined():
                loss = self._loss(examples, presence)
            loss += self._regularization(rows, places)
        self._assigns = self._assigns or hidden_from_gradients(given.sources)
        sources = [v.value for v in built.trainable] if self._assigns else given.sources
        found, of_rows = tape.gradient(loss, [sources, rows])
        self._unreached = _without_gradient(found, sources)
        given_zero = [tf.zeros_like(own) if part is None else part for part, own in zip(found, sources, strict=True)]
        dense = [tf.convert_to_tensor(part) for part in given_zero]
        sparse = {name: tf.convert_to_tensor(part) for name, part in of_rows.items() if part is not None}
        self._reached_tables = list(sparse)
        dense, sparse = self._clipping.apply(dense, sparse, {name: place for name, (place, _) in places.items()})
        parts = [tf.reshape(part, [-1]) for part in dense]
        gradient = tf.concat(parts, 0) if parts else tf.zeros([0])
        told = tf.stack([loss, *(tf.cast(good, tf.float32) for good in lookups.in_range())])
        change = [] if non_trainable is None else [flat_tensor(built.non_trainable) - non_trainable]
        return [told, gradient, *change, *sparse.values()]

    def _regularization(self, rows: Mapping[str, Any], places: Mapping[str, Any]) -> Any:
        """Return the regularization loss of the rows of a minibatch, each id counted once."""
        total = tf.zeros(())
        for name, table in self._tables.items():
            if table.regularizer is not None:
                is_first = places[name][1]
                total += tf.cast(tf.reduce_sum(table.regularizer(rows[name] * is_first[:, None])), tf.float32)
        return total


def _without_gradient(gradients: Sequence[Any], sources: Sequence[Any]) -> Ranges:
    """Return the ranges, in the flat vector of the sources, of sources without a gradient."""
    bounds = np.cumsum([0, *(math.prod(source.shape) for source in sources)]).tolist()
    ranges = zip(bounds[:-1], bounds[1:], gradients, strict=True)
    return tuple((start, end) for start, end, gradient in ranges if gradient is None and start < end)


class _FlatCall:
    """Calls a concrete function without looking at its arguments; a third of a small step's time is in that."""

    def __init__(self, function: Any) -> None:
        self.graph = function.graph
        self._captured = list(function.captured_inputs)
        flat = getattr(getattr(function, "_inference_function", None), "call_preflattened", None)
        self._call: Callable[[list[Any]], Any] = flat or (lambda tensors: function(*tensors[: len(function.inputs)]))

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        tensors = [part if isinstance(part, tf.Tensor) else _tensor(part) for part in inputs]
        results: Sequence[Any] = self._call(tensors + self._captured)
        return results


def _tensor(values: Any) -> Any:
    """Return an array as tensor; its values are copied only if their alignment does not suit TensorFlow."""
    if not (isinstance(values, np.ndarray) and values.dtype == np.float32 and values.size):
        return tf.constant(values)
    flags = values.flags
    if not (flags.c_contiguous and flags.writeable) or values.__array_interface__["data"][0] % _ALIGNMENT:
        values = _aligned(values)
    return tf.experimental.dlpack.from_dlpack(values.__dlpack__())


def _aligned(values: Floats) -> Floats:
    memory = np.empty(values.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    copy = memory[start : start + values.nbytes].view(np.float32).reshape(values.shape)
    copy[...] = values
    return copy


def _view(tensor: Any) -> npt.NDArray[Any]:
    """Return the values of a tensor without copying them."""
    return np.asarray(memoryview(tensor))


def _occurrences(ids: Ids) -> tuple[npt.NDArray[np.int32], Floats]:
    """Return for each id the index of its unique id [n], and 1 if it is the first occurrence [n]."""
    _, first, place = np.unique(ids, return_index=True, return_inverse=True)
    is_first = np.zeros(len(ids), np.float32)
    is_first[first] = 1.0
    return place.astype(np.int32), is_first
