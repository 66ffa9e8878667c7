"""The digits in NumPy with a part of the user's own that fails, as the variable TROUBLE says: model, feed, loss,
callback, metrics, nan, exit, or memory, which the first process to come so far takes without end; it makes MARK

For tests of its explanation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticdl.frameworks.framework import Batch, FeedError, Floats, Mode, ModelReport, Parameters, Step, TaskRecords

from . import numpy_digits
from .numpy_digits import NumpyFramework

TROUBLE = os.environ.get("TROUBLE", "")


def custom_model() -> Floats:
    if TROUBLE == "model":
        raise RuntimeError("the layers do not fit on purpose")
    return numpy_digits.custom_model()


def feed(images: Floats) -> Floats:
    if TROUBLE == "feed":
        raise ValueError("this feed is broken on purpose")
    return images


def loss(value: float) -> float:
    if TROUBLE == "loss":
        raise TypeError("shapes do not fit on purpose")
    if TROUBLE == "exit":
        sys.exit(0)
    if TROUBLE == "memory":
        _take_all_memory()
    return float("nan") if TROUBLE == "nan" else value


def _take_all_memory() -> None:
    try:
        Path(os.environ["MARK"]).touch(exist_ok=False)
    except FileExistsError:
        return
    taken = bytearray()
    while True:
        taken += b"1" * (16 << 20)


def on_train_end() -> None:
    if TROUBLE == "callback":
        raise OSError("nowhere to write on purpose")


def framework(definition: Any, minibatch_size: int, **_: object) -> TroubledFramework:
    return TroubledFramework(definition.model(), minibatch_size)


class TroubledFramework(NumpyFramework):
    """Calls the functions above where other adapters call those of a user's module."""

    def report(self) -> ModelReport:
        return replace(super().report(), has_callbacks=TROUBLE == "callback")

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        for batch in super().batches(mode, tasks):
            if not batch.end:
                try:
                    feed(batch.data[0])
                except ValueError as error:
                    raise FeedError(batch.lease, batch.n, f"{type(error).__name__}: {error}") from error
            yield batch

    def gradients(self, batch: Batch, parameters: Parameters, rows: Mapping[str, Floats], seed: int) -> Step:
        step = super().gradients(batch, parameters, rows, seed)
        return replace(step, loss=loss(step.loss))

    def end_training(self, parameters: Parameters | None, output: str) -> None:
        on_train_end()
