"""The digits at a pace that can be changed while the job runs: seconds for a record, in the file `pace` of the job's
directory.  So a job lasts exactly as long as a test has use for it, and waiting costs no CPU."""

import threading
import time
from pathlib import Path

import numpy as np
import tensorflow as tf
from digits import digits_functional
from digits.digits_functional import custom_model, eval_metrics_fn, loss, optimizer

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]

_PACE = Path("/job/pace")
_LOOK_S = 0.1


def _pause(label: np.ndarray) -> np.ndarray:
    """Waits for as long as a record takes by the file's newest word, and hands the label on."""
    began = time.monotonic()
    while (left := began + _pace() - time.monotonic()) > 0:
        threading.Event().wait(min(left, _LOOK_S))
    return label


def _pace() -> float:
    try:
        return float(_PACE.read_text() or 0)
    except FileNotFoundError:
        return 0.0


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    dataset = digits_functional.feed(dataset, mode, metadata)
    if mode != "training":
        return dataset

    def paced(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        late = tf.numpy_function(_pause, [label], tf.int64)
        late.set_shape(label.shape)
        return image, late

    return dataset.map(paced)
