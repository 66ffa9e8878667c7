"""Peer: `model.fit` under `tf.distribute.ParameterServerStrategy`, for TensorFlow 2.15: the last whose Keras has it.

    python -m benchmarks.peers.strategy_fit TFRECORD_DIR --batch N --seconds S [--optimizer NAME] [--num_ps N]
        [--num_workers N]

Prints one JSON object with `samples_per_second` of the steady state.  Ten steps an execution: its best.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import tensorflow as tf

from benchmarks.peers.cluster import serve, strategy
from benchmarks.peers.deepfm import compiled, dataset, keras
from benchmarks.peers.options import parse_options

STEPS_PER_EXECUTION = 10
EXECUTIONS_PER_EPOCH = 20


class _Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Times epochs, at whose ends all workers have ended their steps; the first one is warm-up."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.epochs = -1
        self.began = self.elapsed = 0.0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1
        if self.epochs == 0:
            self.began = time.perf_counter()
        self.elapsed = time.perf_counter() - self.began
        if self.elapsed >= self.seconds:
            self.model.stop_training = True


def main() -> None:
    options = parse_options()
    if options.serve:
        serve(options)
    with strategy(options, "benchmarks.peers.strategy_fit") as pss:
        with pss.scope():
            model = compiled(options.optimizer, STEPS_PER_EXECUTION)
        steps = STEPS_PER_EXECUTION * EXECUTIONS_PER_EPOCH * options.num_workers
        if options.optimizer == "Adam":
            steps //= 10  # each takes so much longer
        clock = _Clock(options.seconds)
        data = keras.utils.experimental.DatasetCreator(lambda context: dataset(options.tfrecord, options.batch))
        model.fit(data, epochs=1_000_000, steps_per_epoch=steps, verbose=0, callbacks=[clock])
        samples = clock.epochs * steps * options.batch
        figures = {"samples_per_second": samples / clock.elapsed, "steps": clock.epochs * steps}
        print(json.dumps(figures), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the coordinator's threads wait for servers that are gone


if __name__ == "__main__":
    assert tf.__version__.startswith("2.15"), f"TensorFlow {tf.__version__}: its Keras has no fit under this strategy"
    main()
