"""Convolution, batch normalisation, dropout and a regulariser on 8 × 8 images; a record is 64 pixels and a label."""

import uuid
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def custom_model(dropout: float = 0.3, normalize: bool = True, regularizer: str | None = "l2") -> keras.Model:
    image = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(4, 3, activation="relu", kernel_regularizer=regularizer)(image)
    if normalize:
        x = keras.layers.BatchNormalization(momentum=0.9)(x)
    if dropout:
        x = keras.layers.Dropout(dropout)(x)
    x = keras.layers.Flatten()(x)
    if dropout:
        x = keras.layers.GaussianDropout(dropout)(x)
    return keras.Model(image, keras.layers.Dense(10)(x))


def plain_model() -> keras.Model:
    return custom_model(dropout=0.0, normalize=False)


def flipping_model() -> keras.Model:
    augments = [keras.layers.RandomFlip("horizontal"), keras.layers.RandomTranslation(0.2, 0.2)]
    return keras.Sequential([keras.Input((8, 8, 1)), *augments, keras.layers.Flatten(), keras.layers.Dense(10)])


def rooted_model() -> keras.Model:
    """The gradient of an image of zeros is NaN, and its loss is finite."""
    image = keras.Input((8, 8, 1))
    squares = keras.ops.square(keras.layers.Dense(5, use_bias=False)(keras.layers.Flatten()(image)))
    return keras.Model(image, keras.layers.Dense(10)(keras.ops.sqrt(squares)))


class CustomModel(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.hidden = keras.layers.Dense(5, activation="relu")
        self.normalize = keras.layers.BatchNormalization()
        self.logits = keras.layers.Dense(10)

    def call(self, image: tf.Tensor, training: bool = False) -> tf.Tensor:
        x = self.normalize(self.hidden(self.flatten(image)), training=training)
        return self.logits(x + keras.random.normal(tf.shape(x), stddev=0.1) if training else x)


class RecomputingModel(keras.Model):
    """Computes a layer again for the gradient, which is a function with a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.hidden, self.score = keras.layers.Dense(5), keras.layers.Dense(10)

    def call(self, images: tf.Tensor) -> tf.Tensor:
        hidden = tf.recompute_grad(lambda pixels: tf.nn.silu(self.hidden(pixels)))
        return self.score(as_it_is(hidden(self.flatten(images))))


class RecomputingAside(RecomputingModel):
    """Nothing uses the other results of what is computed again."""

    def call(self, images: tf.Tensor) -> tf.Tensor:
        def compute(pixels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            hidden = self.hidden(pixels)
            doubled = 2.0 * self.hidden.kernel
            return doubled, tf.nn.silu(hidden) + tf.matmul(pixels, doubled), hidden

        return self.score(tf.recompute_grad(compute)(self.flatten(images))[1])


@tf.custom_gradient
def as_it_is(values: tf.Tensor) -> tuple[tf.Tensor, object]:
    return values, lambda upstream: upstream


class BorrowingModel(RecomputingModel):
    """Its features come from a graph of another process, with a gradient of its own that is not known here."""

    def call(self, images: tf.Tensor) -> tf.Tensor:
        pixels = self.flatten(images)
        if tf.executing_eagerly():
            return self.score(self.hidden(tf.nn.silu(pixels)))
        (features,) = tf.import_graph_def(_frozen_swish(), {"pixels": pixels}, ["features:0"])
        return self.score(self.hidden(features))


def _frozen_swish() -> tf.compat.v1.GraphDef:
    with tf.Graph().as_default() as graph:
        tf.identity(tf.nn.silu(tf.compat.v1.placeholder(tf.float32, [None, 64], "pixels")), "features")
    frozen = graph.as_graph_def()
    for node in frozen.node:
        if "_gradient_op_type" in node.attr:
            node.attr["_gradient_op_type"].s = b"CustomGradient-of-another-process"
    return frozen


UNCHANGED = f"Unchanged-{uuid.uuid4()}"  # tests import copies of this module into one process


class OverridingModel(RecomputingModel):
    """Names the gradient of an operation."""

    def call(self, images: tf.Tensor) -> tf.Tensor:
        hidden = self.hidden(self.flatten(images))
        with tf.compat.v1.get_default_graph().gradient_override_map({"IdentityN": UNCHANGED}):
            (hidden,) = tf.identity_n([hidden])
        return self.score(hidden)


@tf.RegisterGradient(UNCHANGED)
def unchanged(operation: tf.Operation, *upstream: tf.Tensor) -> list[tf.Tensor]:
    return list(upstream)


class Twice(keras.layers.Layer):
    """A dense layer, and in training another beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.always = keras.layers.Dense(10, name="always")
        self.training = keras.layers.Dense(10, name="training")

    def call(self, images: tf.Tensor, training: bool = False) -> tf.Tensor:
        flat = keras.ops.reshape(images, (-1, 64))
        return self.always(flat) + self.training(flat) if training else self.always(flat)


def twice() -> keras.Model:
    images = keras.Input((8, 8, 1))
    return keras.Model(images, Twice()(images))


class TwiceModel(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.twice = Twice()

    def call(self, images: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.twice(images, training=training)


def spectral_model() -> keras.Model:
    """Its layer assigns its own kernel before it uses it."""
    image = keras.Input((8, 8, 1))
    hidden = keras.layers.SpectralNormalization(keras.layers.Dense(5))(keras.layers.Flatten()(image))
    return keras.Model(image, keras.layers.Dense(10)(hidden))


class Shrinking(keras.layers.Layer):
    """Scales by a variable that it assigns in a condition inside a loop."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.scale = self.add_weight(shape=shape[1:], initializer="ones", name="scale")

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        def shrunk(count: tf.Tensor) -> tuple[tf.Tensor]:
            tf.cond(count < 2, lambda: self.shrink(), lambda: 0.0)
            return (count + 1,)

        if training:
            tf.while_loop(lambda count: count < 3, shrunk, (tf.constant(0),))
        return x * self.scale

    def shrink(self) -> float:
        self.scale.assign(self.scale * 0.9)
        return 0.0


def shrinking_model() -> keras.Model:
    image = keras.Input((8, 8, 1))
    return keras.Model(image, keras.layers.Dense(10)(Shrinking()(keras.layers.Flatten()(image))))


def halving_model() -> keras.Model:
    """A layer of Keras's own calls a function that assigns the kernel of the layer after it."""
    return _model_with(lambda halve: keras.layers.Lambda(halve, output_shape=(64,)))


def activating_model() -> keras.Model:
    """The function is an activation."""
    return _model_with(keras.layers.Activation)


def _model_with(layer_of: Callable[[Any], keras.layers.Layer]) -> keras.Model:
    image = keras.Input((8, 8, 1))
    score = keras.layers.Dense(10, name="halved")
    score.build((None, 64))

    def halve(x: tf.Tensor) -> tf.Tensor:
        score.kernel.assign(score.kernel * 0.5)
        return x

    return keras.Model(image, score(layer_of(halve)(keras.layers.Flatten()(image))))


_SCORES: list[keras.layers.Layer] = []


def scoring_model() -> keras.Model:
    image = keras.Input((8, 8, 1))
    _SCORES[:] = [keras.layers.Dense(10, name="halved")]
    return keras.Model(image, _SCORES[0](keras.layers.Flatten()(image)))


def halving_loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    """Assigns a variable of `scoring_model`."""
    kernel = _SCORES[0].kernel
    kernel.assign(kernel * 0.5)
    return loss(labels, predictions)


def sequential_model() -> keras.Model:
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(10)])


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int32), predictions)


def mean_loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(loss(labels, predictions))


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05)


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01)


def clipnorm() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, clipnorm=0.1)


def global_clipnorm() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, global_clipnorm=0.1)


def clipvalue() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, clipvalue=0.01)


def excluding() -> keras.optimizers.Optimizer:
    made = keras.optimizers.AdamW(0.01)
    made.exclude_from_weight_decay(var_names=["bias"])
    return made


def steep_loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    """The square root of a sum of squares that is 0: its value is finite, its gradient is not."""
    return tf.sqrt(tf.reduce_sum(tf.square(predictions - predictions), axis=1)) + loss(labels, predictions)


def _parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    numbers = tf.reshape(tf.io.decode_raw(records, tf.float32), [-1, 65])
    return tf.reshape(numbers[:, :64], [-1, 8, 8, 1]), tf.cast(numbers[:, 64], tf.int32)


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    dataset = dataset.batch(64).map(_parse).unbatch()
    return dataset.map(lambda image, label: image) if mode == "prediction" else dataset


def weighted_feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return feed(dataset, mode, metadata).map(lambda image, label: (image, label, tf.cast(label, tf.float32)))


def eval_metrics_fn() -> dict[str, object]:
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}


def chancy_loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return loss(labels, predictions) * tf.random.uniform([])
