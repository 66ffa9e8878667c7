"""The parts of a minibatch (features, labels, weights, ids), and minibatches of zeros.

Owns the structures that a `feed` may return; does not read data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from elasticdl.frameworks.framework import Ids, Mode
from elasticdl_client.errors import ModelDefinitionError


@dataclass(frozen=True, slots=True)
class KerasMinibatch:
    """`Batch.data`: an element of the user's dataset, batched, and its ids.

    Attributes:
        leaves: The tensors of the element, as a flat list.
        spec: Spec of the element.
        ids: Maps each table to the ids [n], in the order of lookup.
    """

    mode: Mode
    leaves: list[Any]
    spec: Any
    ids: Mapping[str, Ids]

    @property
    def element(self) -> Any:
        """The element as `feed` made it."""
        return tf.nest.pack_sequence_as(self.spec, self.leaves, expand_composites=True)

    @property
    def first_label(self) -> Any:
        """The first label tensor of the element, found without rebuilding the element."""
        return self.leaves[len(tf.nest.flatten(self.spec[0], expand_composites=True))]


@dataclass(frozen=True, slots=True)
class Examples:
    """An element of the user's dataset, taken apart."""

    features: Any
    labels: Any = None
    weights: Any = None


def take_apart(mode: Mode, element: Any) -> Examples:
    """Return the features, labels and weights of an element of `feed`'s dataset, or of its spec."""
    if mode is Mode.PREDICTION:
        return Examples(element)
    return Examples(*element)


def masks_of(outputs: Any) -> list[Any]:
    """Return the mask that Keras has attached to each output of a model, as a flat list; None: no mask.

    A compiled function returns copies of its last tensors, without these masks.
    """
    return [getattr(output, "_keras_mask", None) for output in tf.nest.flatten(outputs)]


def with_masks(outputs: Any, masks: Sequence[Any]) -> Any:
    """Attach masks to outputs, where Keras's losses and metrics read them; return the outputs."""
    for output, mask in zip(tf.nest.flatten(outputs), masks, strict=True):
        if mask is not None:
            output._keras_mask = mask
    return outputs


def with_features(mode: Mode, element: Any, features: Any) -> Any:
    """Return an element with other features."""
    return features if mode is Mode.PREDICTION else (features, *element[1:])


def check_structure(mode: Mode, spec: Any) -> None:
    """Check the structure of the elements returned by `feed`.

    Raises:
        ModelDefinitionError: The elements are not (features, labels) or (features, labels, weights).
    """
    if mode is not Mode.PREDICTION and not (isinstance(spec, tuple) and len(spec) in (2, 3)):
        raise ModelDefinitionError(
            f"feed(dataset, {mode.value!r}, metadata) returned a dataset of {spec}.",
            "Return a dataset of (features, labels) or (features, labels, sample_weight); "
            "of features alone when mode is 'prediction'.",
        )


def size_of(element: Any) -> Any:
    """Return the number of samples in a batched element, as an int64 tensor."""
    first = tf.nest.flatten(element)[-1]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int64)
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first, tf.int64)[0]


def zeros_like_spec(spec: Any, batch: int = 2) -> Any:
    """Return tensors of zeros or empty strings for a batched spec; unknown dimensions except the first become 1."""
    return tf.nest.map_structure(lambda leaf: _zeros(leaf, batch), spec)


def _zeros(spec: Any, batch: int) -> Any:
    shape = [batch, *(dim or 1 for dim in spec.shape.as_list()[1:])]
    if isinstance(spec, tf.RaggedTensorSpec):
        dense = tf.zeros(shape, spec.dtype)
        return tf.RaggedTensor.from_tensor(dense, ragged_rank=spec.ragged_rank, row_splits_dtype=spec.row_splits_dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        indices = [[row] + [0] * (len(shape) - 1) for row in range(batch)]
        return tf.SparseTensor(indices, tf.zeros([batch], spec.dtype), shape)
    return tf.zeros(shape, spec.dtype)


def full_spec(spec: Any, size: int) -> Any | None:
    """Return the spec with the size of a full minibatch; None: a part has no fixed shape or is not numeric."""
    leaves = tf.nest.flatten(spec)
    for leaf in leaves:
        if type(leaf) is not tf.TensorSpec or leaf.dtype == tf.string or leaf.shape.rank in (None, 0):
            return None
        if not leaf.shape[1:].is_fully_defined() or leaf.shape[0] not in (None, size):
            return None
    return tf.nest.map_structure(lambda leaf: tf.TensorSpec([size, *leaf.shape[1:]], leaf.dtype), spec)
