"""DeepFM on a click log with a large id space: 10 ids out of a million and 13 numbers per record.

Records are `tf.train.Example` with `ids` (10 int64, each in [0, 1,000,000), all fields sharing one id space), `dense`
(13 floats) and `label` (int64, 0 or 1).  Source: Guo et al., arXiv:1703.04247.

The embeddings are ordinary Keras layers; with parameter servers both tables are there, because they are large.
"""

import keras
import tensorflow as tf

NUM_IDS = 1_000_000
NUM_FIELDS = 10
NUM_DENSE = 13
PARSE_BATCH = 512


def custom_model(num_ids: int = NUM_IDS, embedding_dim: int = 16) -> keras.Model:
    ids = keras.Input((NUM_FIELDS,), dtype="int64", name="ids")
    numbers = keras.Input((NUM_DENSE,), name="numbers")
    factors = keras.layers.Embedding(num_ids, embedding_dim, name="factors")(ids)
    weights = keras.layers.Embedding(num_ids, 1, embeddings_initializer="zeros", name="weights")(ids)
    total = keras.ops.sum(factors, axis=1)
    pairs = keras.ops.sum(keras.ops.square(total) - keras.ops.sum(keras.ops.square(factors), axis=1), axis=1) / 2
    deep = keras.layers.Concatenate()([keras.layers.Flatten()(factors), numbers])
    deep = keras.layers.Dense(128, activation="relu")(deep)
    deep = keras.layers.Dense(64, activation="relu")(deep)
    deep = keras.layers.Dense(1)(deep)
    logits = keras.ops.sum(weights, axis=(1, 2)) + pairs + keras.ops.squeeze(deep, axis=1)
    return keras.Model({"ids": ids, "numbers": numbers}, logits, name="deepfm")


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    """Return the loss of each sample for logits [batch]."""
    return tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.cast(labels, tf.float32), logits=predictions)


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adagrad(0.01)


def adam() -> keras.optimizers.Optimizer:
    """Return Adam, for `--optimizer=adam`."""
    return keras.optimizers.Adam(0.001)


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def parse(records: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor] | dict[str, tf.Tensor]:
        features = {
            "ids": tf.io.FixedLenFeature([NUM_FIELDS], tf.int64),
            "dense": tf.io.FixedLenFeature([NUM_DENSE], tf.float32),
        }
        if mode != "prediction":
            features["label"] = tf.io.FixedLenFeature([], tf.int64)
        example = tf.io.parse_example(records, features)
        inputs = {"ids": example["ids"], "numbers": example["dense"]}
        return inputs if mode == "prediction" else (inputs, example["label"])

    return dataset.batch(PARSE_BATCH).map(parse).unbatch()


def eval_metrics_fn() -> dict[str, keras.metrics.Metric]:
    return {"auc": keras.metrics.AUC(from_logits=True)}
