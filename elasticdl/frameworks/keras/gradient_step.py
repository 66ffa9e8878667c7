"""Which graph a minibatch runs through.

A full minibatch runs through a graph of just its shapes, compiled by XLA; a short one, too, filled up with samples of
weight 0, where that changes nothing.  Everything else runs through a graph that takes any shape and is not compiled:
short minibatches of other models, ids that vary in number, operations that XLA lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from elasticdl.frameworks.framework import Floats, Mode, Parameters, Step
from elasticdl.frameworks.keras.clipping import Clipping
from elasticdl.frameworks.keras.examples import Minibatch
from elasticdl.frameworks.keras.gradient_graph import GradientGraph
from elasticdl.frameworks.keras.lookups import IdOutOfRange
from elasticdl.frameworks.keras.losses import TotalLoss
from elasticdl.frameworks.keras.model import BuiltModel
from elasticdl.frameworks.keras.operations import slow_with_xla, warn_of_chance
from elasticdl.frameworks.keras.padding import Padding

_log = logging.getLogger("elasticdl.keras")


class GradientStep:
    """The gradients of one mode of a model; see `Framework.gradients`."""

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
            spec: of a minibatch's element.
            size: of a full minibatch.
            jit_compile: try XLA.
        """
        self._loss = loss
        self._spec = spec
        self._size = size
        self._all = tf.ones([size])
        self._make: Callable[..., GradientGraph] = lambda *shape: GradientGraph(built, loss, clipping, mode, *shape)
        self._padding = Padding(built, mode, size)
        self._full_spec = _full_spec(spec, size) if jit_compile else None
        self._full: GradientGraph | None = None
        self._any: GradientGraph | None = None

    def __call__(
        self, minibatch: Minibatch, size: int, parameters: Parameters, rows: Mapping[str, Floats], seed: int
    ) -> Step:
        """See `Framework.gradients`; `size` is that of the minibatch."""
        step = None
        leaves = minibatch.leaves
        if self._full_spec is not None and size == self._size:
            if self._full is None:
                step = self._compiled(parameters, rows, minibatch, seed)
            elif self._full.fits(rows):
                step = self._full(parameters, rows, minibatch.ids, leaves, self._all, seed)
            else:
                self._drop_xla("the number of ids of a minibatch varies")
        elif self._full is not None and self._loss.heeds_presence:
            presence = self._loss.presence(size, self._size)
            step = self._padding.run(self._full, parameters, rows, minibatch, presence, size, seed)
        if step is not None:
            return step
        if self._any is None:
            self._any = self._make(self._spec, None, False)
            warn_of_chance(self._any.operations)
        return self._any(parameters, rows, minibatch.ids, leaves, None, seed)

    def _compiled(
        self, parameters: Parameters, rows: Mapping[str, Floats], minibatch: Minibatch, seed: int
    ) -> Step | None:
        """The first step of the compiled graph; None: it cannot be compiled."""
        num_rows = {name: len(ids) for name, ids in minibatch.ids.items()}
        try:
            full = self._make(self._full_spec, num_rows, True)
            slow = slow_with_xla(full.operations)
            if slow:
                self._drop_xla(f"{slow} is slower with XLA")
                return None
            step = full(parameters, rows, minibatch.ids, minibatch.leaves, self._all, seed)
        except IdOutOfRange:
            raise
        except (tf.errors.OpError, NotImplementedError, ValueError) as error:
            self._drop_xla(str(error).strip().partition("\n")[0])
            return None
        warn_of_chance(full.operations)
        self._full = full
        return step

    def _drop_xla(self, reason: str) -> None:
        _log.info("Steps are not compiled with XLA: %s", reason)
        self._full_spec, self._full = None, None


def _full_spec(spec: Any, size: int) -> Any | None:
    """The spec with the size of a full minibatch; None: something in it is of no fixed shape, or not a number."""
    leaves = tf.nest.flatten(spec)
    for leaf in leaves:
        if type(leaf) is not tf.TensorSpec or leaf.dtype == tf.string or leaf.shape.rank in (None, 0):
            return None
        if not leaf.shape[1:].is_fully_defined() or leaf.shape[0] not in (None, size):
            return None
    return tf.nest.map_structure(lambda leaf: tf.TensorSpec([size, *leaf.shape[1:]], leaf.dtype), spec)
