"""DeepFM on the frappe app-usage log as a subclass of `keras.Model`; its embeddings are ordinary Keras layers."""

import keras
import tensorflow as tf

from .frappe import NUM_IDS, eval_metrics_fn, feed, loss, optimizer

__all__ = ["CustomModel", "custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


class CustomModel(keras.Model):
    """The layers as attributes, the forward pass in `call`; `--model_def` may name this class, too.

    Source: Guo et al., arXiv:1703.04247.
    """

    def __init__(self, embedding_dim: int = 16, hidden: int = 64) -> None:
        super().__init__(name="deepfm")
        self.factors = keras.layers.Embedding(NUM_IDS, embedding_dim)
        self.weights_of_ids = keras.layers.Embedding(NUM_IDS, 1, embeddings_initializer="zeros")
        self.flatten = keras.layers.Flatten()
        self.hidden = keras.layers.Dense(hidden, activation="relu")
        self.deep = keras.layers.Dense(1)

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the logits [batch] for ids [batch, field]."""
        factors = self.factors(ids)
        first = tf.reduce_sum(self.weights_of_ids(ids), axis=[1, 2])
        squares = tf.square(tf.reduce_sum(factors, axis=1)) - tf.reduce_sum(tf.square(factors), axis=1)
        pairs = tf.reduce_sum(squares, axis=1) / 2
        deep = self.deep(self.hidden(self.flatten(factors)))
        return first + pairs + tf.squeeze(deep, axis=1)


def custom_model(embedding_dim: int = 16, hidden: int = 64) -> keras.Model:
    return CustomModel(embedding_dim, hidden)
