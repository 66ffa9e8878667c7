"""`ConcatenateWithOffset`: ids of several columns in one space, so that they can share one embedding table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from elasticdl_preprocessing.layer import (
    PACKAGE,
    PreprocessingLayer,
    Tensor,
    as_tensor,
    dtype_name,
    is_ragged,
    is_sparse,
    map_values,
    symbolic,
)


@keras.saving.register_keras_serializable(package=PACKAGE)
class ConcatenateWithOffset(PreprocessingLayer):
    """Adds ``offsets[i]`` to the i-th input and concatenates: dense inputs, or sparse, or ragged ones.

    An input that is no list is returned as it is.

    Args:
        offsets: None: nothing is added.

    Raises:
        ValueError: there are more inputs than offsets, or fewer.
        TypeError: the inputs are of several kinds.
    """

    def __init__(self, offsets: Sequence[int] | None, axis: int = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.offsets = None if offsets is None else list(offsets)
        self.axis = axis

    def call(self, inputs: Any) -> Tensor:
        if not isinstance(inputs, (list, tuple)):
            return inputs
        tensors = [as_tensor(part) for part in inputs]
        self._check(tensors)
        if self.offsets is not None:
            tensors = [_shifted(part, offset) for part, offset in zip(tensors, self.offsets, strict=True)]
        if is_sparse(tensors[0]):
            return tf.sparse.concat(self.axis, tensors)
        return tf.concat(tensors, self.axis)

    def compute_output_spec(self, inputs: Any) -> Any:
        if not isinstance(inputs, (list, tuple)):
            return inputs
        self._check(inputs)
        first = inputs[0]
        shape = self.compute_output_shape([part.shape for part in inputs])
        return symbolic(first, shape, dtype_name(first), sparse=is_sparse(first), ragged=is_ragged(first))

    def compute_output_shape(self, input_shape: Any) -> Any:
        if not isinstance(input_shape[0], (list, tuple)):
            return input_shape
        shape = list(input_shape[0])
        sizes = [part[self.axis] for part in input_shape]
        shape[self.axis] = None if None in sizes else sum(sizes)
        return tuple(shape)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "offsets": self.offsets, "axis": self.axis}

    def _check(self, inputs: Sequence[Any]) -> None:
        if self.offsets is not None and len(self.offsets) != len(inputs):
            raise ValueError(
                f"ConcatenateWithOffset {self.name!r} has {len(self.offsets)} offsets, and is given "
                f"{len(inputs)} inputs."
            )
        if len({(is_sparse(part), is_ragged(part)) for part in inputs}) > 1:
            raise TypeError(
                f"ConcatenateWithOffset {self.name!r} is given tensors of several kinds: all must be dense, or all "
                "sparse, or all ragged."
            )


def _shifted(inputs: Tensor, offset: int) -> Tensor:
    return map_values(lambda values: values + tf.constant(offset, values.dtype), inputs)
