"""Criteo with DeepFM: factorization machine and dense network share the embeddings of the ids; plus a linear part.

Source: Guo et al., arXiv:1703.04247.
"""

import keras

from . import features
from .features import eval_metrics_fn, feed, loss, optimizer

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


def custom_model(dim: int = 8, hidden: tuple[int, ...] = (64, 32), max_bins: int = 100_000) -> keras.Model:
    inputs = features.column_inputs()
    ids, num_ids = features.column_ids(inputs, max_bins)
    vectors = features.vectors_of(ids, num_ids, dim)
    deep = keras.layers.Concatenate()([keras.layers.Flatten()(vectors), features.scaled_counts(inputs)])
    deep = keras.layers.Dense(1)(features.dense_part(deep, hidden))
    linear = features.linear_part(ids, num_ids)
    return keras.Model(inputs, features.logits_of(linear, pairs(vectors), deep), name="deepfm")


def pairs(vectors: keras.KerasTensor) -> keras.KerasTensor:
    """Return the sum of the inner products of all pairs of vectors, [batch, 1]."""
    total = keras.ops.square(keras.ops.sum(vectors, axis=1)) - keras.ops.sum(keras.ops.square(vectors), axis=1)
    return keras.ops.sum(total, axis=1, keepdims=True) / 2
