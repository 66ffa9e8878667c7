"""Use a trained model: evaluate it with the user's metrics, convert its outputs, load its values, and export it.

The states of metrics are float64 arrays, which can be merged.  A metric is updated with one minibatch at a time; it
does not depend on tasks or models.
"""

from __future__ import annotations

import copy
import logging
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from elasticdl.frameworks.framework import Batch, Floats, MetricState, Parameters
from elasticdl.frameworks.metrics import Array, Measure, State, results_of, select
from elasticdl.frameworks.torch.losses import in_order
from elasticdl.frameworks.torch.model import BuiltModule, ForwardArguments, as_array, plain_name
from elasticdl.frameworks.torch.samples import leaves, mapped, moved
from elasticdl_client.errors import CheckpointError, ModelDefinitionError

Predict = Callable[[Batch, Parameters | None], Any]
_PREFIX = "model/"  # prefix of the model's values in a state; see `ModelState`
_HINT = "Use the module that the model was trained with, and its --model_params."
_log = logging.getLogger("elasticdl.torch")
STATE_FILE, PROGRAM_FILE, SCRIPT_FILE = "model.pt", "model.pt2", "model.torchscript.pt"
_MOST_SAMPLES = 2**31 - 1  # PyTorch 2.6 refuses an unlimited size if a model stacks: it could be the largest int64
_NUM_SAMPLES = 2  # a program traced with one sample would accept only one


class TorchEvaluation:
    """See `Evaluation`.  There may be several at a time."""

    def __init__(self, measures: Sequence[CountingMeasure], predict: Predict, labels: Callable[[Batch], Any]) -> None:
        """
        Args:
            measures: The user's metrics; they are copied.
            predict: Returns the predictions for a minibatch.
            labels: Returns the labels of a minibatch, on the device of the predictions.
        """
        self._pristine = measures
        self._measures = [measure.fresh() for measure in measures]
        self._predict = predict
        self._labels = labels

    def update(self, batch: Batch, parameters: Parameters | None, rows: Mapping[str, Floats]) -> None:
        predictions = self._predict(batch, parameters)
        labels = self._labels(batch)
        for pristine, measure in zip(self._pristine, self._measures, strict=True):
            pristine.check(labels, predictions)
            measure.update(labels, predictions)

    def states(self) -> list[MetricState]:
        return [MetricState(measure.name, measure.state(), measure.additive) for measure in self._measures]

    def results(self, merged: Sequence[MetricState]) -> dict[str, float]:
        return results_of(self._measures, merged)


def arrays_of(outputs: Any) -> Any:
    """Convert a structure of tensors to one of arrays."""
    return mapped(lambda part: as_array(part) if isinstance(part, torch.Tensor) else np.asarray(part), outputs)


def load_weights(path: str, built: BuiltModule, state: Mapping[str, npt.NDArray[Any]]) -> None:
    """See `Framework.load_weights`.

    Args:
        path: Path of the user's module, for messages.
        built: The model.
        state: The state to load.
    """
    given = {name.removeprefix(_PREFIX): value for name, value in state.items() if name.startswith(_PREFIX)}
    _take(path, built, {name: torch.from_numpy(np.array(value)) for name, value in given.items()}, "checkpoint")


def load_file(path: str, built: BuiltModule, file: str) -> None:
    """Load the values of a file with a state_dict.

    Raises:
        CheckpointError: The file is not a state_dict, or belongs to another model.
    """
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{file} cannot be loaded: {reason}", "Write it with torch.save(model.state_dict(), …)."
        ) from error
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise CheckpointError(f"{file} holds no state_dict.", "Write it with torch.save(model.state_dict(), …).")
    _take(path, built, {plain_name(name): value for name, value in found.items()}, f"state_dict in {file}")


def _take(path: str, built: BuiltModule, given: Mapping[str, Any], what: str) -> None:
    buffers = {buffer.name: buffer.tensor for buffer in built.buffers}
    model = {**built.parameters, **built.frozen, **buffers}
    shared = {plain_name(name) for name in built.plain.state_dict()}  # a shared value has several names
    wrong = sorted((set(given) - shared) | (set(model) - set(given))) or [
        name for name, value in model.items() if tuple(given[name].shape) != tuple(value.shape)
    ]
    if wrong:
        raise CheckpointError(f"The {what} is of another model than {path}: {', '.join(wrong)}.", _HINT)
    with torch.no_grad():
        for name, value in model.items():
            value.copy_(given[name])


def export_model(path: str, built: BuiltModule, features: Any) -> None:
    """Export a model to a new directory.

    Args:
        path: Path of the directory.
        built: The model.
        features: Features of a minibatch, on any device, as an example; None: there is no example.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    module = copy.deepcopy(built.plain).cpu().eval()
    torch.save(module.state_dict(), directory / STATE_FILE)
    reason = "no minibatch has been seen here" if features is None else _write_program(directory, module, features)
    if not reason:
        return
    _log.info("torch.export cannot export the model: %s", reason)
    reason = _write_script(directory, module)
    if reason:
        _log.warning("Only the model's values are exported: torch.jit.script cannot compile it either: %s", reason)


def _write_program(directory: Path, module: Any, features: Any) -> str:
    """Write the exported program; return the reason if this is impossible, else an empty text."""
    batch = torch.export.Dim("batch", min=1, max=_MOST_SAMPLES)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args, kwargs = mapped(lambda part: _two_of(part.detach().cpu()), ForwardArguments(module).of(features))
            dynamic: Any = mapped(lambda part: {0: batch}, kwargs or args)
            program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic)
            torch.export.save(program, directory / PROGRAM_FILE)
    except Exception as error:  # noqa: BLE001  whatever it says of the user's model
        (directory / PROGRAM_FILE).unlink(missing_ok=True)
        return _first_line(error)
    return ""


def _write_script(directory: Path, module: Any) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.script(module).save(str(directory / SCRIPT_FILE))
    except Exception as error:  # noqa: BLE001  whatever it says of the user's model
        return _first_line(error)
    return ""


def _two_of(part: Any) -> Any:
    few = part[:_NUM_SAMPLES]  # the export contains them
    return few if len(few) == _NUM_SAMPLES else few.repeat(_NUM_SAMPLES, *[1] * (few.dim() - 1))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


class CountingMeasure(Measure, Protocol):
    """One metric over some minibatches."""

    def fresh(self) -> CountingMeasure:
        """Return a copy of the metric in its initial state."""
        ...

    def check(self, labels: Any, predictions: Any) -> None:
        """Check once, with a minibatch, that states can be merged by addition; the metric's own state is unchanged.

        Raises:
            ModelDefinitionError: They cannot, and the metric has no `merge_state`.
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
        """Do nothing: a sum and a count can always be added."""

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
        self._device: Any = None  # of its inputs

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
        """Move the metric to a device, if possible; return the device that its inputs must be on."""
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
            metric.persistent(True)  # torchmetrics: include the states in state_dict()
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
    """Convert a part of a state to the type that the metric uses."""
    if isinstance(known, torch.Tensor):
        return (
            torch.as_tensor(value).to(known.dtype).reshape(known.shape if known.numel() == value.size else value.shape)
        )
    return np.array(value, np.asarray(known).dtype) if isinstance(known, np.ndarray) else type(known)(value)
