"""One tiny model under many a `feed`.  A record is one float32 number; the label is the number itself."""

import keras
import tensorflow as tf

from elasticdl.api.tensorflow import LearningRateScheduler

traces: list[str] = []


def custom_model() -> keras.Model:
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


class OfExamples(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, features: dict[str, tf.Tensor]) -> tf.Tensor:
        return self.dense(features["x"])


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    return tf.square(labels - predictions[:, 0])


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)


def _number(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    number = tf.reshape(tf.io.decode_raw(record, tf.float32), [1])
    return number, number[0]


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    traces.append(mode)
    return dataset.map(_number)


def only_positive(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.map(_number).filter(lambda number, label: label > 0)


def examples_of_five(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.map(_number).take(5).shuffle(3).prefetch(1)


def more_than_needed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.take(1_000).map(_number)


def every_other_half(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    first = dataset.take(4).map(_number)
    return first.concatenate(dataset.skip(4).shard(2, 0).map(_number))


def full_batches(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.map(_number).batch(4, drop_remainder=True).unbatch()


def several_each(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.map(_number).flat_map(lambda *sample: tf.data.Dataset.from_tensors(sample).repeat(3))


def doubled_batches(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def twice(number: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.concat([number, number], 0), tf.concat([label, label], 0)

    return dataset.map(_number).batch(5).map(twice).unbatch()


def shuffled(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.shuffle(100).map(_number).shuffle(7, reshuffle_each_iteration=False)


def twice_shuffled(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.map(_number).shuffle(100).repeat(2)


def endless(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.map(_number).repeat()


def hidden_endless(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.map(_number).repeat().filter(lambda number, label: label >= 0)


def raising(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def checked(number: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        tf.debugging.assert_greater_equal(label, 0.0, "a negative number is nothing to learn from")
        return number, label

    return dataset.map(_number).map(checked)


def python_raising(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def check(number: tf.Tensor) -> float:
        if float(number[0]) < 0:
            raise ValueError("a negative number is nothing to learn from")
        return float(number[0])

    return dataset.map(_number).map(
        lambda number, label: (number, tf.ensure_shape(tf.py_function(check, [number], tf.float32), []))
    )


def untraceable(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    if mode == "training":
        return dataset.map(_number)
    raise KeyError("no column 'price'")


def branching(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def sign(number: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if label > 0:  # noqa: SIM108  AutoGraph's business
            number = number + 1.0
        else:
            number = number - 1.0
        return number, label

    return dataset.map(_number).map(sign)


def random(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.map(_number).map(lambda number, label: (number + tf.random.uniform([1]), label))


def not_a_dataset(dataset: tf.data.Dataset, mode: str, metadata: object) -> list[int]:
    return [1, 2, 3]


def features_only(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.map(lambda record: _number(record)[0])


def _example(record: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    spec = {"x": tf.io.FixedLenFeature([3], tf.float32), "name": tf.io.FixedLenFeature([], tf.string)}
    parsed = tf.io.parse_single_example(record, spec | {"y": tf.io.FixedLenFeature([], tf.int64)})
    return {"x": parsed["x"] * 2.0, "name": parsed["name"]}, parsed["y"]


def _again(features: dict[str, tf.Tensor], label: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    return {"x": tf.reduce_sum(features["x"], keepdims=True), "name": features["name"]}, label + 1


def examples(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return dataset.map(_example, num_parallel_calls=tf.data.AUTOTUNE).map(_again)


def batched_examples(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    spec = {"x": tf.io.FixedLenFeature([3], tf.float32), "name": tf.io.FixedLenFeature([], tf.string)}

    def parse(records: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        parsed = tf.io.parse_example(records, spec | {"y": tf.io.FixedLenFeature([], tf.int64)})
        x = tf.reduce_sum(parsed["x"] * 2.0, axis=1, keepdims=True)
        return {"x": x, "name": parsed["name"]}, parsed["y"] + 1

    return dataset.batch(5).map(parse).unbatch()


def by_epoch() -> list[keras.callbacks.Callback]:
    return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)]


def by_epoch_alone() -> list[keras.callbacks.Callback]:
    return [keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 - 0.25 * epoch)]


def by_version() -> list[keras.callbacks.Callback]:
    return [LearningRateScheduler(lambda version: 0.1 / (1 + version))]


def both() -> list[keras.callbacks.Callback]:
    return [*by_epoch(), *by_version()]


def raising_schedule() -> list[keras.callbacks.Callback]:
    return [LearningRateScheduler(lambda version: {}[version])]


def negative_schedule() -> list[keras.callbacks.Callback]:
    return [LearningRateScheduler(lambda version: -0.1)]


class Watcher(keras.callbacks.LearningRateScheduler):
    def on_batch_end(self, batch: int, logs: object = None) -> None: ...


def watching() -> list[keras.callbacks.Callback]:
    return [Watcher(lambda epoch: 0.1)]


def decaying() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))


def decaying_scaled() -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(decaying())
