"""Which graph a minibatch runs through.

A full minibatch runs through a graph of just its shapes, compiled by XLA; a short one, too, filled up with samples of
weight 0, where that changes nothing.  Everything else runs through a graph that takes any shape and is not compiled:
short minibatches of other models, ids that vary in number, operations that XLA lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from elasticdl.frameworks.framework import Floats, Mode, Parameters, Step
from elasticdl.frameworks.keras.losses import TotalLoss
from elasticdl.frameworks.keras.model import BuiltModel
from elasticdl.frameworks.keras.operations import warn_of_chance
from elasticdl.frameworks.keras.samples import KerasMinibatch, full_spec
from elasticdl.frameworks.keras.step.clipping import Clipping
from elasticdl.frameworks.keras.step.gradient_graph import GradientGraph
from elasticdl.frameworks.keras.step.padding import Padding
from elasticdl.frameworks.keras.step.xla import first_run, tell_uncompiled


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
        self._full_spec = full_spec(spec, size) if jit_compile else None
        self._full: GradientGraph | None = None
        self._any: GradientGraph | None = None

    def __call__(
        self, minibatch: KerasMinibatch, size: int, parameters: Parameters, rows: Mapping[str, Floats], seed: int
    ) -> Step:
        """See `Framework.gradients`; `size` is that of the minibatch."""
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
