"""A model with two named outputs and many metrics.  A record is four float32 numbers, the last a label 0 or 1."""

import keras
import numpy as np
import tensorflow as tf


def custom_model() -> keras.Model:
    x = keras.Input((3,))
    logits = keras.layers.Dense(1)(x)
    return keras.Model(x, {"logits": logits, "probability": keras.ops.sigmoid(logits)})


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        numbers = tf.reshape(tf.io.decode_raw(records, tf.float32), [-1, 4])
        return numbers[:, :3], numbers[:, 3:]

    return dataset.batch(32).map(parse).unbatch()


class Positives(keras.metrics.Metric):
    """The share of labels that are 1; its state adds up."""

    def __init__(self) -> None:
        super().__init__(name="positives")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, labels: tf.Tensor, predictions: tf.Tensor, sample_weight: object = None) -> None:
        self.total.assign_add(tf.reduce_sum(labels))
        self.count.assign_add(tf.cast(tf.size(labels), tf.float32))

    def result(self) -> tf.Tensor:
        return self.total / self.count


class Largest(keras.metrics.Metric):
    """The largest prediction; its state does not add up, and nothing says how to merge it."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, labels: tf.Tensor, predictions: tf.Tensor, sample_weight: object = None) -> None:
        self.value.assign(tf.maximum(self.value, tf.reduce_max(predictions)))

    def result(self) -> tf.Tensor:
        return self.value


class MergedLargest(Largest):
    def merge_state(self, states: list[list[np.ndarray]]) -> None:
        self.value.assign(max(state[0] for state in states))


def eval_metrics_fn() -> dict[str, object]:
    return {
        "logits": {
            "accuracy": keras.metrics.BinaryAccuracy(threshold=0.0),
            "positives": Positives(),
            "per_sample": lambda labels, logits: tf.equal(labels > 0.5, logits > 0.0),
            "scalar": lambda labels, logits: tf.reduce_mean(logits),
            "in_numpy": lambda labels, logits: np.square(np.asarray(logits)[:, 0]),
        },
        "probability": {
            "auc": keras.metrics.AUC(),
            "largest": MergedLargest(),
            "positives": Positives(),
            "r2": keras.metrics.R2Score(),
            "f1": keras.metrics.F1Score(threshold=0.5),
        },
    }


def refused_metrics() -> dict[str, object]:
    return {"probability": {"biggest": Largest()}}


def wrong_output() -> dict[str, object]:
    return {"price": {"auc": keras.metrics.AUC()}}


def not_metrics() -> list[str]:
    return ["auc"]


def strings() -> dict[str, str]:
    return {"accuracy": "accuracy"}


def numbers() -> dict[str, int]:
    return {"accuracy": 5}
