"""The frappe app-usage log: code shared by all models on it.

Records are `tf.train.Example` with `feature` (10 int64 ids) and `label` (int64, 0 or 1), as made by
`scripts/gen_dataset.py frappe`.
"""

import keras
import tensorflow as tf

NUM_IDS = 5383
NUM_FIELDS = 10
PARSE_BATCH = 512


def deepfm(factors: keras.KerasTensor, weights: keras.KerasTensor, hidden: int) -> keras.KerasTensor:
    """Return the logits [batch] of DeepFM: a linear term, interactions by the sum-square trick, a dense network.

    Args:
        factors: Embeddings of the ids [batch, field, dim].
        weights: Weights of the linear term [batch, field, 1].
        hidden: Units of the dense network.

    Source: Guo et al., arXiv:1703.04247.
    """
    total = keras.ops.sum(factors, axis=1)
    pairs = keras.ops.sum(keras.ops.square(total) - keras.ops.sum(keras.ops.square(factors), axis=1), axis=1) / 2
    deep = keras.layers.Dense(hidden, activation="relu")(keras.layers.Flatten()(factors))
    deep = keras.layers.Dense(1)(deep)
    return keras.ops.sum(weights, axis=(1, 2)) + pairs + keras.ops.squeeze(deep, axis=1)


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    """Return the loss of each sample for logits [batch]."""
    return tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.cast(labels, tf.float32), logits=predictions)


def optimizer() -> keras.optimizers.Optimizer:
    """Return Adam without momentum: late gradients of asynchronous workers already act like momentum.

    With more of it the loss oscillates.
    """
    return keras.optimizers.Adam(0.003, beta_1=0.0)


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | tf.Tensor:
        features = {"feature": tf.io.FixedLenFeature([NUM_FIELDS], tf.int64)}
        if mode == "prediction":
            return tf.io.parse_example(records, features)["feature"]
        features["label"] = tf.io.FixedLenFeature([], tf.int64)
        example = tf.io.parse_example(records, features)
        return example["feature"], example["label"]

    if mode == "training":
        dataset = dataset.shuffle(4096)
    return dataset.batch(PARSE_BATCH).map(parse).unbatch()


def eval_metrics_fn() -> dict[str, keras.metrics.Metric]:
    return {
        "auc": keras.metrics.AUC(from_logits=True),
        "accuracy": keras.metrics.BinaryAccuracy(threshold=0.0),
    }
