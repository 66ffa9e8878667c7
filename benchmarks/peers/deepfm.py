"""The DeepFM of the benchmarks in plain Keras, 2 or 3, whichever the TensorFlow has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks.zoo.clicks import DIM, FIELDS, HIDDEN, LEARNING_RATE, NUM_IDS, loss, parse

keras: Any = tf.keras


class DeepFM(keras.Model):  # type: ignore[misc]
    """The same layers as in benchmarks/zoo/deepfm_clicks.py, with tables of Keras's own."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = keras.layers.Embedding(NUM_IDS, DIM)
        self.weights_of_ids = keras.layers.Embedding(NUM_IDS, 1)
        self.hidden = [keras.layers.Dense(units, activation="relu") for units in HIDDEN]
        self.deep = keras.layers.Dense(1)

    def call(self, features: dict[str, Any]) -> Any:
        factors, weights = self.factors(features["ids"]), self.weights_of_ids(features["ids"])
        total = tf.reduce_sum(factors, 1)
        pairs = tf.reduce_sum(tf.square(total) - tf.reduce_sum(tf.square(factors), 1), 1) / 2
        deep = tf.concat([tf.reshape(factors, [-1, FIELDS * DIM]), features["dense"]], 1)
        for layer in self.hidden:
            deep = layer(deep)
        return tf.reduce_sum(weights, [1, 2]) + pairs + self.deep(deep)[:, 0]


def compiled(optimizer: str, steps_per_execution: int) -> Any:
    """Return the model, ready for `fit`."""
    model = DeepFM()
    rate = LEARNING_RATE[optimizer]
    made = getattr(keras.optimizers, optimizer)(rate)
    model.compile(optimizer=made, loss=loss, steps_per_execution=steps_per_execution)
    return model


def dataset(directory: str, batch: int) -> tf.data.Dataset:
    """Endless minibatches of the files of a directory, parsed as whole minibatches, which is fastest."""
    files = sorted(str(path) for path in Path(directory).glob("*.tfrecord"))
    records = tf.data.TFRecordDataset(files).repeat().batch(batch, drop_remainder=True)
    return records.map(parse).prefetch(tf.data.AUTOTUNE)
