"""CIFAR-10 with a small network like VGG: pairs of 3 × 3 convolutions; each stage halves the size, doubles the width.

Source: Simonyan and Zisserman, arXiv:1409.1556; batch normalisation and fewer layers, as the images are small.
"""

import keras

from .images import NUM_CLASSES, eval_metrics_fn, feed, image_input, loss, optimizer, prepared

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


def custom_model(width: int = 32, num_stages: int = 3, dropout: float = 0.3) -> keras.Model:
    """Return a model with two convolutions per stage and `width` channels in the first stage."""
    image = image_input()
    x = prepared(image)
    for stage in range(num_stages):
        for _ in range(2):
            x = keras.layers.Conv2D(width << stage, 3, padding="same", use_bias=False)(x)
            x = keras.layers.BatchNormalization(momentum=0.9)(x)
            x = keras.layers.ReLU()(x)
        x = keras.layers.MaxPooling2D()(x)
        x = keras.layers.Dropout(dropout)(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    logits = keras.layers.Dense(NUM_CLASSES, name="logits")(x)
    return keras.Model(image, logits, name="vgg")
