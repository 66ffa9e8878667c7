"""Results that workers write for `elasticdl.fit`: the history, and the newest or the best weights.

Each file may be written twice if a worker is lost.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import keras
import numpy as np

from elasticdl_client.errors import ElasticDLError

_WEIGHTS = "weights.npz"


class WriteBack(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes the logs of each epoch, and the newest weights."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        numbers = {name: float(value) for name, value in (logs or {}).items()}
        with _published(self._directory / f"epoch-{epoch}.json") as file:
            file.write(json.dumps(numbers).encode())

    def on_train_end(self, logs: Any = None) -> None:
        _write_weights(self._directory / _WEIGHTS, self.model)


class BestWeights(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes the weights that an `EarlyStopping` restores, after each epoch that is the best so far."""

    def __init__(self, stopping: keras.callbacks.EarlyStopping, number: int, directory: Path) -> None:
        """
        Args:
            number: Position among the callbacks; of several with best weights the last one restores them.
            directory: The directory of `WriteBack`.
        """
        super().__init__()
        self._stopping = stopping
        self._number = number
        self._directory = directory

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        before = [numbers for number, numbers in _epochs(self._directory).items() if number < epoch]
        if best_epoch(self._stopping, [*before, dict(logs or {})]) != epoch:
            return
        _write_weights(self._directory / f"best-{self._number}-{epoch}.npz", self.model)
        for path in self._directory.glob(f"best-{self._number}-*.npz"):
            if _numbers_in(path)[-1] < epoch:
                path.unlink(missing_ok=True)


def best_epoch(stopping: keras.callbacks.EarlyStopping, epochs: Sequence[Mapping[str, float]]) -> int | None:
    """Return the epoch, from 0, whose weights Keras's `EarlyStopping` keeps; None: no epoch.

    An epoch with a NaN is never the best, as for the master; in Keras a NaN in the first epoch stays the best.

    Args:
        epochs: The logs of each epoch.
    """
    of_keras = copy.copy(stopping)
    of_keras.restore_best_weights = True
    of_keras.set_model(SimpleNamespace(get_weights=lambda: ()))
    of_keras.on_train_begin()
    for epoch, logs in enumerate(epochs):
        if not np.isnan(logs.get(stopping.monitor, 0.0)):
            keras.callbacks.EarlyStopping.on_epoch_end(of_keras, epoch, logs)
    return None if of_keras.best_weights is None else int(of_keras.best_epoch)


def take_back(model: Any, directory: Path) -> keras.callbacks.History:
    """Set the weights of a model from the results of a job, and return its history.

    Raises:
        ElasticDLError: The directory has no weights.
    """
    best = max(directory.glob("best-*.npz"), key=_numbers_in, default=None)
    weights = best or directory / _WEIGHTS
    if not weights.is_file():
        raise ElasticDLError(f"The job of fit has succeeded and has not written {weights}.", "Report this as a bug.")
    with np.load(weights, allow_pickle=False) as arrays:
        model.set_weights([arrays[f"arr_{place}"] for place in range(len(arrays.files))])
    history = keras.callbacks.History()
    history.set_model(model)
    history.on_train_begin()
    for epoch, numbers in _epochs(directory).items():
        history.on_epoch_end(epoch, numbers)
    model.history = history
    return history


def _epochs(directory: Path) -> dict[int, dict[str, float]]:
    """Return the logs of each epoch that `WriteBack` has written, in order."""
    paths = sorted(directory.glob("epoch-*.json"), key=_numbers_in)
    return {_numbers_in(path)[0]: json.loads(path.read_text()) for path in paths}


def _numbers_in(path: Path) -> list[int]:
    return [int(part) for part in path.stem.split("-")[1:]]


def _write_weights(path: Path, model: Any) -> None:
    weights = model.get_weights()
    known = [one.astype("float32") if one.dtype.kind == "V" else one for one in weights]  # .npz has no bfloat16
    with _published(path) as file:
        np.savez(file, *known)


@contextmanager
def _published(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that gets its final name when it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        yield file
    temporary.replace(path)
