"""Convert model and optimizer to named arrays, and back.

`model/NAME` is a parameter or buffer, `optimizer/NAME/SLOT` the optimizer's state of a parameter, and `group/K/SETTING`
a group's setting changed by the optimizer itself.  Slots are created at the first step (in Adagrad by the constructor),
so a state without slots belongs to an optimizer before its first step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elasticdl.frameworks.torch.model import BuiltModule, as_array
from elasticdl_client.errors import CheckpointError, ModelDefinitionError

_NUMBER = ".number"  # suffix of slots that are Python numbers, not tensors
_PIECE_BYTES = 16 << 20  # size of the pinned buffer for copies of the state
_ROOM = 1.25  # required free GPU memory for a copy of the state, in sizes of the copy
_SCHEDULED = frozenset({"params", "lr", "initial_lr", "momentum", "betas", "max_momentum", "base_momentum"})

Arrays = dict[str, npt.NDArray[Any]]


class ModuleState:
    """The state of one model and its optimizer."""

    def __init__(self, path: str, built: BuiltModule, optimizer: Any, is_sharded: bool = False) -> None:
        """
        Args:
            path: Path of the user's module, for messages.
            built: The model.
            optimizer: The optimizer.
            is_sharded: The optimizer keeps the state of only some parameters, initially of none; see `keep`.
        """
        self._path = path
        self._built = built
        self._optimizer = optimizer
        # Adagrad also creates slots for frozen parameters; they never change, and are not part of the state.
        self._names = {id(parameter): name for name, parameter in built.parameters.items()}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._held = {name for key, name in self._names.items() if key in held}  # by the optimizer
        self._kept: Collection[str] = frozenset() if is_sharded else self._held
        self._settings = [_settings(group) for group in optimizer.param_groups]
        self._is_eager = is_sharded and bool(optimizer.state)
        if is_sharded:
            self.keep(self._kept)

    def arrays(self) -> Arrays:
        """Return copies of all values.

        Raises:
            ModelDefinitionError: The optimizer's state contains something other than tensors and numbers.
        """
        return {name: as_array(value) for name, value in self._values().items()}

    def snapshot(self) -> Callable[[], Arrays]:
        """Copy all values on the device; if it has no space or is the CPU, copy them to main memory immediately.

        Returns:
            A function that returns `arrays`, or raises CheckpointError; it does not use the computing stream.

        Raises:
            ModelDefinitionError: See `arrays`.
        """
        values, device = self._values(), self._built.device
        if device.type != "cuda" or not _has_room(values, device):
            arrays = self.arrays()
            return lambda: arrays
        copies = {name: value.detach().clone() for name, value in values.items()}
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))

        def fetched() -> Arrays:
            try:
                pinned = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
                with torch.cuda.stream(stream):
                    return {name: _fetched(copies.pop(name), pinned, stream) for name in list(copies)}
            except RuntimeError as error:  # no memory to pin, or a fault of the device
                raise CheckpointError(
                    f"the state cannot be brought from {device}: {error}", "Give the worker more main memory."
                ) from error

        return fetched

    def _values(self) -> dict[str, Any]:
        """Return all tensors by name, without copying them."""
        found = self._shared_values()
        for parameter, slots in self._optimizer.state.items():
            if (name := self._names.get(id(parameter))) is not None:
                found.update(self._slot_values(name, slots))
        return found

    def _slot_values(self, parameter: str, slots: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for slot, value in slots.items():
            name = f"optimizer/{parameter}/{slot}"
            if isinstance(value, torch.Tensor):
                found[name] = value
            elif isinstance(value, bool | int | float):
                found[name + _NUMBER] = torch.from_numpy(np.array(value))
            elif value is not None:
                raise self._strange(slot, value)
        return found

    def _shared_values(self) -> dict[str, Any]:
        """Return all values except slots, without copying them."""
        found = {f"model/{name}": value for name, value in self._model().items()}
        for k, (group, initial) in enumerate(zip(self._optimizer.param_groups, self._settings, strict=True)):
            changed = {key: value for key, value in _settings(group).items() if value != initial.get(key)}
            found.update({f"group/{k}/{key}": torch.from_numpy(np.array(value)) for key, value in changed.items()})
        return found

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Load a state returned by `arrays`.

        Raises:
            CheckpointError: The state belongs to another model or optimizer.
        """
        slots = self._load_model(arrays)
        self._load_slots({name: slots[name] for name in slots if name in self._kept})
        self._load_settings(arrays)
        self._make_missing()

    # -- the optimizer's state in part

    def keep(self, names: Collection[str]) -> None:
        """Keep the slots of these parameters alone, now and whenever a state is loaded; drop others."""
        self._kept = frozenset(names)
        for parameter in list(self._optimizer.state):
            if self._names.get(id(parameter)) not in self._kept:
                del self._optimizer.state[parameter]
        self._make_missing()

    def shared_arrays(self) -> Arrays:
        """Return copies of everything but slots."""
        return {name: as_array(value) for name, value in self._shared_values().items()}

    def load_shared(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Do the inverse of `shared_arrays`; slots stay as they are."""
        self._load_model(arrays)
        self._load_settings(arrays)

    def slots_of(self, name: str) -> Arrays:
        """Return copies of the slots of one parameter."""
        slots = self._optimizer.state.get(self._built.parameters[name], {})
        return {key: as_array(value) for key, value in self._slot_values(name, slots).items()}

    def parameter(self, name: str) -> Arrays:
        """Return a copy of one parameter."""
        return {f"model/{name}": as_array(self._built.parameters[name])}

    def load_parts(self, parts: Iterable[tuple[str, npt.NDArray[Any]]]) -> None:
        """Load arrays returned by `slots_of` (ignored unless the slots are kept) and by `parameter`.

        Args:
            parts: Arrays of any parameters, by name.
        """
        arrays = dict(parts)
        with torch.no_grad():
            for name, value in arrays.items():
                if name.startswith("model/"):
                    self._built.parameters[name.removeprefix("model/")].copy_(_tensor(value))
        slots = {name: one for name, one in self._slots(arrays, []).items() if name in self._kept}
        if not slots:
            return
        others = dict(self._optimizer.state)
        self._load_slots(slots)
        for parameter, values in others.items():
            self._optimizer.state.setdefault(parameter, values)

    def slots_by_parameter(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Arrays]:
        """Return the slots among `arrays`, by the name of their parameter."""
        found: dict[str, Arrays] = {}
        for name, value in arrays.items():
            if name.startswith("optimizer/"):
                found.setdefault(name.removeprefix("optimizer/").rpartition("/")[0], {})[name] = value
        return found

    def slot_bytes(self) -> int:
        """Return how much memory the slots take."""
        slots = (value for slots in self._optimizer.state.values() for value in slots.values())
        return sum(value.nbytes for value in slots if isinstance(value, torch.Tensor))

    # -- inside

    def _load_model(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, dict[str, Any]]:
        """Load the values of the model; return the slots by parameter.

        Raises:
            CheckpointError: The state belongs to another model or optimizer.
        """
        model = self._model()
        given = {name.partition("/")[2]: value for name, value in arrays.items() if name.startswith("model/")}
        wrong = sorted(set(given) ^ set(model)) or [
            name for name, value in model.items() if tuple(given[name].shape) != tuple(value.shape)
        ]
        slots = self._slots(arrays, wrong)
        if wrong:
            raise CheckpointError(
                f"The checkpoint is of another model or optimizer than {self._path}: {', '.join(wrong)}.",
                "Use the module that the checkpoint was written with, or another --checkpoint_dir.",
            )
        with torch.no_grad():
            for name, value in model.items():
                value.copy_(_tensor(given[name]))
        return slots

    def _slots(self, arrays: Mapping[str, npt.NDArray[Any]], wrong: list[str]) -> dict[str, dict[str, Any]]:
        """Return the slots by parameter; add names that do not fit a parameter to `wrong`."""
        found: dict[str, dict[str, Any]] = {}
        for name, value in arrays.items():
            if not name.startswith("optimizer/"):
                continue
            parameter, _, slot = name.removeprefix("optimizer/").rpartition("/")
            if parameter not in self._held:
                wrong.append(name)
            elif slot.endswith(_NUMBER):
                found.setdefault(parameter, {})[slot.removesuffix(_NUMBER)] = value.item()
            else:
                found.setdefault(parameter, {})[slot] = _tensor(value)
        return found

    def _load_slots(self, slots: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the optimizer's state to these slots, by parameter."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        plain = self._optimizer.state_dict()
        numbers = [index for group in plain["param_groups"] for index in group["params"]]
        by_name = {self._names.get(id(p), ""): index for p, index in zip(parameters, numbers, strict=True)}
        state = {by_name[name]: values for name, values in slots.items()}
        self._optimizer.load_state_dict({"state": state, "param_groups": plain["param_groups"]})

    def _make_missing(self) -> None:
        """Make the first slots of parameters that lack them, if the optimizer makes slots when it is constructed."""
        if not self._is_eager:
            return
        kind, state = type(self._optimizer), self._optimizer.state
        for group in self._optimizer.param_groups:
            options = {name: group[name] for name in inspect.signature(kind).parameters if name in group}
            lacking = [p for p in group["params"] if self._names.get(id(p)) in self._kept and p not in state]
            if lacking:
                made = kind(**{**options, "params": lacking}).state
                state.update({parameter: made[parameter] for parameter in lacking})

    def _load_settings(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        for k, (group, initial) in enumerate(zip(self._optimizer.param_groups, self._settings, strict=True)):
            for key, value in initial.items():
                group[key] = arrays[f"group/{k}/{key}"].item() if f"group/{k}/{key}" in arrays else value

    def _model(self) -> dict[str, Any]:
        buffers = {buffer.name: buffer.tensor for buffer in self._built.buffers}
        return {**self._built.parameters, **self._built.frozen, **buffers}

    def _strange(self, slot: str, value: Any) -> ModelDefinitionError:
        return ModelDefinitionError(
            f"{self._path}: {type(self._optimizer).__name__} keeps {slot!r} as a {type(value).__name__}, "
            "which cannot be written to a checkpoint.",
            "Take an optimizer whose state is tensors and numbers.",
        )


def _fetched(tensor: Any, pinned: Any, stream: Any) -> npt.NDArray[Any]:
    """Return `as_array` of a tensor, copied through pinned memory: otherwise kernel launches of other threads wait.

    Args:
        tensor: The tensor.
        pinned: Pinned buffer of bytes, used for one piece after another.
        stream: The current stream.
    """
    if not tensor.is_cuda:
        return as_array(tensor)
    plain = tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor
    result = torch.empty(plain.shape, dtype=plain.dtype)
    source, target = (one.contiguous().reshape(-1).view(torch.uint8) for one in (plain, result))
    for start in range(0, target.numel(), pinned.numel()):
        piece = target[start : start + pinned.numel()]
        passed = pinned[: piece.numel()]
        passed.copy_(source[start : start + piece.numel()], non_blocking=True)
        stream.synchronize()
        piece.copy_(passed)
    found: npt.NDArray[Any] = result.numpy()
    return found


def _has_room(values: Mapping[str, Any], device: Any) -> bool:
    """Return whether the driver has free memory for a copy, without PyTorch's reserve: the next step may need that."""
    size = sum(value.nbytes for value in values.values() if value.is_cuda)
    free, _ = torch.cuda.mem_get_info(device)
    return bool(free > _ROOM * size)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numeric settings of a group that are not changed by schedules."""
    return {
        key: value for key, value in group.items() if isinstance(value, bool | int | float) and key not in _SCHEDULED
    }


def _tensor(array: npt.NDArray[Any]) -> Any:
    return torch.from_numpy(np.array(array))
