"""Embeddings in every kind of model, ours or Keras's.  A record is "label id id id…" in text, of any length up to 6."""

import keras
import tensorflow as tf

from elasticdl.layers import Embedding

NUM_IDS = 40


def _embedding(ours: bool, name: str, dim: int = 3, **kwargs: object) -> keras.layers.Layer:
    if ours:
        return Embedding(dim, input_dim=NUM_IDS, name=name, embeddings_initializer="normal", **kwargs)
    return keras.layers.Embedding(NUM_IDS, dim, name=name, embeddings_initializer="normal", **kwargs)


def functional(ours: bool = True) -> keras.Model:
    ids = keras.Input((6,), dtype="int64")
    shared = _embedding(ours, "shared")
    first, second = shared(ids[:, :3]), shared(ids[:, 3:])
    wide = _embedding(ours, "wide", 1)(ids)
    product = keras.layers.Flatten()(first * second)
    return keras.Model(ids, keras.layers.Dense(1)(product)[:, 0] + keras.ops.sum(wide, axis=(1, 2)))


def sequential(ours: bool = True) -> keras.Model:
    return keras.Sequential(
        [_embedding(ours, "shared"), keras.layers.Flatten(), keras.layers.Dense(1), keras.layers.Reshape(())]
    )


def masked(ours: bool = True) -> keras.Model:
    ids = keras.Input((6,), dtype="int64")
    vectors = _embedding(ours, "shared", mask_zero=True)(ids)
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(vectors))[:, 0])


@keras.saving.register_keras_serializable()
class Inner(keras.layers.Layer):
    def __init__(self, ours: bool) -> None:
        super().__init__()
        self.shared = _embedding(ours, "shared")

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(self.shared(ids) * self.shared(ids[:, ::-1]), axis=1)


class Subclass(keras.Model):
    def __init__(self, ours: bool = True) -> None:
        super().__init__()
        self.inner = Inner(ours)
        self.wide = _embedding(ours, "wide", 1)
        self.dropout = keras.layers.Dropout(0.5)
        self.normalize = keras.layers.BatchNormalization()
        self.logit = keras.layers.Dense(1)

    def call(self, ids: tf.Tensor, training: bool = False) -> tf.Tensor:
        x = self.normalize(self.dropout(self.inner(ids), training=training), training=training)
        return self.logit(x)[:, 0] + tf.reduce_sum(self.wide(ids), axis=[1, 2])


def nested(ours: bool = True) -> keras.Model:
    ids = keras.Input((6,), dtype="int64")
    tower = keras.Sequential([_embedding(ours, "shared"), keras.layers.Flatten(), keras.layers.Dense(2)])
    other = keras.Input((6,), dtype="int64")
    inner = keras.Model(other, keras.layers.Flatten()(_embedding(ours, "wide", 1)(other)))
    joined = keras.layers.Concatenate()([tower(ids), inner(ids)])
    return keras.Model(ids, keras.layers.Dense(1)(joined)[:, 0])


def looked_up(ours: bool = True) -> keras.Model:
    """Ids from strings by StringLookup and Hashing."""
    words = keras.Input((6,), dtype="string")
    known = keras.layers.StringLookup(vocabulary=[str(k) for k in range(20)])(words)
    hashed = keras.layers.Hashing(NUM_IDS)(words)
    vectors = _embedding(ours, "shared")(known) + _embedding(ours, "hashed")(hashed)
    return keras.Model(words, keras.layers.Dense(1)(keras.layers.Flatten()(vectors))[:, 0])


class Combined(keras.Model):
    """Ragged or sparse ids, combined in every way; `ours` without combiners of Keras: there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [Embedding(3, input_dim=NUM_IDS, name=how, combiner=how) for how in ("sum", "mean", "sqrtn")]
        self.logit = keras.layers.Dense(1)

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return self.logit(tf.concat([table(ids) for table in self.tables], axis=1))[:, 0]


def unbounded() -> keras.Model:
    ids = keras.Input((6,), dtype="int64")
    return keras.Model(ids, keras.ops.sum(Embedding(2, name="unbounded")(ids), axis=(1, 2)))


def same_names() -> keras.Model:
    ids = keras.Input((6,), dtype="int64")
    return keras.Model(ids, Embedding(2, 4, name="twin")(ids) + Embedding(2, 4, name="twin")(ids))


def orthogonal() -> keras.Model:
    ids = keras.Input((6,), dtype="int64")
    return keras.Model(ids, Embedding(2, 4, "orthogonal", name="turned")(ids))


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return tf.square(labels - predictions)


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)


def _words(record: tf.Tensor) -> tf.RaggedTensor:
    return tf.strings.split(record)


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        numbers = tf.strings.to_number(_words(records).to_tensor("0", shape=[None, 7]), tf.int64)
        return numbers[:, 1:], tf.cast(numbers[:, 0], tf.float32)

    return dataset.batch(16).map(parse).unbatch()


def string_feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        words = _words(records).to_tensor("0", shape=[None, 7])
        return words[:, 1:], tf.strings.to_number(words[:, 0])

    return dataset.batch(16).map(parse).unbatch()


def ragged_feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def parse(records: tf.Tensor) -> tuple[tf.RaggedTensor, tf.Tensor]:
        numbers = tf.strings.to_number(_words(records), tf.int64)
        return numbers[:, 1:], tf.cast(numbers[:, :1].to_tensor()[:, 0], tf.float32)

    return dataset.batch(16).map(parse).unbatch()


def sparse_feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def parse(record: tf.Tensor) -> tuple[tf.SparseTensor, tf.Tensor]:
        numbers = tf.strings.to_number(tf.strings.split(record), tf.int64)
        ids = numbers[1:]
        where = tf.range(tf.size(ids, tf.int64))[:, None]
        return tf.SparseTensor(where, ids, tf.constant([6], tf.int64)), tf.cast(numbers[0], tf.float32)

    return dataset.map(parse)
