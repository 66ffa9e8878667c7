"""MNIST with a sequential model: two convolutions, batch normalisation, dropout."""

import keras

from .images import NUM_CLASSES, eval_metrics_fn, feed, loss, optimizer

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


def custom_model(filters: int = 16, dropout: float = 0.25) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1), name="image"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(filters, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(2 * filters, 3, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.MaxPooling2D(),
            keras.layers.Dropout(dropout),
            keras.layers.Flatten(),
            keras.layers.Dense(NUM_CLASSES, name="logits"),
        ],
        name="mnist",
    )
