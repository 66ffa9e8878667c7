"""CIFAR-10 with MobileNetV2 (Sandler et al. 2018, arXiv:1801.04381), without its first strides, for small images."""

import keras

from .images import NUM_CLASSES, eval_metrics_fn, feed, image_input, loss, optimizer, prepared

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]

# Expansion, channels, number of blocks, stride of the first one: table 2 of the paper.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
STEM, HEAD = 32, 1280


def custom_model(width: float = 1.0, dropout: float = 0.2) -> keras.Model:
    """Return MobileNetV2; `width` multiplies the channels of every layer, except the last one if it is below 1."""
    image = image_input()
    x = normed(keras.layers.Conv2D(scaled(STEM, width), 3, padding="same", use_bias=False)(prepared(image)))
    x = keras.layers.ReLU(6.0)(x)
    for expansion, channels, num_blocks, stride in STAGES:
        for k in range(num_blocks):
            x = inverted_residual(x, expansion, scaled(channels, width), 1 if k else stride)
    head = scaled(HEAD, max(width, 1.0))
    x = keras.layers.ReLU(6.0)(normed(keras.layers.Conv2D(head, 1, use_bias=False)(x)))
    x = keras.layers.Dropout(dropout)(keras.layers.GlobalAveragePooling2D()(x))
    logits = keras.layers.Dense(NUM_CLASSES, name="logits")(x)
    return keras.Model(image, logits, name="mobilenet")


def inverted_residual(x: keras.KerasTensor, expansion: int, channels: int, stride: int) -> keras.KerasTensor:
    """Return an inverted residual block: expand, filter by channel, project linearly; add the input if shapes match."""
    inputs = x
    if expansion > 1:
        x = keras.layers.Conv2D(expansion * x.shape[-1], 1, use_bias=False)(x)
        x = keras.layers.ReLU(6.0)(normed(x))
    x = keras.layers.DepthwiseConv2D(3, stride, padding="same", use_bias=False)(x)
    x = keras.layers.ReLU(6.0)(normed(x))
    x = normed(keras.layers.Conv2D(channels, 1, use_bias=False)(x))
    return keras.layers.Add()([inputs, x]) if x.shape == inputs.shape else x


def normed(x: keras.KerasTensor) -> keras.KerasTensor:
    return keras.layers.BatchNormalization(momentum=0.9)(x)


def scaled(channels: int, width: float) -> int:
    """Return scaled channels as a multiple of 8, at most 10 % below the exact value."""
    wanted = channels * width
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * wanted else rounded + 8
