"""MNIST with the functional API: two convolutions, batch normalisation, dropout."""

import keras

from .images import NUM_CLASSES, eval_metrics_fn, feed, loss, optimizer

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


def custom_model(filters: int = 16, dropout: float = 0.25) -> keras.Model:
    image = keras.Input((28, 28, 1), name="image")
    x = keras.layers.Rescaling(1 / 255)(image)
    x = keras.layers.Conv2D(filters, 3, activation="relu")(x)
    x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Conv2D(2 * filters, 3, activation="relu")(x)
    x = keras.layers.BatchNormalization(momentum=0.9)(x)
    x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Dropout(dropout)(x)
    x = keras.layers.Flatten()(x)
    logits = keras.layers.Dense(NUM_CLASSES, name="logits")(x)
    return keras.Model(image, logits, name="mnist")
