"""The digits in NumPy, by user code that hangs once in a job, where the environment says.

HANG_IN: model, sample (the first minibatch of a process), feed, feed_sleeps, loss, callback, or pause: the loss waits
for a writer of the pipe HANG_MARK.over. HANG_MARK: a file that the first process to hang makes, so that no other does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticdl.frameworks.framework import (
    Batch,
    Floats,
    LocalGradient,
    Mode,
    ModelReport,
    Parameters,
    Share,
    Step,
    TaskRecords,
)
from tests.e2e_kubernetes.zoo.paced import numpy_digits

_AFTER = 5  # minibatches of a process: before, the job is young


def custom_model() -> Floats:
    if _may_hang("model"):
        threading.Event().wait()
    return numpy_digits.custom_model()


def framework(definition: Any, minibatch_size: int, **_: object) -> HangingFramework:
    return HangingFramework(definition.model(), minibatch_size)


class HangingFramework(numpy_digits.NumpyFramework):
    """See `elasticdl.frameworks.framework.Framework`."""

    def __init__(self, weights: Floats, minibatch_size: int) -> None:
        super().__init__(weights, minibatch_size)
        self._num_steps = 0

    def report(self) -> ModelReport:
        report = super().report()
        return ModelReport(report.variables, report.tables, report.optimizer, report.metrics, has_callbacks=True)

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        return feed(super().batches(mode, tasks))

    def gradients(self, batch: Batch, parameters: Parameters, rows: Mapping[str, Floats], seed: int) -> Step:
        self._step()
        return super().gradients(batch, parameters, rows, seed)

    def local_gradient(self, shares: Sequence[Share], ready: Callable[[Any], None]) -> LocalGradient:
        self._step()
        return super().local_gradient(shares, ready)

    def _step(self) -> None:
        self._num_steps += 1
        if self._num_steps > _AFTER:
            loss()

    def end_training(self, parameters: Parameters | None, output: str) -> None:
        on_train_end()


def feed(batches: Iterator[Batch]) -> Iterator[Batch]:
    if _may_hang("sample"):
        threading.Event().wait()
    for count, batch in enumerate(batches):
        yield batch
        if count > _AFTER and _may_hang("feed"):
            while True:  # an endless loop
                pass
        if count > _AFTER and _may_hang("feed_sleeps"):
            time.sleep(3600)


def loss() -> None:
    if _may_hang("loss"):
        lock = threading.Lock()
        with lock:
            lock.acquire()  # a deadlock

    if _may_hang("pause"):
        Path(os.environ["HANG_MARK"] + ".over").read_bytes()


def on_train_end() -> None:
    if _may_hang("callback"):
        threading.Event().wait()


def _may_hang(where: str) -> bool:
    """Whether this process is the one that hangs there."""
    if os.environ.get("HANG_IN") != where:
        return False
    try:
        with Path(os.environ["HANG_MARK"]).open("x") as mark:
            mark.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True
