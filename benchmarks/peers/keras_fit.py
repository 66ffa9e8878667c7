"""Peer: the same Keras model in one process, by `model.fit`.

    python -m benchmarks.peers.keras_fit TFRECORD_DIR BATCH SECONDS

Prints one JSON object with `samples_per_second` of the steady state.  It reads TFRecord files, the format that
TensorFlow reads fastest, with whole minibatches parsed at once.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from benchmarks.zoo import deepfm_clicks

WARM_UP_STEPS = 20


class _Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts steps after the warm-up until the time is over."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.steps = 0
        self.began = 0.0
        self.elapsed = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch + 1 == WARM_UP_STEPS:
            self.began = time.perf_counter()
        elif batch + 1 > WARM_UP_STEPS:
            self.steps += 1
            self.elapsed = time.perf_counter() - self.began
            if self.elapsed >= self.seconds:
                self.model.stop_training = True


def dataset(directory: str, batch: int) -> tf.data.Dataset:
    """Endless minibatches of the files of a directory."""
    files = sorted(str(path) for path in Path(directory).glob("*.tfrecord"))
    records = tf.data.TFRecordDataset(files).repeat().batch(batch, drop_remainder=True)
    return records.map(deepfm_clicks.parse).prefetch(tf.data.AUTOTUNE)


def main(directory: str, batch: int, seconds: float) -> None:
    model = deepfm_clicks.custom_model(plain=True)
    model.compile(optimizer=deepfm_clicks.optimizer(), loss=deepfm_clicks.loss)
    clock = _Clock(seconds)
    model.fit(dataset(directory, batch), steps_per_epoch=1_000_000, epochs=1, verbose=0, callbacks=[clock])
    print(json.dumps({"samples_per_second": clock.steps * batch / clock.elapsed, "steps": clock.steps}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
