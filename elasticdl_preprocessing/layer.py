"""The base of this package's layers: they take tensors as they come and have nothing that is trained.

Functions for the three kinds of tensors that a layer gets, dense, sparse and ragged; they work on the values alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

PACKAGE = "elasticdl_preprocessing"


class PreprocessingLayer(keras.layers.Layer):  # type: ignore[misc]
    """A layer whose inputs Keras does not cast, whatever the policy of dtypes: ids and strings are among them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.autocast = False
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True


class ElementwiseLayer(PreprocessingLayer):
    """Turns each value into another, alone: the result is of the kind and the shape of the input."""

    output_dtype = "int64"

    def values(self, values: Tensor) -> Tensor:
        """The results for values of any shape."""
        raise NotImplementedError

    def call(self, inputs: Any) -> Tensor:
        return map_values(self.values, as_tensor(inputs))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def compute_output_spec(self, inputs: Any) -> Any:
        return spec_like(inputs, self.output_dtype)


Tensor = Any  # tf.Tensor, tf.SparseTensor or tf.RaggedTensor; TensorFlow is untyped here


def as_tensor(inputs: Any) -> Tensor:
    """Return a layer's input as a tensor; sparse and ragged ones stay what they are."""
    if isinstance(inputs, (tf.Tensor, tf.SparseTensor, tf.RaggedTensor)):
        return inputs
    if isinstance(inputs, tf.compat.v1.ragged.RaggedTensorValue):
        return tf.ragged.constant(inputs.to_list(), inputs.dtype)
    return tf.convert_to_tensor(inputs)


def map_values(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """The same tensor with other values; cells that a sparse tensor does not store stay unstored."""
    if isinstance(inputs, tf.SparseTensor):
        return with_sparse_values(inputs, function(inputs.values))
    if isinstance(inputs, tf.RaggedTensor):
        return inputs.with_flat_values(function(inputs.flat_values))
    return function(inputs)


def with_sparse_values(inputs: Tensor, values: Tensor) -> Tensor:
    """A sparse tensor with other values; its static shape is kept."""
    result = tf.SparseTensor(inputs.indices, values, inputs.dense_shape)
    return _with_shape(result, inputs.shape)


def keep_cells(inputs: Tensor, kept: Callable[[Tensor], Tensor]) -> Tensor:
    """A sparse or ragged tensor without some of its cells.

    Args:
        kept: values [n] to whether each is kept, bool [n].
    """
    if isinstance(inputs, tf.SparseTensor):
        return _with_shape(tf.sparse.retain(inputs, kept(inputs.values)), inputs.shape)
    return tf.ragged.boolean_mask(inputs, inputs.with_flat_values(kept(inputs.flat_values)))


def spec_like(inputs: Any, dtype: str) -> Any:
    """The symbolic tensor of a layer that changes values and dtype only."""
    return symbolic(inputs, inputs.shape, dtype, sparse=is_sparse(inputs), ragged=is_ragged(inputs))


def symbolic(inputs: Any, shape: Any, dtype: str, sparse: bool = False, ragged: bool = False) -> Any:
    """A symbolic tensor; a ragged one has as many ragged dimensions as `inputs` has, if `inputs` is ragged."""
    if not ragged:
        return keras.KerasTensor(shape, dtype, sparse=sparse)
    splits = getattr(inputs, "row_splits_dtype", None)
    rank = getattr(inputs, "ragged_rank", None)
    return keras.KerasTensor(shape, dtype, ragged=True, ragged_rank=rank, row_splits_dtype=splits)


def is_sparse(inputs: Any) -> bool:
    """Whether a tensor, or a symbolic one, is sparse."""
    return isinstance(inputs, tf.SparseTensor) or bool(getattr(inputs, "sparse", False))


def is_ragged(inputs: Any) -> bool:
    """Whether a tensor, or a symbolic one, is ragged."""
    return isinstance(inputs, tf.RaggedTensor) or bool(getattr(inputs, "ragged", False))


def dtype_name(inputs: Any) -> str:
    """The dtype of a tensor, or of a symbolic one."""
    return str(keras.backend.standardize_dtype(inputs.dtype))


def _with_shape(result: Tensor, shape: Any) -> Tensor:
    if shape.rank is not None:
        result.set_shape(shape)
    return result
