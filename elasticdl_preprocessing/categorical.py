"""Layers that map categories to ids: `Hashing`, without any statistics, and `IndexLookup`, with a vocabulary.

`ConcatenateWithOffset` moves the ids of several columns into one range, so that they can share one embedding table.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
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
    map_values,
    spec_like,
    symbolic,
)

_SHOWN = 5


@keras.saving.register_keras_serializable(package=PACKAGE)
class Hashing(keras.layers.Hashing):  # type: ignore[misc]
    """Maps each string to its FarmHash fingerprint modulo `num_bins`, int64; integers are hashed as decimal strings.

    This is `keras.layers.Hashing`, except that ids of sparse and ragged tensors are declared sparse and ragged in
    functional models, too.

    Args:
        num_bins: Number of ids: they are in [0, num_bins).

    Raises:
        ValueError: `num_bins` is not positive, or another `output_mode` than "int" is requested.
    """

    def __init__(self, num_bins: int, **kwargs: Any) -> None:
        super().__init__(num_bins, **kwargs)
        if self.output_mode != "int":
            raise ValueError("elasticdl_preprocessing.Hashing gives ids; for other modes take keras.layers.Hashing.")

    def call(self, inputs: Any) -> Tensor:
        return map_values(super().call, as_tensor(inputs))

    def compute_output_spec(self, inputs: Any) -> Any:
        return spec_like(inputs, str(self.dtype))


@keras.saving.register_keras_serializable(package=PACKAGE)
class IndexLookup(ElementwiseLayer):
    """Maps each token to its index in the vocabulary, int64: `IndexLookup(["a", "b"])(["b", "x"])` is [1, 2].

    An unknown token gets the size of the vocabulary plus its FarmHash fingerprint modulo `num_oov_tokens`.  (In
    `keras.layers.StringLookup` the ids of unknown tokens come first; here they come last, so that ids of known tokens
    do not depend on `num_oov_tokens`.)  Integers are looked up as decimal strings.  A saved model contains the tokens,
    not a path.

    Args:
        vocabulary: Tokens, or the path of a text file with one token per line; None: all tokens are unknown.
        num_oov_tokens: Number of ids for unknown tokens.

    Raises:
        ValueError: A token occurs twice, the file cannot be read, or `num_oov_tokens` is not positive.
        TypeError: The inputs are neither strings nor integers.
    """

    def __init__(
        self, vocabulary: Sequence[str] | str | os.PathLike[str] | None = None, num_oov_tokens: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if num_oov_tokens <= 0:
            raise ValueError(f"IndexLookup: num_oov_tokens must be positive, not {num_oov_tokens}.")
        self.vocabulary = _tokens(vocabulary)
        self.num_oov_tokens = int(num_oov_tokens)
        self._table = _table(self.vocabulary, self.num_oov_tokens)

    def vocab_size(self) -> int:
        """Return the number of ids, including those of unknown tokens."""
        return len(self.vocabulary) + self.num_oov_tokens

    def values(self, values: Tensor) -> Tensor:
        if values.dtype != tf.string:
            if not values.dtype.is_integer:
                raise TypeError(f"IndexLookup {self.name!r} looks up strings and integers, not {values.dtype.name}.")
            values = tf.as_string(values)
        if self._table is None:
            return tf.strings.to_hash_bucket_fast(values, self.num_oov_tokens)
        return self._table.lookup(values)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "vocabulary": self.vocabulary, "num_oov_tokens": self.num_oov_tokens}


def _tokens(vocabulary: Sequence[str] | str | os.PathLike[str] | None) -> list[str]:
    if vocabulary is None:
        return []
    origin = "the vocabulary"
    if isinstance(vocabulary, (str, os.PathLike)):
        origin = f"the vocabulary {vocabulary}"
        try:
            vocabulary = _lines(Path(vocabulary))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"IndexLookup: {origin} cannot be read: {error}.") from error
    tokens = [token.decode() if isinstance(token, bytes) else str(token) for token in vocabulary]
    repeated = [token for token, count in Counter(tokens).items() if count > 1]
    if repeated:
        raise ValueError(f"IndexLookup: {origin} holds tokens more than once: {', '.join(repeated[:_SHOWN])}.")
    return tokens


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, cut only at newlines: `str.splitlines` also cuts at characters allowed in tokens."""
    text = path.read_bytes().decode("utf-8-sig")  # Windows editors write a byte order mark
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _table(tokens: list[str], num_oov_tokens: int) -> Any:
    """Return the lookup table; None without tokens, because a table must not be empty."""
    if not tokens:
        return None
    with tf.init_scope():  # a layer may be made while `feed` is traced
        ids = tf.range(len(tokens), dtype=tf.int64)
        contents = tf.lookup.KeyValueTensorInitializer(tf.constant(tokens), ids)
        return tf.lookup.StaticVocabularyTable(contents, num_oov_tokens)


@keras.saving.register_keras_serializable(package=PACKAGE)
class ConcatenateWithOffset(PreprocessingLayer):
    """Adds ``offsets[i]`` to the i-th input and concatenates all inputs, which are all dense, all sparse or all ragged.

    `ConcatenateWithOffset([0, 10])([[[1]], [[2]]])` is [[1, 12]].  Integers become int64.  An input that is not a list
    or tuple is returned unchanged.

    Args:
        offsets: One per input; None: add nothing.
        axis: Axis of the concatenation.

    Raises:
        ValueError: The number of inputs differs from the number of offsets.
        TypeError: The inputs are of several kinds.
    """

    def __init__(self, offsets: Sequence[int] | None, axis: int = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.offsets = None if offsets is None else list(offsets)
        self.axis = axis

    def call(self, inputs: Any) -> Tensor:
        if not isinstance(inputs, (list, tuple)):
            return inputs
        tensors = [map_values(_wide, as_tensor(part)) for part in inputs]
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
        dtype = "int64" if tf.as_dtype(dtype_name(first)).is_integer else dtype_name(first)
        return symbolic(first, shape, dtype, sparse=is_sparse(first), ragged=is_ragged(first))

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


def _wide(values: Tensor) -> Tensor:
    return tf.cast(values, tf.int64) if values.dtype.is_integer else values


def _shifted(inputs: Tensor, offset: int) -> Tensor:
    return map_values(lambda values: values + tf.constant(offset, values.dtype), inputs)
