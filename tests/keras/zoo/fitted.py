"""Compiled models with settings that `fit` heeds without a word.  A record is five numbers, the last 0 to 2."""

import described
import keras
import numpy as np
import tensorflow as tf

feed = described.feed


class WithoutTraining(keras.Model):
    """Its `call` takes no `training`, so `fit` normalizes by running statistics and drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(8)
        self.normal = keras.layers.BatchNormalization()
        self.dropped = keras.layers.Dropout(0.5)
        self.out = keras.layers.Dense(3, activation="softmax")

    def call(self, x):
        return self.out(self.dropped(self.normal(self.hidden(x))))


def without_training() -> keras.Model:
    model = WithoutTraining()
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Halving(keras.optimizers.SGD):
    """Overrides the method that `fit` calls."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(0.5 * gradient, variable) for gradient, variable in grads_and_vars])


def halving() -> keras.Model:
    model = described.custom_model()
    model.compile(Halving(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def distance(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.abs(tf.cast(labels, predictions.dtype) - predictions), axis=-1)


def masked() -> keras.Model:
    """A number for each of four steps, and one for a sample; those of feature 0 are masked."""
    x = keras.Input((4,))
    steps = keras.layers.Masking(0.0)(keras.layers.Reshape((4, 1))(x))
    outputs = [keras.layers.Dense(1, name="steps")(steps), keras.layers.Dense(1, name="all")(x)]
    model = keras.Model(x, outputs)
    model.compile(keras.optimizers.SGD(0.05), ["mse", "mse"], metrics=[["mae", distance], ["mse", distance]])
    return model


def feed_masked(dataset, mode, metadata):
    return feed(dataset, mode, metadata).map(lambda x, y: (x, (tf.fill([4, 1], y), tf.reshape(y, [1]))))


def _half(auto_scale_loss: bool) -> keras.Model:
    model = described.half()
    model.compile(keras.optimizers.SGD(0.1), "mse", auto_scale_loss=auto_scale_loss)
    return model


def scaled() -> keras.Model:
    return _half(True)


def unscaled() -> keras.Model:
    return _half(False)


def unreduced() -> keras.Model:
    model = described.number()
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="none"))
    return model


def synchronized() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(synchronized=True, name="normal")])
    model.add(keras.layers.Dense(1))
    model.compile("sgd", "mse")
    return model


def by_name() -> keras.Model:
    model = described.custom_model()
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Stops(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = logs["val_accuracy"] > 0.9

    def on_test_end(self, logs=None):
        if logs["accuracy"] > 0.99:
            self.model.stop_training = True


class Slows(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate)


class Clears(keras.callbacks.Callback):
    def _clear(self, *arguments):
        self.model.set_weights([0 * value for value in self.model.get_weights()])

    on_train_begin = on_epoch_end = on_evaluation_end = on_train_end = _clear


def stopping() -> list[keras.callbacks.Callback]:
    return [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None), Stops()]


def slowing() -> list[keras.callbacks.Callback]:
    return [Slows()]


def clearing() -> list[keras.callbacks.Callback]:
    return [Clears()]


class Remembering(keras.Model):
    """Its layer makes a state for as many samples as it is first called with."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = keras.layers.Reshape((2, 2))
        self.gru = keras.layers.GRU(2, stateful=True, bias_initializer="ones")
        self.out = keras.layers.Dense(3, activation="softmax")

    def call(self, x):
        return self.out(self.gru(self.steps(x)))


def remembering() -> keras.Model:
    model = Remembering()
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Counting(keras.layers.Layer):
    """Counts its calls in a variable that Keras does not know, or does."""

    def __init__(self, known: bool = False, **options) -> None:
        super().__init__(**options)
        if known:
            self.count = self.add_weight(name="count", initializer="zeros", trainable=False)
        else:
            self.count = tf.Variable(0.0, trainable=False)

    def call(self, x, training=False):
        if training:
            tf.cond(tf.size(x) > 0, lambda: self.count.assign(self.count + 1), lambda: tf.constant(0.0))
        return x * tf.convert_to_tensor(1.0 + 0 * self.count)


def _counting(known: bool) -> keras.Model:
    x = keras.Input((4,))
    y = keras.layers.Dropout(0.5)(Counting(known, name="counter")(x), training=True)
    y = keras.layers.Lambda(lambda given: given + 0 * keras.random.normal(keras.ops.shape(given)))(y)
    model = keras.Model(x, keras.layers.Dense(3, activation="softmax")(y))
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def counting() -> keras.Model:
    return _counting(False)


def counting_by_weight() -> keras.Model:
    return _counting(True)


def adapted(scale: float = 1.0) -> keras.Model:
    numbers = np.random.default_rng(8).normal(3 * scale, scale, (50, 4)).astype("f4")
    normal = keras.layers.Normalization(name="normal")
    normal.adapt(numbers)
    model = keras.Sequential([keras.Input((4,)), normal, keras.layers.Dense(3, activation="softmax")])
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def augmenting() -> keras.Model:
    """In training every image is turned and made brighter by as much."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Reshape((2, 2, 1))])
    model.add(keras.layers.RandomRotation((0.25, 0.25)))
    model.add(keras.layers.RandomBrightness((0.5, 0.5), value_range=(-10.0, 10.0)))
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(3, activation="softmax"))
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
