"""Models whose loss is more than `loss`.  A record is label, weight and three ids, as float32."""

from __future__ import annotations

import keras
import tensorflow as tf

NUM_IDS = 20
DIM = 3


class Shrinking(keras.layers.Layer):
    """Adds a loss of its own for each sample, in training and in evaluation."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        self.add_loss(0.01 * tf.reduce_sum(tf.abs(inputs), axis=1))
        return inputs


class Plain(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(NUM_IDS, DIM, name="table")
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.out = keras.layers.Dense(1)

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        vectors = self.table(ids)
        return self.out(self.hidden(tf.reshape(vectors, [-1, 3 * DIM])))


class AddLoss(Plain):
    """`add_loss` in a layer and in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.shrinking = Shrinking()

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        x = self.shrinking(self.hidden(tf.reshape(self.table(ids), [-1, 3 * DIM])))
        self.add_loss(0.1 * tf.reduce_mean(tf.square(x)))
        return self.out(x)


class Regularized(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l1")
        self.out = keras.layers.Dense(1, bias_regularizer=keras.regularizers.L1L2(0.1, 0.1))


class ComputeLoss(AddLoss):
    """Adds to what Keras computes, and calls a layer that nothing else calls."""

    def __init__(self) -> None:
        super().__init__()
        self.side = keras.layers.Dense(1, name="side")
        self.tracker = keras.metrics.Mean(name="tracked")

    def compute_loss(
        self,
        x: tf.Tensor = None,
        y: tf.Tensor = None,
        y_pred: tf.Tensor = None,
        sample_weight: tf.Tensor = None,
        training: bool = True,
    ) -> tf.Tensor:
        total = super().compute_loss(x, y, y_pred, sample_weight, training)
        of_ids = self.side(tf.cast(x, tf.float32) / NUM_IDS)
        self.tracker.update_state(total)
        return total + tf.reduce_mean(tf.square(of_ids - y)) + (0.0 if training else 5.0)

    def reset_metrics(self) -> None:
        super().reset_metrics()


class OldComputeLoss(Plain):
    """Without `training`, as before Keras 3.3, and without what `loss` says."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):  # type: ignore[no-untyped-def]
        return tf.reduce_mean(tf.abs(y - y_pred)) + sum(self.losses)


class LooksUp(Plain):
    """Looks a table up in `compute_loss`, too."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
        total = super().compute_loss(x, y, y_pred, sample_weight, training)
        return total + tf.reduce_mean(tf.square(self.table(x)))


class PerSample(Plain):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
        return tf.square(y - y_pred)


class Nothing(Plain):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
        return None


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return tf.square(labels - predictions)


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)


def _parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    numbers = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [5])
    return tf.cast(numbers[2:], tf.int64), numbers[:1], numbers[1]


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.map(lambda record: _parse(record)[:2])


def weighted_feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.map(_parse)


def watching() -> list[keras.callbacks.Callback]:
    return [keras.callbacks.EarlyStopping("val_loss", patience=2)]
