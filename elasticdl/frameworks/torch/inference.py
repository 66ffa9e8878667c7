"""A trained model: its evaluation, its outputs as arrays, its values without the optimizer, and its export."""

from __future__ import annotations

import copy
import logging
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elasticdl.frameworks.framework import Batch, Floats, MetricState, Parameters
from elasticdl.frameworks.metrics import results_of
from elasticdl.frameworks.torch.metrics import CountingMeasure
from elasticdl.frameworks.torch.model import BuiltModule, ForwardArguments, as_array, plain_name
from elasticdl.frameworks.torch.samples import mapped
from elasticdl_client.errors import CheckpointError

Predict = Callable[[Batch, Parameters | None], Any]
_PREFIX = "model/"  # of names of values in a state; see `ModelState`
_HINT = "Use the module that the model was trained with, and its --model_params."
_log = logging.getLogger("elasticdl.torch")
STATE_FILE, PROGRAM_FILE, SCRIPT_FILE = "model.pt", "model.pt2", "model.torchscript.pt"
_MOST_SAMPLES = 2**31 - 1  # PyTorch 2.6 refuses an open end where a model stacks: the size might be the largest int64
_NUM_SAMPLES = 2  # a program made with one sample would be for one alone


class TorchEvaluation:
    """See `Evaluation`.  Several may be alive at once."""

    def __init__(self, measures: Sequence[CountingMeasure], predict: Predict, labels: Callable[[Batch], Any]) -> None:
        """
        Args:
            labels: of a minibatch, where the predictions are.
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
    """A structure of tensors as one of arrays."""
    return mapped(lambda part: as_array(part) if isinstance(part, torch.Tensor) else np.asarray(part), outputs)


def load_weights(path: str, built: BuiltModule, state: Mapping[str, npt.NDArray[Any]]) -> None:
    """See `Framework.load_weights`.

    Args:
        path: of the user's module, for messages.
    """
    given = {name.removeprefix(_PREFIX): value for name, value in state.items() if name.startswith(_PREFIX)}
    _take(path, built, {name: torch.from_numpy(np.array(value)) for name, value in given.items()}, "checkpoint")


def load_file(path: str, built: BuiltModule, file: str) -> None:
    """Takes the values of a file with a state_dict.

    Raises:
        CheckpointError: it is no such file, or of another model.
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
    shared = {plain_name(name) for name in built.plain.state_dict()}  # a tied value has several names
    wrong = sorted((set(given) - shared) | (set(model) - set(given))) or [
        name for name, value in model.items() if tuple(given[name].shape) != tuple(value.shape)
    ]
    if wrong:
        raise CheckpointError(f"The {what} is of another model than {path}: {', '.join(wrong)}.", _HINT)
    with torch.no_grad():
        for name, value in model.items():
            value.copy_(given[name])


def export_model(path: str, built: BuiltModule, features: Any) -> None:
    """Writes to a directory, which is made.

    Args:
        features: an example of a minibatch's, on any device; None: there is none.
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
    """Why it cannot be written; empty if it is."""
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
    few = part[:_NUM_SAMPLES]  # they are written, too
    return few if len(few) == _NUM_SAMPLES else few.repeat(_NUM_SAMPLES, *[1] * (few.dim() - 1))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
