"""The zoo's Estimator on iris at the pace of `pace.py`: python -m paced.iris_estimator, with its own arguments."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from iris import dnn_estimator

from elasticdl.api.tensorflow import input_fn

from .pace import pause


def _late(rows: np.ndarray) -> np.ndarray:
    pause(len(rows))
    return rows


def paced_input(data: Any, parse: Callable[[tf.Tensor], Any]) -> Callable[[], tf.data.Dataset]:
    def parse_late(rows: tf.Tensor) -> Any:
        late = tf.numpy_function(_late, [rows], tf.string)
        late.set_shape(rows.shape)
        return parse(late)

    return input_fn(data, parse_late)


if __name__ == "__main__":
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
    dnn_estimator.input_fn = paced_input
    dnn_estimator.main()
