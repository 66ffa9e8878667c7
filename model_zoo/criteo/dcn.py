"""Criteo with Deep & Cross: layers that multiply the input by a projection of itself, in parallel to a dense network.

Source: Wang et al., arXiv:1708.05123, equation 3.
"""

import keras

from . import features
from .features import eval_metrics_fn, feed, loss, optimizer

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


@keras.saving.register_keras_serializable(package="model_zoo")
class Cross(keras.layers.Layer):
    """x₀ (xᵀw) + b + x: one degree more of products of the inputs x₀ [batch, width] than x has."""

    def build(self, shapes: list[tuple[int | None, int]]) -> None:
        width = shapes[0][-1]
        regularizer = keras.regularizers.L2(1e-5)
        self.kernel = self.add_weight(shape=(width, 1), regularizer=regularizer, name="kernel")
        self.bias = self.add_weight(shape=(width,), initializer="zeros", name="bias")

    def call(self, inputs: list[keras.KerasTensor]) -> keras.KerasTensor:
        first, x = inputs
        return first * keras.ops.matmul(x, self.kernel) + self.bias + x

    def compute_output_shape(self, shapes: list[tuple[int | None, int]]) -> tuple[int | None, int]:
        return shapes[0]


def custom_model(
    dim: int = 8, hidden: tuple[int, ...] = (64, 32), num_crosses: int = 2, max_bins: int = 100_000
) -> keras.Model:
    inputs = features.column_inputs()
    ids, num_ids = features.column_ids(inputs, max_bins)
    vectors = keras.layers.Flatten()(features.vectors_of(ids, num_ids, dim))
    first = keras.layers.Concatenate()([vectors, features.scaled_counts(inputs)])
    crossed = first
    for _ in range(num_crosses):
        crossed = Cross()([first, crossed])
    both = keras.layers.Concatenate()([crossed, features.dense_part(first, hidden)])
    return keras.Model(inputs, features.logits_of(keras.layers.Dense(1)(both)), name="dcn")
