"""The user's metrics: the state of each as float64 arrays, and the result of merged states.

It knows how to advance by one minibatch and nothing of tasks or models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from elasticdl.frameworks.metrics import Array, Measure, State, select
from elasticdl.frameworks.torch.losses import in_order
from elasticdl.frameworks.torch.samples import leaves, moved
from elasticdl_client.errors import ModelDefinitionError


class CountingMeasure(Measure, Protocol):
    """One metric over some minibatches."""

    def fresh(self) -> CountingMeasure:
        """The same metric before any minibatch."""
        ...

    def check(self, labels: Any, predictions: Any) -> None:
        """Looks once, at a minibatch, whether states may be added; the metric's own state stays as it is.

        Raises:
            ModelDefinitionError: they may not, and the metric has no `merge_state`.
        """
        ...

    def update(self, labels: Any, predictions: Any) -> None: ...

    def state(self) -> State: ...


class TorchFunctionMeasure:
    """A function f(labels, predictions): the mean of its values over samples."""

    additive = True

    def __init__(
        self, name: str, function: Callable[[Any, Any], Any], output: str | None, maximize: bool | None = None
    ) -> None:
        self.name = name
        self.maximize = maximize
        self._function = function
        self._output = output
        self._total = 0.0
        self._count = 0

    def fresh(self) -> TorchFunctionMeasure:
        return TorchFunctionMeasure(self.name, self._function, self._output, self.maximize)

    def check(self, labels: Any, predictions: Any) -> None:
        """A sum and a count may always be added."""

    def update(self, labels: Any, predictions: Any) -> None:
        labels, predictions = select(labels, predictions, self._output)
        value = torch.as_tensor(in_order(self._function)(labels, predictions)).detach().to(torch.float64)
        if value.dim() == 0:
            samples = int(leaves(predictions)[0].shape[0])
            self._total += float(value) * samples
        else:
            samples = int(value.shape[0])
            self._total += float(value.reshape(samples, -1).mean(1).sum())
        self._count += samples

    def state(self) -> State:
        return (np.array(self._total, np.float64), np.array(self._count, np.float64))

    def results(self, states: Sequence[State]) -> Any:
        total, count = states[0]
        return total / count if count else np.float64(0)


class ObjectMeasure:
    """An object with `update(labels, predictions)`, `compute()`, `state_dict()` and `load_state_dict(state)`.

    The states of tasks are added up, unless it defines `merge_state(states)`, which is given those of all tasks.
    An object with `to(device)` goes where the predictions are; any other one gets them where its tensors are.
    """

    maximize: bool | None = None

    def __init__(self, name: str, pristine: Any, output: str | None) -> None:
        self.name = name
        self.additive = not callable(getattr(pristine, "merge_state", None))
        self._pristine = pristine
        self._metric = copy.deepcopy(pristine)
        self._output = output
        self._checked = False
        self._device: Any = None  # of the tensors it is updated with

    def fresh(self) -> ObjectMeasure:
        return ObjectMeasure(self.name, self._pristine, self._output)

    def check(self, labels: Any, predictions: Any) -> None:
        if self._checked or not self.additive:
            return
        once, twice = self.fresh(), self.fresh()
        for measure in (once, twice, twice):
            measure.update(labels, predictions)
        if not _is_double(once.state(), twice.state()):
            raise ModelDefinitionError(
                f"The state of metric {self.name!r} ({type(self._pristine).__name__}) of several tasks cannot be "
                "added: the state of A and A is not twice the state of A.",
                "Let it hold sums over samples that start at zero, or define merge_state(states), which is given the "
                "states of all tasks and sets its own.",
            )
        self._checked = True

    def update(self, labels: Any, predictions: Any) -> None:
        selected = select(labels, predictions, self._output)
        if self._device is None:
            self._device = self._placed(leaves(selected[1])[0].device)
        in_order(self._metric.update)(*moved(selected, self._device))

    def _placed(self, device: Any) -> Any:
        """Moves the object, if it can be moved; the device that its inputs must be on."""
        if callable(getattr(self._metric, "to", None)):
            found = self._metric.to(device)
            self._metric = self._metric if found is None else found
            return device
        tensors = [value for value in self._metric.state_dict().values() if isinstance(value, torch.Tensor)]
        return tensors[0].device if tensors else device

    def state(self) -> State:
        values = self._metric.state_dict().values()
        return tuple(
            np.array(v.detach().cpu().numpy() if isinstance(v, torch.Tensor) else v, np.float64) for v in values
        )

    def results(self, states: Sequence[State]) -> Any:
        metric = copy.deepcopy(self._pristine)
        known = metric.state_dict()
        loadable = [
            {name: _like(known[name], value) for name, value in zip(known, state, strict=True)} for state in states
        ]
        if self.additive:
            metric.load_state_dict(loadable[0])
        else:
            metric.merge_state(loadable)
        return _plain(metric.compute())


def make_measure(path: str, name: str, metric: Any, output: str | None) -> CountingMeasure:
    verbs = ("update", "compute", "state_dict", "load_state_dict")
    if callable(getattr(metric, "update", None)):
        missing = [verb for verb in verbs if not callable(getattr(metric, verb, None))]
        if not missing and not metric.state_dict() and callable(getattr(metric, "persistent", None)):
            metric.persistent(True)  # metrics of torchmetrics keep their states out of state_dict() until asked
        if missing or not metric.state_dict():
            reason = f"has no {', '.join(missing)}" if missing else "has an empty state_dict()"
            raise ModelDefinitionError(
                f"{path}: eval_metrics_fn(): the metric {name!r} ({type(metric).__name__}) {reason}.",
                f"Such a metric has {', '.join(verbs)}; its state is numbers that can be added over samples.",
            )
        return ObjectMeasure(name, metric, output)
    if callable(metric):
        return TorchFunctionMeasure(name, metric, output)
    raise ModelDefinitionError(
        f"{path}: eval_metrics_fn() gives {name!r} a {type(metric).__name__}.",
        "Give it a function f(labels, predictions), or an object with update, compute, state_dict, load_state_dict; "
        "names of metrics are taken for Keras models alone.",
    )


def _is_double(once: State, twice: State) -> bool:
    return [a.shape for a in once] == [b.shape for b in twice] and all(
        np.allclose(2 * a, b, rtol=1e-4, atol=1e-5, equal_nan=True) for a, b in zip(once, twice, strict=True)
    )


def _plain(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def _like(known: Any, value: Array) -> Any:
    """A part of a state in the type that the metric keeps it in."""
    if isinstance(known, torch.Tensor):
        return (
            torch.as_tensor(value).to(known.dtype).reshape(known.shape if known.numel() == value.size else value.shape)
        )
    return np.array(value, np.asarray(known).dtype) if isinstance(known, np.ndarray) else type(known)(value)
