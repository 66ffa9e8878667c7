"""A model zoo over the digits whose `feed` stops at a gate, so that a test can kill the worker there."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.job import REPOSITORY

_GATE = '''

GATE = pathlib.Path({gate!r})
seen = {{"records": 0}}


def pass_gate(count):
    """Counts what this process feeds; from the 60th record on it waits for the test, which may hold the lock."""
    seen["records"] += int(count)
    if seen["records"] >= 60:
        (GATE / f"waits-{{os.getpid()}}").touch()
        with open(GATE / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
    return np.int64(0)
'''
_KERAS = """
import fcntl
import os
import pathlib

import numpy as np

plain_feed = feed


def feed(dataset, mode, metadata):
    def gated(records):
        zero = tf.numpy_function(pass_gate, [tf.size(records)], tf.int64, stateful=True)
        with tf.control_dependencies([zero]):
            return tf.identity(records)

    dataset = dataset.batch(4).map(gated, num_parallel_calls=1).unbatch()
    return plain_feed(dataset, mode, metadata)


def eval_metrics_fn():
    return {
        "accuracy": keras.metrics.SparseCategoricalAccuracy(),
        "crossentropy": keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
    }
"""
_TORCH = """
import fcntl
import os
import pathlib

import numpy as np

plain_feed = feed


def feed(records, mode, metadata):
    pass_gate(len(records))
    if mode == "prediction":
        return torch.from_numpy(parse_examples(records, {"image": (64,)})["image"]) / 16
    return plain_feed(records, mode, metadata)


def eval_metrics_fn():
    return {
        "accuracy": lambda labels, predictions: predictions.argmax(1) == labels,
        "crossentropy": lambda labels, predictions: nn.functional.cross_entropy(predictions, labels, reduction="none"),
    }
"""


def gated_zoo(directory: Path, torch_source: str = "", code: str = "") -> tuple[Path, Path]:
    """The zoo with the module `model`, and the directory of its gate.

    Args:
        torch_source: of a PyTorch model over the digits; empty: the Keras example.
        code: more, at the end.
    """
    zoo, gate = directory / "gated_zoo", directory / "gate"
    zoo.mkdir()
    gate.mkdir()
    source = torch_source or (REPOSITORY / "model_zoo/digits/digits_functional.py").read_text()
    own = _TORCH if torch_source else _KERAS
    (zoo / "model.py").write_text(source + own + _GATE.format(gate=str(gate)) + code)
    return zoo, gate
