"""Criteo with xDeepFM: a compressed interaction network, which multiplies whole vectors, a linear and a dense part.

Source: Lian et al., arXiv:1803.05170, equations 6 to 8.
"""

import keras

from . import features
from .features import eval_metrics_fn, feed, loss, optimizer

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


def custom_model(
    dim: int = 8, hidden: tuple[int, ...] = (64, 32), maps: tuple[int, ...] = (32, 32), max_bins: int = 100_000
) -> keras.Model:
    """`maps` is the number of feature maps of each layer of interactions."""
    inputs = features.column_inputs()
    ids, num_ids = features.column_ids(inputs, max_bins)
    vectors = features.vectors_of(ids, num_ids, dim)
    deep = keras.layers.Concatenate()([keras.layers.Flatten()(vectors), features.scaled_counts(inputs)])
    deep = keras.layers.Dense(1)(features.dense_part(deep, hidden))
    crossed = keras.layers.Dense(1)(interactions(vectors, maps))
    return keras.Model(inputs, features.logits_of(features.linear_part(ids, num_ids), crossed, deep), name="xdeepfm")


def interactions(vectors: keras.KerasTensor, maps: tuple[int, ...]) -> keras.KerasTensor:
    """Sums over the dimensions of all feature maps [batch, sum(maps)], of vectors [batch, field, dim].

    A map of layer k is a weighted sum of the element-wise products of each map of layer k - 1 with each field.
    """
    first = keras.ops.transpose(vectors, (0, 2, 1))  # [batch, dim, field]
    dim, num_fields = first.shape[1:]
    x, sums = first, []
    for count in maps:
        products = keras.ops.expand_dims(x, 3) * keras.ops.expand_dims(first, 2)
        products = keras.ops.reshape(products, (-1, dim, x.shape[2] * num_fields))
        x = keras.layers.Dense(count)(products)
        sums.append(keras.ops.sum(x, axis=1))
    return keras.layers.Concatenate()(sums)
