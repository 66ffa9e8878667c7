"""The digits at the pace of `pace.py`."""

import numpy as np
import tensorflow as tf
from digits import digits_functional
from digits.digits_functional import custom_model, eval_metrics_fn, loss, optimizer

from .pace import pause

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


def _late(label: np.ndarray) -> np.ndarray:
    pause()
    return label


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    dataset = digits_functional.feed(dataset, mode, metadata)
    if mode != "training":
        return dataset

    def paced(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        late = tf.numpy_function(_late, [label], tf.int64)
        late.set_shape(label.shape)
        return image, late

    return dataset.map(paced)
