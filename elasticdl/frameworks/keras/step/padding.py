"""Fills a short minibatch up with copies of its own samples, to be given the weight 0.

That is exact where samples do not see each other.  Whether they do is tried once, with two different fillings: batch
normalisation, negatives taken from the minibatch and the like give two different results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elasticdl.frameworks.framework import Floats, Ids, Mode, Parameters, Step
from elasticdl.frameworks.keras.model import BuiltModel
from elasticdl.frameworks.keras.samples import KerasMinibatch, take_apart

_RELATIVE = 1e-5


class Graph(Protocol):
    """See `GradientGraph`."""

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
    """Runs short minibatches through the graph of full ones."""

    def __init__(self, built: BuiltModel, mode: Mode, size: int) -> None:
        """
        Args:
            size: of a full minibatch.
        """
        self._built = built
        self._mode = mode
        self._size = size
        self._is_exact: bool | None = None

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
        """The step of a minibatch of `count` samples; None: it would not be exact."""

        def filled(samples: npt.NDArray[np.int64]) -> Step | None:
            copies = [tf.gather(leaf, samples) for leaf in minibatch.leaves]
            ids = self._ids(minibatch, copies)
            where = {name: _find(minibatch.ids[name], own) for name, own in ids.items()}
            given = {name: rows[name][place] for name, place in where.items()}
            if not graph.fits(given):
                return None
            step = graph(parameters, given, ids, copies, presence, seed)
            gradients = {
                name: _returned(step.row_gradients[name], place, len(rows[name])) for name, place in where.items()
            }
            return Step(step.loss, step.gradient, step.change, gradients, step.not_finite)

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
    """For each wanted id a place where `ids` has it."""
    order = np.argsort(ids, kind="stable")
    return order[np.searchsorted(ids[order], wanted)]


def _returned(gradients: Floats, place: npt.NDArray[np.intp], count: int) -> Floats:
    """Gradients [count, dim] of the rows that were copied; those of an id may be at any of its places."""
    total = np.zeros((count, gradients.shape[1]), np.float32)
    np.add.at(total, place, gradients)
    return total


def _same(one: Step, other: Step) -> bool:
    """Equal but for the order of sums."""
    pairs = [(one.gradient, other.gradient), (one.change, other.change)]
    pairs += [(one.row_gradients[name], other.row_gradients[name]) for name in one.row_gradients]
    largest = max((float(np.abs(a).max(initial=0.0)) for a, _ in pairs), default=0.0)
    close = (np.allclose(a, b, rtol=_RELATIVE, atol=_RELATIVE * largest) for a, b in pairs)
    return bool(np.isclose(one.loss, other.loss, rtol=_RELATIVE)) and all(close)
