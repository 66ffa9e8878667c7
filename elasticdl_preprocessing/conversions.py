"""Layers that convert tensors: `ToNumber` changes the dtype, `ToSparse` and `ToRagged` change the kind."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from elasticdl_preprocessing.layer import (
    PACKAGE,
    ElementwiseLayer,
    PreprocessingLayer,
    Tensor,
    as_tensor,
    dtype_name,
    is_ragged,
    is_sparse,
    keep_cells,
    symbolic,
)


@keras.saving.register_keras_serializable(package=PACKAGE)
class ToNumber(ElementwiseLayer):
    """Parses strings and casts numbers: `ToNumber("float32", -1)(["1.5", " "])` is [1.5, -1.0].

    A step fails on a string that is neither blank nor a number, or on a number outside the range of an integer
    `out_type`.

    Args:
        out_type: Dtype of the result, such as "float32" or `tf.int64`.
        default_value: Result for strings that are empty or blank.

    Raises:
        ValueError: `out_type` is not a numeric dtype, or it is an integer dtype and `default_value` is not an integer.
    """

    def __init__(self, out_type: Any, default_value: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.out_type = _number_type(out_type)
        self.default_value = default_value if tf.as_dtype(self.out_type).is_floating else _whole(default_value)
        self.output_dtype = self.out_type

    def values(self, values: Tensor) -> Tensor:
        if values.dtype != tf.string:
            return tf.cast(values, self.out_type)
        parsed = self.out_type if self.out_type in ("float32", "float64", "int32", "int64") else _wider(self.out_type)
        values = tf.strings.strip(values)
        is_empty = tf.equal(values, "")
        numbers = tf.strings.to_number(tf.where(is_empty, "0", values), parsed)
        if parsed != self.out_type and numbers.dtype.is_integer:
            numbers = _held_by(tf.as_dtype(self.out_type), numbers)
        return tf.where(is_empty, tf.constant(self.default_value, self.out_type), tf.cast(numbers, self.out_type))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "out_type": self.out_type, "default_value": self.default_value}


class _Dropping(PreprocessingLayer):
    """A layer that drops the cells with one value."""

    _of_floats: float | None = None  # default of `ignore_value` for floats

    def __init__(self, ignore_value: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_value = ignore_value

    def _ignored(self, dtype: Any) -> Any:
        """Return the value of the cells to drop; None: drop no cell."""
        if self.ignore_value is not None:
            return self.ignore_value
        if dtype == tf.string:
            return ""
        if dtype.is_floating:
            return self._of_floats
        return -1 if dtype.is_integer and not dtype.is_unsigned else None

    def _kept(self, values: Tensor) -> Tensor:
        ignored = self._ignored(values.dtype)
        if ignored is None:
            return tf.ones_like(values, tf.bool)
        if ignored != ignored:  # NaN: it is not equal to itself
            return ~tf.math.is_nan(values)
        return tf.not_equal(values, tf.constant(ignored, values.dtype))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "ignore_value": self.ignore_value}


@keras.saving.register_keras_serializable(package=PACKAGE)
class ToSparse(_Dropping):
    """Converts a tensor of any kind to a sparse one, without the cells that equal `ignore_value`.

    `ToSparse()([[1, -1], [-1, 3]])` stores 1 at [0, 0] and 3 at [1, 1].

    Args:
        ignore_value: None: "" for strings, −1 for signed integers, 0.0 for floats; no cell of unsigned integers is
            dropped.
    """

    _of_floats = 0.0

    def call(self, inputs: Any) -> Tensor:
        inputs = as_tensor(inputs)
        if isinstance(inputs, tf.RaggedTensor):
            inputs = inputs.to_sparse()
        if isinstance(inputs, tf.SparseTensor):
            return keep_cells(inputs, self._kept)
        indices = tf.where(self._kept(inputs))
        sparse = tf.SparseTensor(indices, tf.gather_nd(inputs, indices), tf.shape(inputs, tf.int64))
        if inputs.shape.rank is not None:
            sparse.set_shape(inputs.shape)
        return sparse

    def compute_output_spec(self, inputs: Any) -> Any:
        shape = [inputs.shape[0], *([None] * (len(inputs.shape) - 1))] if is_ragged(inputs) else inputs.shape
        return symbolic(inputs, shape, dtype_name(inputs), sparse=True)


@keras.saving.register_keras_serializable(package=PACKAGE)
class ToRagged(_Dropping):
    """Converts a dense or ragged tensor to a ragged one, without the cells that equal `ignore_value`.

    `ToRagged()(["a,b", "c"])` is [["a", "b"], ["c"]]: strings are split first, and the parts of all cells of a row are
    joined to one row.

    Args:
        sep: Separator for strings; None or "": do not split.
        ignore_value: None: "" for strings, −1 for signed integers; no cell of floats and unsigned integers is dropped.

    Raises:
        TypeError: The input is sparse.
        ValueError: The input does not have one or two dimensions.
    """

    def __init__(self, sep: str | None = ",", ignore_value: Any = None, **kwargs: Any) -> None:
        super().__init__(ignore_value, **kwargs)
        self.sep = sep

    def call(self, inputs: Any) -> Tensor:
        inputs = as_tensor(inputs)
        self._check(inputs, inputs.shape.rank)
        if isinstance(inputs, tf.Tensor):
            cells = inputs[:, None] if inputs.shape.rank == 1 else inputs
            inputs = tf.RaggedTensor.from_tensor(cells)
        if self.sep and inputs.dtype == tf.string:
            inputs = tf.strings.split(inputs, self.sep).merge_dims(1, 2)
        return keep_cells(inputs, self._kept)

    def compute_output_spec(self, inputs: Any) -> Any:
        self._check(inputs, len(inputs.shape))
        return symbolic(None, (inputs.shape[0], None), dtype_name(inputs), ragged=True)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return (input_shape[0], None)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "sep": self.sep}

    def _check(self, inputs: Any, rank: int | None) -> None:
        if is_sparse(inputs):
            raise TypeError(f"ToRagged {self.name!r} is given a sparse tensor; it takes dense and ragged ones.")
        if rank not in (1, 2):
            raise ValueError(f"ToRagged {self.name!r} is given {rank} dimensions; it takes one or two.")


def _number_type(out_type: Any) -> str:
    dtype = tf.as_dtype(out_type)
    if not (dtype.is_floating or dtype.is_integer):
        raise ValueError(f"ToNumber: {dtype.name} is not the dtype of a number.")
    return str(dtype.name)


def _whole(number: Any) -> int:
    try:
        whole = int(number)
        is_same = whole == number
    except (TypeError, ValueError, OverflowError):  # None, NaN, infinity
        is_same = False
    if not is_same:
        raise ValueError(f"ToNumber: default_value={number!r} is no integer, as out_type is.")
    return whole


def _held_by(dtype: Any, numbers: Tensor) -> Tensor:
    """Return integers of a wider dtype; fail the step if one is out of `dtype`'s range, since a cast would wrap it."""
    least, most = dtype.min, min(dtype.max, numbers.dtype.max)
    flat = tf.reshape(numbers, [-1])
    wrong = tf.boolean_mask(flat, (flat < least) | (flat > most))
    message = f"ToNumber: {dtype.name} holds {least} … {most}, not"
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(tf.size(wrong), 0), [message, wrong])]):
        return tf.identity(numbers)


def _wider(dtype: str) -> str:
    """Return the dtype to which strings are parsed before the cast to `dtype`."""
    return "float32" if tf.as_dtype(dtype).is_floating else "int64"
