"""ImageNet with ResNet-50 (He et al. 2015, arXiv:1512.03385), version 1.5: strides in the 3 × 3 convolutions.

Records are `tf.train.Example` with `image` (the bytes of a JPEG or PNG file) and `label` (int64).  They come from a
folder with a directory of images per class (`--training_data=/data/imagenet/train`), or from RecordIO files written by
`scripts/gen_dataset.py imagenet`.
"""

import keras
import tensorflow as tf

SIZE = 224
SMALLEST, LARGEST = 0.08, 1.0  # range of the fraction of an image that a training crop covers
NUM_CLASSES = 1000
MEAN = (123.7, 116.3, 103.5)  # means of ImageNet's training images, by channel
DEVIATION = (58.4, 57.1, 57.4)
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # channels, number of blocks


def custom_model(num_classes: int = NUM_CLASSES, image_size: int = SIZE, width: float = 1.0) -> keras.Model:
    """Return ResNet-50 for images of 224 × 224 pixels.

    Args:
        num_classes: Number of classes.
        image_size: Size to which images are scaled inside the model, in pixels.
        width: Factor for the channels of every layer.
    """
    image = keras.Input((SIZE, SIZE, 3), dtype="uint8", name="image")
    x = image if image_size == SIZE else keras.layers.Resizing(image_size, image_size, dtype="float32")(image)
    offset = [-mean / deviation for mean, deviation in zip(MEAN, DEVIATION, strict=True)]
    x = keras.layers.Rescaling([1 / deviation for deviation in DEVIATION], offset)(x)
    x = keras.layers.ReLU()(convolved(x, int(64 * width), 7, 2))
    x = keras.layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, (channels, num_blocks) in enumerate(STAGES):
        for k in range(num_blocks):
            x = bottleneck(x, int(channels * width), 2 if stage and not k else 1)
    x = keras.layers.GlobalAveragePooling2D()(x)
    logits = keras.layers.Dense(num_classes, dtype="float32", name="logits")(x)
    return keras.Model(image, logits, name="resnet50")


def bottleneck(x: keras.KerasTensor, channels: int, stride: int) -> keras.KerasTensor:
    """Return a bottleneck block: 1 × 1, 3 × 3, 1 × 1 convolutions plus a shortcut, projected if the shape changes."""
    shortcut = x
    if stride > 1 or x.shape[-1] != 4 * channels:
        shortcut = convolved(x, 4 * channels, 1, stride)
    x = keras.layers.ReLU()(convolved(x, channels, 1, 1))
    x = keras.layers.ReLU()(convolved(x, channels, 3, stride))
    x = convolved(x, 4 * channels, 1, 1, first_scale="zeros")
    return keras.layers.ReLU()(keras.layers.Add()([x, shortcut]))


def convolved(
    x: keras.KerasTensor, channels: int, size: int, stride: int, first_scale: str = "ones"
) -> keras.KerasTensor:
    """Return a convolution with batch normalisation; with an initial scale of zeros a block equals its shortcut."""
    x = keras.layers.Conv2D(
        channels, size, stride, padding="same", use_bias=False, kernel_initializer="he_normal",
        kernel_regularizer=keras.regularizers.L2(5e-5),
    )(x)  # fmt: skip
    return keras.layers.BatchNormalization(momentum=0.9, gamma_initializer=first_scale)(x)


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    losses = keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)
    return tf.reduce_mean(losses)


def optimizer() -> keras.optimizers.Optimizer:
    """Return SGD for 256 images per step over all workers; the rate decays over 90 epochs of 1.28 million images."""
    rate = keras.optimizers.schedules.CosineDecay(0.1, 450_000)
    return keras.optimizers.SGD(rate, momentum=0.9, nesterov=True)


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    """Parse records; crop images randomly for training, otherwise to the middle."""

    def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        features = {"image": tf.io.FixedLenFeature([], tf.string)}
        if mode == "prediction":
            return tf.io.parse_single_example(record, features)["image"], tf.constant(0, tf.int64)
        example = tf.io.parse_single_example(record, features | {"label": tf.io.FixedLenFeature([], tf.int64)})
        return example["image"], example["label"]

    def training_sample(record: tf.Tensor, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        file, label = parse(record)
        return random_crop(file, tf.stack([number, 0])), label

    def sample(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | tf.Tensor:
        file, label = parse(record)
        return middle(file) if mode == "prediction" else (middle(file), label)

    if mode != "training":
        return dataset.map(sample, num_parallel_calls=tf.data.AUTOTUNE)
    # The shuffle depends only on epoch and task, and so do the crops, with seeds from it.
    numbers = tf.data.Dataset.range(1 << 30).shuffle(1024)
    dataset = tf.data.Dataset.zip((dataset.shuffle(1024), numbers))
    return dataset.map(training_sample, num_parallel_calls=tf.data.AUTOTUNE)


def random_crop(file: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Return a random part of an image, at least 8 % of its area, mirrored with probability 1/2."""
    image = decoded(file)
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.shape(image), tf.zeros([0, 0, 4]), seed, 0.1, (3 / 4, 4 / 3), (SMALLEST, LARGEST), 10, True
    )
    image = resized(tf.slice(image, begin, size))
    return tf.image.stateless_random_flip_left_right(image, seed)


def middle(file: tf.Tensor) -> tf.Tensor:
    """Return the largest central square of an image, without a margin of one eighth."""
    image = decoded(file)
    shape = tf.shape(image)
    side = tf.cast(tf.cast(tf.minimum(shape[0], shape[1]), tf.float32) * 0.875, tf.int32)
    return resized(tf.image.resize_with_crop_or_pad(image, side, side))


def decoded(file: tf.Tensor) -> tf.Tensor:
    return tf.io.decode_image(file, 3, expand_animations=False)


def resized(image: tf.Tensor) -> tf.Tensor:
    image = tf.image.resize(image, (SIZE, SIZE))
    return tf.ensure_shape(tf.cast(tf.clip_by_value(image, 0, 255), tf.uint8), (SIZE, SIZE, 3))


def eval_metrics_fn() -> dict[str, keras.metrics.Metric]:
    return {
        "accuracy": keras.metrics.SparseCategoricalAccuracy(),
        "top_5": keras.metrics.SparseTopKCategoricalAccuracy(5),
    }
