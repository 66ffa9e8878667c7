"""CIFAR-10 with ResNet-20 (He et al. 2015, arXiv:1512.03385, section 4.2); the same for PyTorch: resnet20_pytorch."""

import keras

from .images import NUM_CLASSES, eval_metrics_fn, feed, image_input, loss, prepared

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


def custom_model(num_blocks: int = 3, width: int = 16) -> keras.Model:
    """Return a ResNet with 6 * num_blocks + 2 layers."""
    image = image_input()
    x = norm(conv(prepared(image), width, 1))
    x = keras.layers.ReLU()(x)
    for stage in range(3):
        for k in range(num_blocks):
            x = block(x, width << stage, 2 if stage and not k else 1)
    x = keras.layers.GlobalAveragePooling2D()(x)
    logits = keras.layers.Dense(NUM_CLASSES, name="logits")(x)
    return keras.Model(image, logits, name="resnet")


def block(x: keras.KerasTensor, channels: int, stride: int) -> keras.KerasTensor:
    """Return two convolutions plus a shortcut, which is subsampled and padded with zeros if the size changes."""
    shortcut = x
    num_new = channels - x.shape[-1]
    if stride > 1 or num_new:
        shortcut = keras.ops.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (0, num_new)))
    x = keras.layers.ReLU()(norm(conv(x, channels, stride)))
    x = norm(conv(x, channels, 1))
    return keras.layers.ReLU()(keras.layers.Add()([x, shortcut]))


def conv(x: keras.KerasTensor, channels: int, stride: int) -> keras.KerasTensor:
    initializer = keras.initializers.HeNormal()
    layer = keras.layers.Conv2D(
        channels, 3, stride, padding="same", use_bias=False, kernel_initializer=initializer,
        kernel_regularizer=keras.regularizers.L2(5e-5),
    )  # fmt: skip
    return layer(x)


def norm(x: keras.KerasTensor) -> keras.KerasTensor:
    return keras.layers.BatchNormalization(momentum=0.9)(x)


def optimizer() -> keras.optimizers.Optimizer:
    """Return SGD with the paper's schedule, in steps of 128 images."""
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([32_000, 48_000], [0.1, 0.01, 0.001])
    return keras.optimizers.SGD(rate, momentum=0.9, nesterov=True)
