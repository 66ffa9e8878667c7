"""Peer: the same model in one process, by `model.fit` of the TensorFlow that runs this.

    python -m benchmarks.peers.keras_fit TFRECORD_DIR --batch N --seconds S [--optimizer NAME]

Prints one JSON object with `samples_per_second` of the steady state.
"""

from __future__ import annotations

import json
import time
from typing import Any

from benchmarks.peers.deepfm import compiled, dataset, keras
from benchmarks.peers.options import parse_options

STEPS_PER_EXECUTION = 10
WARM_UP_S = 3.0


class _Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts steps after the warm-up until the time is over."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.first_at = self.began = self.ended = 0.0
        self.first_batch = self.last_batch = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        self.first_at = self.first_at or now
        if self.first_batch < 0:
            if now - self.first_at >= WARM_UP_S:
                self.first_batch, self.began = batch, now
            return
        self.last_batch, self.ended = batch, now
        if now - self.began >= self.seconds:
            self.model.stop_training = True


def main() -> None:
    options = parse_options()
    model = compiled(options.optimizer, STEPS_PER_EXECUTION)
    clock = _Clock(options.seconds)
    model.fit(dataset(options.tfrecord, options.batch), steps_per_epoch=1_000_000, verbose=0, callbacks=[clock])
    steps = clock.last_batch - clock.first_batch
    rate = steps * options.batch / (clock.ended - clock.began)
    print(json.dumps({"samples_per_second": rate, "steps": steps}))


if __name__ == "__main__":
    main()
