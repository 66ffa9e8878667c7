"""CIFAR-10: code shared by all Keras models on it.

Records are `tf.train.Example` with `image` (3072 bytes, channels first, as in CIFAR's python batches) and `label`
(int64), as made by `scripts/gen_dataset.py cifar10`.
"""

import keras
import tensorflow as tf

SIZE = 32
NUM_CLASSES = 10
MEAN = (125.3, 123.0, 113.9)  # means of CIFAR-10's training images, by channel
DEVIATION = (63.0, 62.1, 66.7)
PADDING = 4
PARSE_BATCH = 512


def image_input() -> keras.KerasTensor:
    """Return the input for pixels [batch, 32, 32, 3] from 0 to 255."""
    return keras.Input((SIZE, SIZE, 3), dtype="uint8", name="image")


def prepared(image: keras.KerasTensor) -> keras.KerasTensor:
    """Normalise pixels; in training, also shift images randomly by up to four pixels and mirror half of them."""
    scale = [1 / deviation for deviation in DEVIATION]
    offset = [-mean / deviation for mean, deviation in zip(MEAN, DEVIATION, strict=True)]
    x = keras.layers.Rescaling(scale, offset)(image)
    x = keras.layers.ZeroPadding2D(PADDING)(x)
    x = keras.layers.RandomCrop(SIZE, SIZE)(x)
    return keras.layers.RandomFlip("horizontal")(x)


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    losses = keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)
    return tf.reduce_mean(losses)


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.002)


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | tf.Tensor:
        features = {"image": tf.io.FixedLenFeature([], tf.string)}
        if mode != "prediction":
            features["label"] = tf.io.FixedLenFeature([], tf.int64)
        example = tf.io.parse_example(records, features)
        image = tf.reshape(tf.io.decode_raw(example["image"], tf.uint8), [-1, 3, SIZE, SIZE])
        image = tf.transpose(image, [0, 2, 3, 1])
        return image if mode == "prediction" else (image, example["label"])

    if mode == "training":
        dataset = dataset.shuffle(4096)
    return dataset.batch(PARSE_BATCH).map(parse).unbatch()


def eval_metrics_fn() -> dict[str, keras.metrics.Metric]:
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}
