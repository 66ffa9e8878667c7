"""Base classes of this package's layers, which do not cast their inputs and have no trainable variables.

Also functions for the three kinds of tensors that a layer accepts: dense, sparse and ragged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

PACKAGE = "elasticdl_preprocessing"


class PreprocessingLayer(keras.layers.Layer):  # type: ignore[misc]
    """A layer with inputs that Keras never casts, whatever the dtype policy: they may be ids or strings."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.autocast = False
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True


class ElementwiseLayer(PreprocessingLayer):
    """Maps each value independently: the result has the kind (dense, sparse, ragged) and the shape of the input."""

    output_dtype = "int64"

    def values(self, values: Tensor) -> Tensor:
        """Return the results for a dense tensor of values, of any shape."""
        raise NotImplementedError

    def call(self, inputs: Any) -> Tensor:
        return map_values(self.values, as_tensor(inputs))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def compute_output_spec(self, inputs: Any) -> Any:
        return spec_like(inputs, self.output_dtype)


Tensor = Any  # tf.Tensor, tf.SparseTensor or tf.RaggedTensor; TensorFlow is untyped here


def as_tensor(inputs: Any) -> Tensor:
    """Return a layer's input as a tensor; a sparse or ragged tensor is returned unchanged."""
    if isinstance(inputs, (tf.Tensor, tf.SparseTensor, tf.RaggedTensor)):
        return inputs
    if isinstance(inputs, tf.compat.v1.ragged.RaggedTensorValue):
        return tf.ragged.constant(inputs.to_list(), inputs.dtype)
    return tf.convert_to_tensor(inputs)


def map_values(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Apply a function to the values of a tensor; cells not stored in a sparse tensor remain not stored."""
    if isinstance(inputs, tf.SparseTensor):
        return with_sparse_values(inputs, function(inputs.values))
    if isinstance(inputs, tf.RaggedTensor):
        return inputs.with_flat_values(function(inputs.flat_values))
    return function(inputs)


def with_sparse_values(inputs: Tensor, values: Tensor) -> Tensor:
    """Return a sparse tensor with other values and the same static shape."""
    result = tf.SparseTensor(inputs.indices, values, inputs.dense_shape)
    return _with_shape(result, inputs.shape)


def keep_cells(inputs: Tensor, kept: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a sparse or ragged tensor with only some of its cells.

    Args:
        kept: Maps values [n] to bool [n]: whether to keep each cell.
    """
    if isinstance(inputs, tf.SparseTensor):
        return _with_shape(tf.sparse.retain(inputs, kept(inputs.values)), inputs.shape)
    return tf.ragged.boolean_mask(inputs, inputs.with_flat_values(kept(inputs.flat_values)))


def spec_like(inputs: Any, dtype: str) -> Any:
    """Return the symbolic output of a layer that changes only values and dtype."""
    return symbolic(inputs, inputs.shape, dtype, sparse=is_sparse(inputs), ragged=is_ragged(inputs))


def symbolic(inputs: Any, shape: Any, dtype: str, sparse: bool = False, ragged: bool = False) -> Any:
    """Return a symbolic tensor; a ragged one has the ragged dimensions of `inputs`, if `inputs` is ragged."""
    if not ragged:
        return keras.KerasTensor(shape, dtype, sparse=sparse)
    splits = getattr(inputs, "row_splits_dtype", None)
    rank = getattr(inputs, "ragged_rank", None)
    return keras.KerasTensor(shape, dtype, ragged=True, ragged_rank=rank, row_splits_dtype=splits)


def is_sparse(inputs: Any) -> bool:
    """Return whether a tensor, symbolic or not, is sparse."""
    return isinstance(inputs, tf.SparseTensor) or bool(getattr(inputs, "sparse", False))


def is_ragged(inputs: Any) -> bool:
    """Return whether a tensor, symbolic or not, is ragged."""
    return isinstance(inputs, tf.RaggedTensor) or bool(getattr(inputs, "ragged", False))


def dtype_name(inputs: Any) -> str:
    """Return the name of the dtype of a tensor, symbolic or not."""
    return str(keras.backend.standardize_dtype(inputs.dtype))


def _with_shape(result: Tensor, shape: Any) -> Tensor:
    if shape.rank is not None:
        result.set_shape(shape)
    return result
