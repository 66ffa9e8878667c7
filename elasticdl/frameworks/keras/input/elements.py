"""Elements of the pipeline's dataset: how a minibatch and the end of a task are packed, and one iteration over them.

Where every part is an ordinary tensor they leave tf.data as flat lists, by one raw operation, and an end has parts
without samples: what tf.data's own iterator does in Python for a structure takes as long as parsing the minibatch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.data.ops.map_op import _MapDataset  # the public `map` cannot be told where to run

from elasticdl.frameworks.keras.operations import has_control_flow, operations_of_dataset

DISCARDING = "elasticdl-discard"  # name of the threads that end iterations

Head = npt.NDArray[np.int64]
Int = Any  # int64 scalar tensor


class Packing:
    """From contents of one spec to elements and back."""

    def __init__(self, content: Any) -> None:
        """
        Args:
            content: spec of what is packed.
        """
        self._content = content
        leaves = tf.nest.flatten(content)
        self.is_plain = all(type(leaf) is tf.TensorSpec and leaf.shape.rank for leaf in leaves)

    def pack(self, head: list[Int], content: Any) -> Any:
        """The element of a minibatch."""
        if self.is_plain:
            return tf.stack(head), *tf.nest.flatten(content)
        return tf.stack(head), tf.experimental.Optional.from_value(content)

    def end(self, head: list[Int]) -> Any:
        """The element of an end."""
        if self.is_plain:
            return tf.stack(head), *(_nothing(leaf) for leaf in tf.nest.flatten(self._content))
        return tf.stack(head), tf.experimental.Optional.empty(self._content)

    @staticmethod
    def unpack(parts: Any) -> list[Any]:
        """The tensors of a minibatch's content, flat."""
        if len(parts) == 1 and isinstance(parts[0], tf.experimental.Optional):
            return list(tf.nest.flatten(parts[0].get_value(), expand_composites=True))
        return list(parts)


class Elements:
    """One iteration over a dataset of packed elements, which can be let go without waiting."""

    def __init__(self, dataset: Any, is_plain: bool) -> None:
        self._iterator = iter(dataset)
        self._next = self._next_plain if is_plain else self._next_of_any
        leaves = tf.nest.flatten(dataset.element_spec) if is_plain else []
        self._types = [leaf.dtype for leaf in leaves]
        self._shapes = [leaf.shape for leaf in leaves]

    def next(self) -> tuple[Head, Any] | None:
        """The head and what `Packing.unpack` takes; None: the end.

        Raises:
            tf.errors.OpError: user code raised in the pipeline.
        """
        element = self._next()
        return None if element is None else (element[0].numpy(), element[1:])

    def discard(self) -> None:
        """Ends the iteration in a thread: it waits for tf.data's, which may itself wait for a task."""
        held = [self._iterator]
        self._iterator = iter(())
        threading.Thread(target=held.clear, name=DISCARDING, daemon=True).start()

    def _next_plain(self) -> Any:
        try:
            return tf.raw_ops.IteratorGetNext(
                iterator=self._iterator._iterator_resource, output_types=self._types, output_shapes=self._shapes
            )
        except tf.errors.OutOfRangeError:
            return None

    def _next_of_any(self) -> Any:
        return next(self._iterator, None)


def mapped_inline(dataset: Any, function: Callable[..., Any]) -> Any:
    """``dataset.map(function)``, whose operations run in the thread that asks for the element, if they can.

    Handing each of them to a pool, whose threads look for work by spinning, costs more than most of them take.
    """
    inline = _MapDataset(dataset, function, use_inter_op_parallelism=False)
    return _MapDataset(dataset, function) if has_control_flow(operations_of_dataset(inline)) else inline


def _nothing(leaf: Any) -> Any:
    return tf.zeros([0, *(dim or 0 for dim in leaf.shape.as_list()[1:])], leaf.dtype)
