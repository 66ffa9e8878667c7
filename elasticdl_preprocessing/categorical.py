"""Layers that make ids of categories: `Hashing`, which needs no statistics, and `IndexLookup`, of a vocabulary."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from elasticdl_preprocessing.layer import PACKAGE, ElementwiseLayer, Tensor, as_tensor, map_values, spec_like

_SHOWN = 5


@keras.saving.register_keras_serializable(package=PACKAGE)
class Hashing(keras.layers.Hashing):  # type: ignore[misc]
    """The FarmHash fingerprint of each string modulo `num_bins`, int64; integers are hashed as decimal strings.

    It is `keras.layers.Hashing`, which does not tell Keras that the ids of sparse and ragged tensors are sparse and
    ragged, too; this one does.

    Raises:
        ValueError: `num_bins` is not positive.
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
    """The place of each token in the vocabulary, int64; an unknown one gets the vocabulary's size plus its hash.

    `keras.layers.StringLookup` has unknown tokens at the front; here they are at the end, so ids of known tokens do not
    depend on `num_oov_tokens`.  Integers are looked up as decimal strings.  A saved model holds the tokens, no path.

    Args:
        vocabulary: tokens, or the path of a text file with one token a line; None: there are unknown tokens only.
        num_oov_tokens: number of ids for unknown tokens, chosen by their FarmHash fingerprint modulo it.

    Raises:
        ValueError: a token is there twice, or the file cannot be read.
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
        """Number of ids, those of unknown tokens included."""
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
            vocabulary = Path(vocabulary).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"IndexLookup: {origin} cannot be read: {error}.") from error
    tokens = [token.decode() if isinstance(token, bytes) else str(token) for token in vocabulary]
    repeated = [token for token, count in Counter(tokens).items() if count > 1]
    if repeated:
        raise ValueError(f"IndexLookup: {origin} holds tokens more than once: {', '.join(repeated[:_SHOWN])}.")
    return tokens


def _table(tokens: list[str], num_oov_tokens: int) -> Any:
    """The lookup table; None: a table must not be empty."""
    if not tokens:
        return None
    with tf.init_scope():  # a layer may be made while `feed` is traced
        ids = tf.range(len(tokens), dtype=tf.int64)
        contents = tf.lookup.KeyValueTensorInitializer(tf.constant(tokens), ids)
        return tf.lookup.StaticVocabularyTable(contents, num_oov_tokens)
