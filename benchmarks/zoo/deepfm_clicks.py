"""DeepFM on the synthetic click log: the model of benchmarks/local_train.py, the same for every one that runs it.

A table of 1 M × 16 and a wide one of 1 M × 1, 10 ids and 13 numbers a sample, a dense network of 128 and 64.
"""

import keras
import tensorflow as tf

from elasticdl.layers import Embedding

NUM_IDS = 1_000_000
DIM = 16
FIELDS = 10
NUMBERS = 13
HIDDEN = (128, 64)
LEARNING_RATE = 0.05
PARSE_BATCH = 512

FEATURES = {
    "ids": tf.io.FixedLenFeature([FIELDS], tf.int64),
    "dense": tf.io.FixedLenFeature([NUMBERS], tf.float32),
    "label": tf.io.FixedLenFeature([], tf.int64),
}


def custom_model(plain: bool = False) -> keras.Model:
    """With `plain`, the tables are Keras's own; else those of elasticdl, whose rows may live on parameter servers."""

    def table(dim: int, name: str) -> keras.layers.Layer:
        if plain:
            return keras.layers.Embedding(NUM_IDS, dim, name=name)
        return Embedding(dim, input_dim=NUM_IDS, name=name)

    ids = keras.Input((FIELDS,), dtype="int64", name="ids")
    dense = keras.Input((NUMBERS,), name="dense")
    factors = table(DIM, "factors")(ids)
    weights = table(1, "weights")(ids)
    total = keras.ops.sum(factors, axis=1)
    pairs = keras.ops.sum(keras.ops.square(total) - keras.ops.sum(keras.ops.square(factors), axis=1), axis=1) / 2
    deep = keras.layers.Concatenate()([keras.layers.Flatten()(factors), dense])
    for units in HIDDEN:
        deep = keras.layers.Dense(units, activation="relu", name=f"hidden_{units}")(deep)
    deep = keras.layers.Dense(1, name="deep")(deep)
    logits = keras.ops.sum(weights, axis=(1, 2)) + pairs + keras.ops.squeeze(deep, axis=1)
    return keras.Model({"ids": ids, "dense": dense}, logits, name="deepfm_clicks")


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    labels = tf.cast(labels, tf.float32)
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=predictions))


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adagrad(LEARNING_RATE)


def parse(records: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """A vector of serialized records as one minibatch."""
    example = tf.io.parse_example(records, FEATURES)
    return {"ids": example["ids"], "dense": example["dense"]}, example["label"]


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.batch(PARSE_BATCH).map(parse).unbatch()


def eval_metrics_fn() -> dict[str, keras.metrics.Metric]:
    return {"auc": keras.metrics.AUC(from_logits=True)}
