"""MNIST with a subclass of `keras.Model`: two convolutions, batch normalisation, dropout."""

import keras
import tensorflow as tf

from .images import NUM_CLASSES, eval_metrics_fn, feed, loss, optimizer

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


class CustomModel(keras.Model):
    """The layers as attributes, the forward pass in `call`; `--model_def` may name this class, too."""

    def __init__(self, filters: int = 16, dropout: float = 0.25) -> None:
        super().__init__(name="mnist")
        self.rescale = keras.layers.Rescaling(1 / 255)
        self.first = keras.layers.Conv2D(filters, 3, activation="relu")
        self.second = keras.layers.Conv2D(2 * filters, 3, activation="relu")
        self.normalize = keras.layers.BatchNormalization(momentum=0.9)
        self.pool = keras.layers.MaxPooling2D()
        self.dropout = keras.layers.Dropout(dropout)
        self.flatten = keras.layers.Flatten()
        self.logits = keras.layers.Dense(NUM_CLASSES)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        x = self.pool(self.first(self.rescale(inputs)))
        x = self.normalize(self.second(x), training=training)
        x = self.dropout(self.pool(x), training=training)
        return self.logits(self.flatten(x))


def custom_model(filters: int = 16, dropout: float = 0.25) -> keras.Model:
    return CustomModel(filters, dropout)
