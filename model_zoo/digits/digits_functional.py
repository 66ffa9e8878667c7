"""Handwritten digits of 8 × 8 pixels (scikit-learn's) with a small convolutional network: the zoo's smallest example.

Records are `tf.train.Example` with `image` (64 floats, 0 to 16) and `label` (int64), as made by
`scripts/gen_dataset.py digits`.
"""

import keras
import tensorflow as tf

NUM_PIXELS = 64
NUM_CLASSES = 10
PARSE_BATCH = 512


def custom_model(filters: int = 32, hidden: int = 64, dropout: float = 0.25) -> keras.Model:
    image = keras.Input((NUM_PIXELS,), name="image")
    x = keras.layers.Rescaling(1 / 16)(image)
    x = keras.layers.Reshape((8, 8, 1))(x)
    x = keras.layers.Conv2D(filters, 3, activation="relu")(x)
    x = keras.layers.Dropout(dropout)(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(hidden, activation="relu")(x)
    logits = keras.layers.Dense(NUM_CLASSES, name="logits")(x)
    return keras.Model(image, logits, name="digits")


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    losses = keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)
    return tf.reduce_mean(losses)


def optimizer() -> keras.optimizers.Optimizer:
    """Return Adam with little momentum: late gradients of asynchronous workers already act like momentum.

    AMSGrad and a short memory of squares limit the step of a weight to 1.6 learning rates.  With Adam's defaults it is
    16: after dozens of epochs gradients are almost 0, and the first larger one moves every weight so far that late
    gradients amplify the change.
    """
    return keras.optimizers.Adam(0.003, beta_1=0.5, beta_2=0.9, amsgrad=True)


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    """Parse hundreds of records with one op: about twenty times as fast as single records."""

    def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | tf.Tensor:
        features = {"image": tf.io.FixedLenFeature([NUM_PIXELS], tf.float32)}
        if mode == "prediction":
            return tf.io.parse_example(records, features)["image"]
        features["label"] = tf.io.FixedLenFeature([], tf.int64)
        example = tf.io.parse_example(records, features)
        return example["image"], example["label"]

    if mode == "training":
        dataset = dataset.shuffle(1024)
    return dataset.batch(PARSE_BATCH).map(parse).unbatch()


def eval_metrics_fn() -> dict[str, keras.metrics.Metric]:
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}
