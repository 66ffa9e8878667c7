"""The port `Framework` on Keras 3 and TensorFlow."""

import tensorflow as tf

from elasticdl.frameworks.keras.computation import limit_threads
from elasticdl.frameworks.keras.framework import KerasFramework, KerasSettings

__all__ = ["KerasFramework", "KerasSettings", "first_op"]


def first_op() -> None:
    """Execute an op, to find out whether TensorFlow works in this process."""
    limit_threads()
    tf.add(1, 1)
