"""Criteo with a wide and a deep part: a weight for each id beside a dense network (Cheng et al., arXiv:1606.07792)."""

import keras

from . import features
from .features import eval_metrics_fn, feed, loss, optimizer

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


def custom_model(dim: int = 8, hidden: tuple[int, ...] = (64, 32), max_bins: int = 100_000) -> keras.Model:
    inputs = features.column_inputs()
    ids, num_ids = features.column_ids(inputs, max_bins)
    vectors = keras.layers.Flatten()(features.vectors_of(ids, num_ids, dim))
    deep = keras.layers.Concatenate()([vectors, features.scaled_counts(inputs)])
    deep = keras.layers.Dense(1)(features.dense_part(deep, hidden))
    wide = features.linear_part(ids, num_ids)
    return keras.Model(inputs, features.logits_of(wide, deep), name="wide_deep")
