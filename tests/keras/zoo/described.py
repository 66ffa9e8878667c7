"""Losses, optimizers and metrics by name, as `compile` takes them.  A record is five numbers, the last 0 to 2."""

import keras
import tensorflow as tf


def custom_model() -> keras.Model:
    x = keras.Input((4,))
    return keras.Model(x, keras.layers.Dense(3, activation="softmax")(x))


def number() -> keras.Model:
    x = keras.Input((4,))
    return keras.Model(x, keras.layers.Dense(1, activation="sigmoid")(x))


def flat() -> keras.Model:
    x = keras.Input((4,))
    return keras.Model(x, keras.layers.Reshape(())(keras.layers.Dense(1)(x)))


def narrow() -> keras.Model:
    """Of other data than `feed` makes."""
    x = keras.Input((3,))
    return keras.Model(x, keras.layers.Dense(1)(x))


def both() -> keras.Model:
    x = keras.Input((4,))
    kind = keras.layers.Dense(3, activation="softmax", name="kind")(x)
    return keras.Model(x, {"kind": kind, "size": keras.layers.Dense(1, name="size")(x)})


def listed() -> keras.Model:
    x = keras.Input((4,))
    return keras.Model(x, [keras.layers.Dense(3, activation="softmax")(x), keras.layers.Dense(1)(x)])


def half() -> keras.Model:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        x = keras.Input((4,))
        return keras.Model(x, keras.layers.Dense(1, activation="sigmoid", dtype="float32")(keras.layers.Dense(8)(x)))
    finally:
        keras.config.set_dtype_policy(before)


def half_frozen() -> keras.Model:
    x = keras.Input((4,))
    frozen = keras.layers.Dense(8, dtype="bfloat16", trainable=False)
    return keras.Model(x, keras.layers.Dense(1, activation="sigmoid")(frozen(x)))


def constrained() -> keras.Model:
    x = keras.Input((4,))
    return keras.Model(x, keras.layers.Dense(1, kernel_constraint="non_neg", activation="sigmoid")(x))


def overwritten() -> keras.Model:
    """Its bias takes its gradient as its value, as the scales of a model that is trained in float8."""
    x = keras.Input((4,))
    scored = keras.layers.Dense(1, activation="sigmoid")
    model = keras.Model(x, scored(x))
    scored.bias.overwrite_with_gradient = True
    return model


def stateful() -> keras.Model:
    x = keras.Input((4,), batch_size=8)
    both = keras.layers.Bidirectional(keras.layers.GRU(2, stateful=True, name="gru"))(keras.layers.Reshape((2, 2))(x))
    return keras.Model(x, keras.layers.Dense(1, activation="sigmoid")(both))


loss = "sparse_categorical_crossentropy"
optimizer = "sgd"
crossentropy = "crossentropy"
binary = "binary_crossentropy"
mse = {"class_name": "MeanSquaredError", "config": {"reduction": "sum"}}
kind = keras.losses.MeanAbsoluteError
by_output = {"kind": "sparse_categorical_crossentropy", "size": "mse"}
in_order = ["sparse_categorical_crossentropy", keras.losses.mean_squared_error]
unknown = "msee"


def named() -> str:
    return "sgd"


def configured() -> dict[str, object]:
    return {"class_name": "SGD", "config": {"learning_rate": 0.01}}


def misspelt() -> str:
    return "adamm"


def with_averages() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(use_ema=True)


def squared(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    """As one writes it for `compile`, where labels of shape [n] come as [n, 1]."""
    return tf.reduce_mean(tf.square(labels - predictions))


def squared_by_hand(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(labels - predictions[:, 0]))


def _parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    numbers = tf.reshape(tf.io.decode_raw(record, tf.float32), [5])
    return numbers[:4], numbers[4]


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.map(_parse)


def feed_both(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.map(_parse).map(lambda x, y: (x, {"kind": y, "size": x[:1]}))


def feed_listed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.map(_parse).map(lambda x, y: (x, (y, x[:1])))


def metrics() -> list[object]:
    return ["accuracy", "mse", keras.metrics.AUC, {"class_name": "MeanAbsoluteError", "config": {"name": "far"}}]


def metrics_by_name() -> dict[str, object]:
    return {"right": "accuracy", "close": "mse", "curve": keras.metrics.AUC()}


def metrics_of_both() -> dict[str, object]:
    return {"kind": ["acc", "sparse_categorical_crossentropy"], "size": ["mae", "mse"]}


def one_metric() -> str:
    return "acc"


def unknown_metric() -> list[str]:
    return ["acuracy"]


def nested_metrics() -> list[list[str]]:
    return [["accuracy"], ["mse"]]


def mixed() -> keras.Model:
    x = keras.Input((4,))
    hidden = keras.layers.Dense(8, name="hidden")(x)
    return keras.Model(x, keras.layers.Dense(1, activation="sigmoid", dtype="float32")(hidden))


def steep(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return keras.ops.mean(predictions) * 1e9


class Subclassed(keras.Model):
    """Its outputs are known when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.last = keras.layers.Dense(1, activation="sigmoid")

    def call(self, features: tf.Tensor) -> tf.Tensor:
        return self.last(features)


def subclassed() -> keras.Model:
    return Subclassed()
