"""Watches the ordinary embeddings of a model for ids that they have no row for.

XLA takes the nearest row for such an id and says nothing, TensorFlow prints a page; tables on the parameter servers are
watched in the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf


class IdOutOfRange(ValueError):
    """An embedding layer was given an id that it has no row for."""


class IdWatch:
    """The calls of ordinary embedding layers while a function is traced."""

    def __init__(self) -> None:
        self.bounds: list[str] = []  # describe what every id of a call must be
        self._in_range: list[Any] = []
        self._graph = tf.compat.v1.get_default_graph()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Calls inside are noted."""
        call = keras.layers.Embedding.call

        def noted(layer: Any, inputs: Any) -> Any:
            return call(layer, self._noted(layer, inputs))

        keras.layers.Embedding.call = noted
        try:
            yield
        finally:
            keras.layers.Embedding.call = call

    def in_range(self) -> list[Any]:
        """For each call whether all ids are in range, as scalars of the graph; those that are not became 0."""
        return self._in_range

    def _noted(self, layer: Any, inputs: Any) -> Any:
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(self._noted(layer, inputs.flat_values))
        if isinstance(inputs, tf.SparseTensor):
            return tf.SparseTensor(inputs.indices, self._noted(layer, inputs.values), inputs.dense_shape)
        if inputs.graph is not self._graph:  # a loop or a condition, whose values are not seen from outside
            return inputs
        ids = inputs if inputs.dtype.is_integer else tf.cast(inputs, tf.int32)  # as Keras does
        are_good = (ids >= 0) & (ids < layer.input_dim)
        self._in_range.append(tf.reduce_all(are_good))
        self.bounds.append(f"the embedding layer {layer.name!r}: an id is not in [0, {layer.input_dim}), its input_dim")
        return tf.where(are_good, ids, tf.zeros_like(ids))
