"""Build the features of a table (numbers, ids, vectors) as Keras layers, from a model's description.

Each column is an input of the model, as `number` (float, NaN: missing) or `text` (empty: missing).  The layers are part
of the model, so serving uses raw columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from elasticdl.layers import Embedding
from elasticdl_preprocessing import Hashing, IndexLookup

_SEPARATOR = "\x1f"  # between the values of a CROSS; texts of a table do not contain it


@keras.saving.register_keras_serializable(package="elasticdl")
class ScaledNumbers(keras.layers.Layer):  # type: ignore[misc]
    """Concatenates n numeric columns [batch, 1] to [batch, n], scaled: (x − mean) / deviation; 0 if missing."""

    def __init__(self, means: Sequence[float], deviations: Sequence[float], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.means, self.deviations = list(means), list(deviations)

    def call(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        scaled = (tf.concat([tf.cast(one, tf.float32) for one in inputs], 1) - self.means) / self.deviations
        return tf.where(tf.math.is_finite(scaled), scaled, tf.zeros_like(scaled))

    def compute_output_shape(self, input_shape: Sequence[tuple[int | None, ...]]) -> tuple[int | None, ...]:
        return (input_shape[0][0], len(self.means))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "means": self.means, "deviations": self.deviations}


@keras.saving.register_keras_serializable(package="elasticdl")
class BucketOf(keras.layers.Layer):  # type: ignore[misc]
    """Maps numbers [batch, 1] to buckets, which include their left boundary; a missing number gets the last id."""

    def __init__(self, boundaries: Sequence[float], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.boundaries = [float(one) for one in boundaries]

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        numbers = tf.cast(inputs, tf.float32)
        known = tf.where(tf.math.is_nan(numbers), tf.zeros_like(numbers), numbers)
        found = tf.searchsorted(tf.constant(self.boundaries, tf.float32), tf.reshape(known, [-1]), side="right")
        ids = tf.reshape(tf.cast(found, tf.int64), tf.shape(numbers))
        return tf.where(tf.math.is_nan(numbers), tf.fill(tf.shape(ids), tf.constant(self.num_ids - 1, tf.int64)), ids)

    def compute_output_spec(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return keras.KerasTensor(inputs.shape, dtype="int64")

    @property
    def num_ids(self) -> int:
        return len(self.boundaries) + 2

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "boundaries": self.boundaries}


@keras.saving.register_keras_serializable(package="elasticdl")
class IdentityOf(keras.layers.Layer):  # type: ignore[misc]
    """Maps whole numbers [batch, 1] in [0, size) to ids; all others and missing ones get the id `size`."""

    def __init__(self, size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = size

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        numbers = tf.cast(inputs, tf.float32)
        is_known = (numbers >= 0) & (numbers < self.size)  # False for NaN
        others = tf.fill(tf.shape(numbers), float(self.size))
        return tf.cast(tf.where(is_known, numbers, others), tf.int64)

    def compute_output_spec(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return keras.KerasTensor(inputs.shape, dtype="int64")

    @property
    def num_ids(self) -> int:
        return self.size + 1

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "size": self.size}


@keras.saving.register_keras_serializable(package="elasticdl")
class CrossOf(keras.layers.Layer):  # type: ignore[misc]
    """Combines the ids of several columns [batch, 1] to one id: the hash of all of them."""

    def __init__(self, size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = size

    def call(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        texts = tf.strings.join([tf.strings.as_string(ids) for ids in inputs], separator=_SEPARATOR)
        return tf.strings.to_hash_bucket_fast(texts, self.size)

    def compute_output_spec(self, inputs: Sequence[keras.KerasTensor]) -> keras.KerasTensor:
        return keras.KerasTensor(inputs[0].shape, dtype="int64")

    @property
    def num_ids(self) -> int:
        return self.size

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "size": self.size}


@dataclass(frozen=True, slots=True)
class Category:
    """A categorical feature.

    Attributes:
        ids: [batch, 1], int64.
        num_ids: Number of ids: they are in [0, num_ids).
        kind: `category` (the estimator decides how to use it), `embedding` or `indicator`.
        dimension: Length of the embedding vectors; 0: not given.
    """

    ids: keras.KerasTensor
    num_ids: int
    kind: str
    dimension: int


@dataclass(frozen=True, slots=True)
class PartFeatures:
    """The features for one part of a model, such as wide or deep.

    Attributes:
        numbers: Scaled numbers [batch, n]; None: there are none.
        categories: Categorical features.
    """

    numbers: keras.KerasTensor | None
    categories: tuple[Category, ...]


class FeatureInputs:
    """The inputs of a model, and the features computed from them.

    Attributes:
        inputs: Keras inputs, by the name of the column in the data.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        """
        Args:
            description: The model's description; its keys `inputs` and `features` are used.
        """
        self._features = description["features"]
        self._names = {(one["column"], one["form"]): one["name"] for one in description["inputs"]}
        self.inputs = {
            one["name"]: keras.Input((1,), name=one["name"], dtype="string" if one["form"] == "text" else "float32")
            for one in description["inputs"]
        }
        self._made: dict[str, tuple[keras.KerasTensor, int]] = {}

    def of(self, part: str) -> PartFeatures:
        """Return the features for a part, including those for all parts."""
        wanted = [one for one in self._features if one.get("part", "") in ("", part)]
        numbers = [one for one in wanted if one["kind"] == "number"]
        scaled = None
        if numbers:
            means, deviations = ([one[key] for one in numbers] for key in ("mean", "deviation"))
            layer = ScaledNumbers(means, deviations, name=layer_name(part or "all", "numbers"))
            scaled = layer([self._input(one["column"], "number") for one in numbers])
        categories = []
        for one in wanted:
            if one["kind"] != "number":
                ids, num_ids = self._ids(one["ids"])
                categories.append(Category(ids, num_ids, one["kind"], one.get("dimension", 0)))
        return PartFeatures(scaled, tuple(categories))

    def _input(self, column: str, form: str) -> keras.KerasTensor:
        return self.inputs[self._names[column, form]]

    def _ids(self, ids: Mapping[str, Any]) -> tuple[keras.KerasTensor, int]:
        key = repr(ids)
        if key not in self._made:
            self._made[key] = self._new_ids(ids, layer_name("ids", str(len(self._made))))
        return self._made[key]

    def _new_ids(self, ids: Mapping[str, Any], name: str) -> tuple[keras.KerasTensor, int]:
        layer: Any
        match ids["kind"]:
            case "vocabulary":
                layer = IndexLookup(ids["values"], name=name)
                return layer(self._input(ids["column"], "text")), layer.vocab_size()
            case "hash":
                return Hashing(ids["size"], name=name)(self._input(ids["column"], "text")), ids["size"]
            case "cross":
                layer = CrossOf(ids["size"], name=name)
                return layer([self._ids(one)[0] for one in ids["of"]]), layer.num_ids
            case "bucket":
                layer = BucketOf(ids["boundaries"], name=name)
            case _:
                layer = IdentityOf(ids["size"], name=name)
        return layer(self._input(ids["column"], "number")), layer.num_ids


def layer_name(*parts: str) -> str:
    """Return a name for a layer that differs from all inputs: names of columns do not begin with `elasticdl_`."""
    return "_".join(("elasticdl", *parts))


def vectors_of(categories: Sequence[Category], dimension: int, role: str) -> list[keras.KerasTensor]:
    """Return a vector [batch, d] for each category except indicators.

    Args:
        dimension: Length of the vectors for categories without their own.
        role: Used in the layers' names.
    """
    found = []
    for number, one in enumerate(categories):
        if one.kind == "indicator":
            continue
        size = one.dimension or dimension
        table = Embedding(size, input_dim=one.num_ids, name=layer_name(role, "vectors", str(number)))
        flat = keras.layers.Reshape((size,), name=layer_name(role, "flat", str(number)))
        found.append(flat(table(one.ids)))
    return found


def indicators_of(categories: Sequence[Category], role: str) -> list[keras.KerasTensor]:
    """Return the indicators among categories as one-hot vectors [batch, num_ids]."""
    found = []
    for number, one in enumerate(categories):
        if one.kind == "indicator":
            layer = keras.layers.CategoryEncoding(
                one.num_ids, output_mode="multi_hot", name=layer_name(role, "indicator", str(number))
            )
            found.append(layer(one.ids))
    return found
