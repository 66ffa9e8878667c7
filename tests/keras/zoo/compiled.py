"""Compiled models in a module without loss, optimizer and metrics.  A record is five numbers, the last 0 to 2."""

import described
import keras
import tensorflow as tf

feed = described.feed
feed_both = described.feed_both
feed_listed = described.feed_listed

COMPILED = {
    "custom_model": {
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")],
    },
    "both": {
        "loss": {"kind": "sparse_categorical_crossentropy", "size": "mse"},
        "loss_weights": {"kind": 0.5, "size": 3.0},
        "metrics": {"kind": "acc", "size": ["mae", keras.metrics.MeanSquaredError()]},
    },
    "listed": {
        "loss": ["sparse_categorical_crossentropy", keras.losses.mean_squared_error],
        "loss_weights": [2.0, 0.25],
        "metrics": [["acc"], ["mae", "mse"]],
    },
}


def _compiled(symbol: str) -> keras.Model:
    model = getattr(described, symbol)()
    model.compile(optimizer=keras.optimizers.SGD(0.05), **COMPILED[symbol])
    return model


def custom_model() -> keras.Model:
    return _compiled("custom_model")


def both() -> keras.Model:
    return _compiled("both")


def listed() -> keras.Model:
    x = keras.Input((4,))
    kind = keras.layers.Dense(3, activation="softmax", name="kind")(x)
    model = keras.Model(x, [kind, keras.layers.Dense(1, name="size")(x)])
    model.compile(optimizer=keras.optimizers.SGD(0.05), **COMPILED["listed"])
    return model


class Own(keras.Model):
    """A model that says its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.abs(y_pred[:, 0] - tf.cast(y, tf.float32)))


def own() -> keras.Model:
    model = Own()
    model.compile(optimizer="sgd")
    return model


class Reconstructing(keras.Model):
    """An autoencoder whose layers say the whole loss."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(2, activation="tanh", kernel_regularizer="l2")
        self.out = keras.layers.Dense(4)

    def call(self, x):
        hidden = self.hidden(x)
        found = self.out(hidden)
        self.add_loss(tf.reduce_mean(tf.square(found - x)))
        self.add_loss(0.1 * tf.reduce_mean(tf.abs(hidden)))
        return found


def reconstructing() -> keras.Model:
    model = Reconstructing()
    model.compile(optimizer=keras.optimizers.SGD(0.05))
    return model


def without_loss() -> keras.Model:
    model = described.number()
    model.compile(optimizer="sgd", metrics=["mae"])
    return model


def squares(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(labels - predictions), axis=-1)


def masked() -> keras.Model:
    """A number for each of four steps; those of feature 0 are masked."""
    x = keras.Input((4,))
    steps = keras.layers.Masking(0.0)(keras.layers.Reshape((4, 1))(x))
    model = keras.Model(x, keras.layers.Dense(1)(steps))
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss=squares)
    return model


def masked_samples() -> keras.Model:
    """Samples of zeros alone are masked."""
    x = keras.Input((4,))
    model = keras.Model(x, keras.layers.Dense(1)(keras.layers.Masking(0.0)(x)))
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss=squares)
    return model


def feed_steps(dataset, mode, metadata):
    """Whole numbers as labels."""
    return feed(dataset, mode, metadata).map(lambda x, y: (x, tf.fill([4, 1], tf.cast(y, tf.int64))))


def scheduled() -> keras.Model:
    model = described.number()
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.PolynomialDecay(0.5, 10, 0.0)), loss="mse")
    return model


def of_known(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    """Samples without a label do not count."""
    known = tf.math.is_finite(labels)
    losses = keras.losses.sparse_categorical_crossentropy(tf.where(known, labels, 0.0), predictions)
    return tf.where(tf.reshape(known, [-1]), losses, 0.0)


def with_gaps() -> keras.Model:
    model = described.custom_model()
    model.compile(keras.optimizers.SGD(0.05), loss=of_known)
    return model


class Known(keras.losses.BinaryCrossentropy):
    """Samples with the label -1 do not count."""

    def call(self, y_true, y_pred):
        known = tf.cast(y_true >= 0, y_pred.dtype)
        return known * super().call(tf.maximum(y_true, 0.0), y_pred)


def partly_known() -> keras.Model:
    model = described.number()
    model.compile(keras.optimizers.SGD(0.05), loss=Known())
    return model


def letters() -> keras.Model:
    x = keras.Input((4,), dtype="uint8")
    letters = keras.layers.Flatten()(keras.layers.Embedding(256, 3)(x))
    model = keras.Model(x, keras.layers.Dense(1)(letters))
    model.compile(keras.optimizers.SGD(0.05), loss="mse")
    return model


def feed_letters(dataset, mode, metadata):
    return feed(dataset, mode, metadata).map(lambda x, y: (tf.cast(x, tf.uint8), y))


def half_used(optimizer: object = None) -> keras.Model:
    """One of its two outputs has no loss, so its weights get no gradient."""
    x = keras.Input((4,))
    used = keras.layers.Dense(3, activation="softmax", name="used")(x)
    unused = keras.layers.Dense(2, name="unused")(x)
    model = keras.Model(x, {"used": used, "unused": unused})
    chosen = keras.optimizers.get(optimizer) if optimizer else keras.optimizers.AdamW(0.05, weight_decay=0.1)
    model.compile(optimizer=chosen, loss={"used": "sparse_categorical_crossentropy"})
    return model


def feed_used(dataset, mode, metadata):
    fed = feed(dataset, mode, metadata)
    return fed if mode == "prediction" else fed.map(lambda features, label: (features, {"used": label}))


def cut_off() -> keras.Model:
    """No gradient comes through its loss."""
    model = described.number()
    model.compile("sgd", loss=lambda labels, predictions: tf.stop_gradient(squares(labels, predictions)))
    return model


def counting() -> keras.Model:
    """It has no trainable weight, and its BatchNormalization learns."""
    x = keras.Input((4,))
    normalized = keras.layers.BatchNormalization(center=False, scale=False)(x)
    model = keras.Model(x, keras.layers.Lambda(lambda values: tf.reduce_sum(values, -1, keepdims=True))(normalized))
    model.compile("sgd", loss="mse")
    return model
