"""Fisher's iris with a small dense network: the smallest table of the zoo.

Records are `tf.train.Example` with `sepal_length`, `sepal_width`, `petal_length`, `petal_width` (floats, in cm) and
`label` (int64, 0 to 2), as made by `scripts/gen_dataset.py iris`.
"""

import keras
import tensorflow as tf

from elasticdl_preprocessing import Normalizer

MEASURES = {  # name: mean, standard deviation
    "sepal_length": (5.8, 0.8),
    "sepal_width": (3.1, 0.4),
    "petal_length": (3.8, 1.8),
    "petal_width": (1.2, 0.8),
}
NUM_SPECIES = 3


def custom_model(hidden: int = 16) -> keras.Model:
    inputs = {name: keras.Input((1,), name=name) for name in MEASURES}
    scaled = [Normalizer(*MEASURES[name])(column) for name, column in inputs.items()]
    x = keras.layers.Concatenate()(scaled)
    x = keras.layers.Dense(hidden, activation="relu")(x)
    logits = keras.layers.Dense(NUM_SPECIES, name="logits")(x)
    return keras.Model(inputs, logits, name="iris")


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    losses = keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)
    return tf.reduce_mean(losses)


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adagrad(0.1)


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def parse(record: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor] | dict[str, tf.Tensor]:
        columns = {name: tf.io.FixedLenFeature([1], tf.float32) for name in MEASURES}
        if mode == "prediction":
            return tf.io.parse_single_example(record, columns)
        example = tf.io.parse_single_example(record, {**columns, "label": tf.io.FixedLenFeature([], tf.int64)})
        return {name: example[name] for name in MEASURES}, example["label"]

    return dataset.map(parse)


def eval_metrics_fn() -> dict[str, keras.metrics.Metric]:
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}
