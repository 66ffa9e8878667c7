"""A factorization machine in the style of 2020: TensorFlow functions on symbolic tensors, names of the original."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tensorflow.keras.backend as backend

from elasticdl.python.common.constants import Mode
from elasticdl.python.common.log_utils import default_logger as logger
from elasticdl.python.elasticdl.callbacks import LearningRateScheduler
from elasticdl.python.elasticdl.layers.embedding import Embedding
from elasticdl.python.worker.prediction_outputs_processor import BasePredictionOutputsProcessor
from elasticdl_preprocessing.layers.discretization import Discretization
from model_zoo.shop.records import LENGTH, parse

seen: list[Any] = []


class Unmask(tf.keras.layers.Layer):
    """Zeroes what the mask hides, and drops the mask."""

    def __init__(self, **kwargs: Any) -> None:
        self.supports_masking = True
        super(Unmask, self).__init__(**kwargs)  # noqa: UP008

    def call(self, x: Any, mask: Any = None) -> Any:
        return x * tf.cast(backend.expand_dims(mask, -1), tf.float32)

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        return None


def custom_model(size: int = 3) -> Any:
    ids = tf.keras.Input(shape=(LENGTH,), name="ids", dtype=tf.int64)
    buckets = Discretization([1, 5, 5, 20])(ids)
    vectors = Unmask()(Embedding(output_dim=size, input_dim=40, mask_zero=True, input_length=LENGTH)(ids))
    total = backend.sum(vectors, axis=1)
    pairs = 0.5 * tf.keras.layers.Subtract()([backend.square(total), backend.sum(backend.square(vectors), axis=1)])
    second = tf.reduce_sum(pairs, axis=1)
    deep = tf.keras.layers.Dense(1)(tf.concat([tf.cast(buckets, tf.float32), total], 1))
    logits = second + tf.reshape(deep, (-1,))
    return tf.keras.Model(inputs=ids, outputs={"logits": logits, "probs": tf.sigmoid(logits)})


def loss(labels: Any, predictions: Any) -> Any:
    labels = tf.cast(tf.reshape(labels, [-1]), tf.float32)
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=predictions["logits"]))


def optimizer(lr: float = 0.1) -> Any:
    return tf.optimizers.SGD(lr)


def callbacks() -> Any:
    return [LearningRateScheduler(lambda version: 0.1 if version < 10 else 0.01)]


def dataset_fn(dataset: Any, mode: Any, _: Any) -> Any:
    dataset = dataset.map(lambda record: parse(record, mode))
    return dataset.shuffle(64) if mode == Mode.TRAINING else dataset


def eval_metrics_fn() -> Any:
    return {
        "logits": {
            "accuracy": lambda labels, predictions: tf.equal(
                tf.cast(tf.reshape(predictions, [-1]) > 0.0, tf.int32), tf.cast(tf.reshape(labels, [-1]), tf.int32)
            )
        },
        "probs": {"auc": tf.keras.metrics.AUC()},
    }


class PredictionOutputsProcessor(BasePredictionOutputsProcessor):
    def process(self, predictions: Any, worker_id: int) -> None:
        seen.append((worker_id, predictions["probs"].numpy().tolist()))
        logger.info("%d predictions", len(predictions["probs"].numpy()))
