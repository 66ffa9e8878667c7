"""Outputs of a model as arrays, and values of a trained model without its optimizer."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elasticdl.frameworks.torch.model import BuiltModule, as_array, plain_name
from elasticdl.frameworks.torch.samples import mapped
from elasticdl_client.errors import CheckpointError

_PREFIX = "model/"  # of names of values in a state; see `ModelState`
_HINT = "Use the module that the model was trained with, and its --model_params."


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
