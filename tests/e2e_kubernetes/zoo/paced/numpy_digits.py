"""The digits by softmax regression in NumPy, at the pace of `pace.py`: workers that import no framework start at once.

For tests that ask what the system does when something is lost; others cover Keras and PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.data.example import parse_examples
from elasticdl.frameworks.devices import DeviceMeter
from elasticdl.frameworks.framework import (
    NUM_TOLD,
    Batch,
    Floats,
    LocalGradient,
    MetricState,
    Mode,
    ModelReport,
    Parameters,
    Share,
    Step,
    Surplus,
    TableRows,
    TaskRecords,
    Variable,
)

from .pace import pause

PIXELS, CLASSES = 64, 10
RATE = 0.3
OPTIMIZER = '{"module": "keras.optimizers", "class_name": "SGD", "config": {"learning_rate": 0.3}}'
Examples = tuple[Floats, npt.NDArray[np.int64]]


def custom_model() -> Floats:
    """The weights [pixels + 1, classes]; the last row is the bias."""
    return np.zeros((PIXELS + 1, CLASSES), np.float32)


def framework(definition: Any, minibatch_size: int, **_: object) -> NumpyFramework:
    return NumpyFramework(definition.model(), minibatch_size)


class NumpyFramework:
    """See `elasticdl.frameworks.framework.Framework`."""

    device = "cpu"

    def __init__(self, weights: Floats, minibatch_size: int) -> None:
        self.weights = weights
        self._minibatch_size = minibatch_size
        self._shared = np.zeros(weights.size + NUM_TOLD, np.float32)

    @property
    def device_meter(self) -> DeviceMeter:
        return DeviceMeter("the CPU", lambda: None)

    def report(self) -> ModelReport:
        return ModelReport((Variable("weights", self.weights.shape, True),), (), OPTIMIZER, ("accuracy",))

    def initial(self) -> Parameters:
        return Parameters(np.zeros(self.weights.size, np.float32), np.zeros(0, np.float32))

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        for task in tasks:
            order = np.arange(len(task.records))
            if mode is Mode.TRAINING:
                np.random.default_rng(task.seed).shuffle(order)
            n = 0
            for n, start in enumerate(range(0, len(order), self._minibatch_size), 1):
                records = [task.records[k] for k in order[start : start + self._minibatch_size]]
                if mode is Mode.TRAINING:
                    pause(len(records))
                yield Batch(task.lease, n - 1, size=len(records), data=_examples(records))
            yield Batch(task.lease, n, end=True, surplus=Surplus())

    def gradients(self, batch: Batch, parameters: Parameters, rows: Mapping[str, Floats], seed: int) -> Step:
        loss, gradient = _loss_and_gradient(batch.data, self._shaped(parameters.trainable))
        return Step(loss, gradient.ravel(), np.zeros(0, np.float32), {})

    def learning_rate(self, epoch: int, version: int) -> float | None:
        return None

    def rate_in_use(self) -> float | None:
        return RATE

    def train(self, batch: Batch, seed: int, learning_rate: float | None = None) -> float:
        loss, gradient = _loss_and_gradient(batch.data, self.weights)
        self.weights -= RATE * gradient
        return loss

    def local_gradient(self, shares: Sequence[Share], ready: Callable[[Any], None]) -> LocalGradient:
        self._shared[:] = 0
        for share in shares:
            loss, gradient = _loss_and_gradient(share.batch.data, self.weights)
            self._shared[:-NUM_TOLD] += share.scale * gradient.ravel()
            self._shared[-NUM_TOLD:] += (loss * share.scale, share.scale, 0)
        return LocalGradient([self._shared], lambda: self._shared[-NUM_TOLD:].copy())

    def apply_gradient(self, gradient: LocalGradient, learning_rate: float | None) -> None:
        summed = self._shared[:-NUM_TOLD] * np.float32(gradient.rescale)
        self.weights -= np.float32(RATE) * self._shaped(summed)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return {"model/weights": self.weights.copy()}

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self.weights[:] = state["model/weights"]

    load_weights = load_state

    def predict(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> Floats:
        weights = self.weights if parameters is None else self._shaped(parameters.trainable)
        return _logits(batch.data[0], weights)

    def evaluation(self) -> NumpyEvaluation:
        return NumpyEvaluation(self)

    def export(
        self, path: str, parameters: Parameters | None, tables: Iterable[TableRows], model_file: bool = True
    ) -> None:
        weights = self.weights if parameters is None else self._shaped(parameters.trainable)
        Path(path).mkdir(parents=True, exist_ok=True)
        np.save(Path(path) / "weights.npy", weights)

    def begin_training(self) -> None: ...

    def end_epoch(self, parameters: Parameters | None, epoch: int, logs: Mapping[str, float]) -> None: ...

    def end_evaluation(self, step: int, results: Mapping[str, float]) -> None: ...

    def end_training(self, parameters: Parameters | None, output: str) -> None: ...

    def _shaped(self, flat: Floats) -> Floats:
        return flat.reshape(self.weights.shape)


class NumpyEvaluation:
    """See `elasticdl.frameworks.framework.Evaluation`."""

    def __init__(self, model: NumpyFramework) -> None:
        self._model = model
        self._right, self._count = 0, 0

    def update(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> None:
        said = self._model.predict(batch, parameters, rows).argmax(1)
        self._right += int((said == batch.data[1]).sum())
        self._count += batch.size

    def states(self) -> list[MetricState]:
        return [MetricState("accuracy", (np.array(float(self._right)), np.array(float(self._count))))]

    def results(self, merged: Sequence[MetricState]) -> dict[str, float]:
        ((right, count),) = (state.arrays for state in merged)
        return {"accuracy": float(right / count)}


def _examples(records: Sequence[bytes]) -> Examples:
    columns = parse_examples(records, {"image": (PIXELS,), "label": ()})
    images = np.ones((len(records), PIXELS + 1), np.float32)
    images[:, :PIXELS] = columns["image"] / 16
    return images, columns["label"].astype(np.int64)


def _logits(images: Floats, weights: Floats) -> Floats:
    return images @ weights


def _loss_and_gradient(examples: Examples, weights: Floats) -> tuple[float, Floats]:
    """Mean cross entropy, and its gradient [pixels + 1, classes]."""
    images, labels = examples
    logits = _logits(images, weights)
    logits -= logits.max(1, keepdims=True)
    chances = np.exp(logits)
    chances /= chances.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -float(np.log(np.maximum(chances[rows, labels], 1e-30)).mean())
    chances[rows, labels] -= 1
    return loss, np.asarray(images.T @ chances / np.float32(len(labels)), np.float32)
