"""What a user's TensorFlow module may import: callbacks that a distributed job understands."""

from __future__ import annotations

from collections.abc import Callable

import keras

__all__ = ["LearningRateScheduler"]


class LearningRateScheduler(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate by model version: the number of minibatches (of rounds, when sync) in the model so far.

    The rate holds for a minibatch that is computed on that version.  By epoch: `keras.callbacks.LearningRateScheduler`.

    Args:
        schedule: model version to learning rate.
    """

    def __init__(self, schedule: Callable[[int], float]) -> None:
        super().__init__()
        self.schedule = schedule
