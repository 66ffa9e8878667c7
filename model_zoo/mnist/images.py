"""MNIST: code shared by all models on it.

Records are `tf.train.Example` with `image` (784 floats, 0 to 255) and `label` (int64), as made by
`scripts/gen_dataset.py mnist`.
"""

import keras
import tensorflow as tf

NUM_PIXELS = 28 * 28
NUM_CLASSES = 10
PARSE_BATCH = 512


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    losses = keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)
    return tf.reduce_mean(losses)


def optimizer() -> keras.optimizers.Optimizer:
    """Return Adam with little momentum: late gradients of asynchronous workers already act like momentum."""
    return keras.optimizers.Adam(0.002, beta_1=0.5)


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | tf.Tensor:
        features = {"image": tf.io.FixedLenFeature([NUM_PIXELS], tf.float32)}
        if mode != "prediction":
            features["label"] = tf.io.FixedLenFeature([], tf.int64)
        example = tf.io.parse_example(records, features)
        image = tf.reshape(example["image"], [-1, 28, 28, 1])
        return image if mode == "prediction" else (image, example["label"])

    if mode == "training":
        dataset = dataset.shuffle(1024)
    return dataset.batch(PARSE_BATCH).map(parse).unbatch()


def eval_metrics_fn() -> dict[str, keras.metrics.Metric]:
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}
