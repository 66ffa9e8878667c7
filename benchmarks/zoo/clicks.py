"""The shape of the click log and of its DeepFM: shared by our model and the peers.  Runs on any TensorFlow."""

import tensorflow as tf

NUM_IDS = 1_000_000
DIM = 16
FIELDS = 10
NUMBERS = 13
HIDDEN = (128, 64)
LEARNING_RATE = {"Adagrad": 0.05, "Adam": 0.001}

FEATURES = {
    "ids": tf.io.FixedLenFeature([FIELDS], tf.int64),
    "dense": tf.io.FixedLenFeature([NUMBERS], tf.float32),
    "label": tf.io.FixedLenFeature([], tf.int64),
}


def parse(records: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Parse a vector of serialized records into one minibatch."""
    example = tf.io.parse_example(records, FEATURES)
    return {"ids": example["ids"], "dense": example["dense"]}, example["label"]


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    labels = tf.cast(labels, tf.float32)
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=predictions))
