"""DeepFM on a click log, its rows on parameter servers: our side of local_train.py and ps_training.py.

A table of 1 M × 16 and a wide one of 1 M × 1, 10 ids and 13 numbers a sample, a dense network of 128 and 64.
"""

import keras
import tensorflow as tf

from elasticdl.layers import Embedding

from .clicks import DIM, FIELDS, HIDDEN, LEARNING_RATE, NUM_IDS, NUMBERS, loss, parse

__all__ = ["adam", "custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]

PARSE_BATCH = 512


def custom_model() -> keras.Model:
    ids = keras.Input((FIELDS,), dtype="int64", name="ids")
    dense = keras.Input((NUMBERS,), name="dense")
    factors = Embedding(DIM, input_dim=NUM_IDS, name="factors")(ids)
    weights = Embedding(1, input_dim=NUM_IDS, name="weights")(ids)
    total = keras.ops.sum(factors, axis=1)
    pairs = keras.ops.sum(keras.ops.square(total) - keras.ops.sum(keras.ops.square(factors), axis=1), axis=1) / 2
    deep = keras.layers.Concatenate()([keras.layers.Flatten()(factors), dense])
    for units in HIDDEN:
        deep = keras.layers.Dense(units, activation="relu", name=f"hidden_{units}")(deep)
    deep = keras.layers.Dense(1, name="deep")(deep)
    logits = keras.ops.sum(weights, axis=(1, 2)) + pairs + keras.ops.squeeze(deep, axis=1)
    return keras.Model({"ids": ids, "dense": dense}, logits, name="deepfm_clicks")


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adagrad(LEARNING_RATE["Adagrad"])


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(LEARNING_RATE["Adam"])


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.batch(PARSE_BATCH).map(parse).unbatch()


def eval_metrics_fn() -> dict[str, keras.metrics.Metric]:
    return {"auc": keras.metrics.AUC(from_logits=True)}
