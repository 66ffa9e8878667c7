"""Convert the state that must be equal in all members to named arrays, and back, without pickle.

Any object with `state_dict` and `load_state_dict` can be registered.  Tensors and arrays become arrays; numbers,
strings and the structure around them become one JSON text, stored as an array of bytes.  For a module with frozen
parameters the trainable part can be enough: a fingerprint shows that all members have the same frozen parameters.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elasticdl.frameworks.torch.model import as_array
from elasticdl_client.errors import CheckpointError, ModelDefinitionError

_STRUCTURE = "structure"
_KIND = "kind"
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_MAX_NAMED = 4

Arrays = dict[str, npt.NDArray[Any]]


class TrainablePart:
    """The state of a module without its frozen parameters, which every member has loaded for itself.

    A parameter counts as frozen if it is frozen at the first use: a joining worker has not run the code yet in which
    others may have frozen more parameters.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers, the trainable parameters, and a fingerprint of the frozen ones."""
        return {"values": self._trained(), "frozen": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state returned by `state_dict`.

        Raises:
            ValueError: The state belongs to another module, or to one with other frozen parameters.
        """
        expected = set(self._trained())
        if expected != set(state["values"]):
            differing = ", ".join(sorted(expected ^ set(state["values"]))[:_MAX_NAMED])
            raise ValueError(f"other parameters are trained here, among them {differing}")
        if state["frozen"] != self._fingerprint:
            raise ValueError(
                "its frozen parameters are not those of the process that wrote the state: load the same pretrained "
                "weights in every worker, or make them with the same seed"
            )
        self.module.load_state_dict(state["values"], strict=False)

    def _values(self) -> dict[str, Any]:
        return dict(self.module.state_dict(keep_vars=True))

    def _trained(self) -> dict[str, Any]:
        return {name: value for name, value in self._values().items() if name not in self._frozen}

    @cached_property
    def _frozen(self) -> frozenset[str]:
        return frozenset(name for name, value in self._values().items() if _is_frozen(value))

    @cached_property
    def _fingerprint(self) -> str:
        """A digest of names, shapes and sums of the bits as integers; it is equal on every device."""
        found = hashlib.blake2b(digest_size=8)
        for name, value in self._values().items():
            if name in self._frozen:
                bits = value.detach().contiguous().view(_WHOLE.get(value.element_size(), torch.int64))
                found.update(f"{name} {tuple(value.shape)} {int(bits.sum(dtype=torch.int64))} ".encode())
        return found.hexdigest()


class RegisteredState:
    """The objects registered by a script, by name, in order."""

    def __init__(self, trainable_only: bool = False) -> None:
        """
        Args:
            trainable_only: Leave out frozen parameters of modules, see `TrainablePart`.
        """
        self._objects: dict[str, Any] = {}
        self._trainable_only = trainable_only

    def add(self, thing: Any, name: str = "") -> None:
        """Register an object; do nothing if it is already registered.

        Args:
            thing: An object with `state_dict` and `load_state_dict`.
            name: Empty: named after its type.

        Raises:
            ModelDefinitionError: The object lacks one of these methods, or the name is taken.
        """
        if any(_registered(known) is plain(thing) for known in self._objects.values()):
            return
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise ModelDefinitionError(
                    f"a {type(thing).__name__} cannot be registered: it has no {method}().",
                    "Give what has state_dict() and load_state_dict(state), as modules and optimizers do.",
                )
        kind = name or _kind_of(thing)
        unique = kind
        while not name and unique in self._objects:
            unique = f"{kind}{1 + int(unique.removeprefix(kind) or 0)}"
        if unique in self._objects:
            raise ModelDefinitionError(f"two objects are registered as {name!r}.", "Give each a name of its own.")
        is_part = self._trainable_only and isinstance(thing, torch.nn.Module)
        self._objects[unique] = TrainablePart(plain(thing)) if is_part else plain(thing)

    @property
    def modules(self) -> list[torch.nn.Module]:
        registered = map(_registered, self._objects.values())
        return [thing for thing in registered if isinstance(thing, torch.nn.Module)]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [thing for thing in self._objects.values() if isinstance(thing, torch.optim.Optimizer)]

    @property
    def plateau_schedulers(self) -> list[torch.optim.lr_scheduler.ReduceLROnPlateau]:
        """The registered ReduceLROnPlateau schedulers, including those in a wrapper of Accelerate."""
        kind = torch.optim.lr_scheduler.ReduceLROnPlateau
        found = (one if isinstance(one, kind) else getattr(one, "scheduler", None) for one in self._objects.values())
        return [one for one in found if isinstance(one, kind)]

    @property
    def names(self) -> list[str]:
        return list(self._objects)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer is registered, or is an attribute of a registered object of the script."""
        wrapped = (getattr(one, "optimizer", None) for one in self.optimizers)  # in a wrapper of Accelerate
        of_script = (value for thing in self._of_script for value in getattr(thing, "__dict__", {}).values())
        return any(one is optimizer for one in (*self.optimizers, *wrapped, *of_script))

    def may_hold(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the state of an optimizer may be registered: itself, or in a class of the script."""
        if self.holds(optimizer) or self._of_script:
            return True
        told = {id(tensor) for one in self.optimizers for tensor in _tensors(one.state_dict())}  # by any wrapper's
        return any(id(tensor) in told for tensor in _tensors(optimizer.state))

    @property
    def _of_script(self) -> list[Any]:
        """The registered objects of the script's own classes."""
        return [thing for thing in map(_registered, self._objects.values()) if _is_of_script(thing)]

    def may_hold_schedule(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a scheduler of an optimizer may be registered: itself, or in a class of the script."""
        for thing in map(_registered, self._objects.values()):
            scheduler = getattr(thing, "scheduler", thing)  # in a wrapper of Accelerate
            if getattr(scheduler, "optimizer", None) is optimizer or _is_of_script(thing):
                return True
        return False

    def may_hold_scaler(self, scaler: torch.amp.GradScaler) -> bool:
        """Return whether a scaler may be registered: itself, or in a class of the script."""
        return any(thing is scaler or _is_of_script(thing) for thing in map(_registered, self._objects.values()))

    def state(self) -> Arrays:
        """Return copies of all states as arrays by name.

        Raises:
            ModelDefinitionError: A state contains a value of an unsupported type.
        """
        arrays: Arrays = {}
        structure = {name: _encoded(thing.state_dict(), name, arrays) for name, thing in self._objects.items()}
        arrays[_STRUCTURE] = np.frombuffer(json.dumps(structure).encode(), np.uint8).copy()
        return arrays

    def copies(self) -> dict[str, Any]:
        """Return copies of all states, unconverted and on their devices, for `put_back`."""
        return {name: copy.deepcopy(thing.state_dict()) for name, thing in self._objects.items()}

    def put_back(self, copies: Mapping[str, Any]) -> None:
        for name, thing in self._objects.items():
            thing.load_state_dict(copies[name])

    def load_state(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Load a state returned by `state`.

        Raises:
            CheckpointError: The state belongs to other objects.
        """
        structure = json.loads(arrays[_STRUCTURE].tobytes()) if _STRUCTURE in arrays else {}
        if set(structure) != set(self._objects):
            raise CheckpointError(
                f"The state is one of {', '.join(structure) or 'nothing'}; this script has registered "
                f"{', '.join(self._objects) or 'nothing'}.",
                "Register the same objects as the script that wrote it, or take another checkpoint directory.",
            )
        for name, thing in self._objects.items():
            try:
                thing.load_state_dict(_decoded(structure[name], arrays))
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"The state of {name} does not fit this script's {type(_registered(thing)).__name__}: {error}",
                    "Build the same model and optimizer as the script that wrote it.",
                ) from error


def plain(thing: Any) -> Any:
    """Return an object without the wrapper of `torch.compile`."""
    return getattr(thing, "_orig_mod", thing)


def _registered(known: Any) -> Any:
    """Return the object that the script has registered."""
    return known.module if isinstance(known, TrainablePart) else known


def _is_of_script(thing: Any) -> bool:
    known = torch.nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler
    return not isinstance(thing, known) and not type(thing).__module__.startswith("elasticdl.")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a state, without copying them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _is_frozen(value: torch.Tensor) -> bool:
    return isinstance(value, torch.nn.Parameter) and not value.requires_grad


def _kind_of(thing: Any) -> str:
    if isinstance(thing, torch.nn.Module):
        return "model"
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    return type(thing).__name__.lower()


def _encoded(value: Any, path: str, arrays: Arrays) -> Any:
    """Return a value for JSON; add the arrays in it to `arrays`, by their path."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        while path in arrays:  # keys with equal text, such as 1 and "1"
            path += "'"
        arrays[path] = as_array(value) if isinstance(value, torch.Tensor) else value.copy()
        dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""
        return {_KIND: "array", "path": path, "dtype": dtype}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "mapping"
        items = [[_encoded(key, path, arrays), _encoded(item, f"{path}/{key}", arrays)] for key, item in value.items()]
        return {_KIND: kind, "items": items}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_encoded(item, f"{path}/{k}", arrays) for k, item in enumerate(_ordered(value))]
        return items if type(value) is list else {_KIND: type(value).__name__, "items": items}
    of_objects = " of objects" if isinstance(value, np.ndarray) else ""
    raise ModelDefinitionError(
        f"{path} is a {type(value).__name__}{of_objects}, which other members cannot be given.",
        "Let state_dict() return tensors, arrays, numbers, words, and lists and dictionaries of them.",
    )


def _decoded(value: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if value[_KIND] == "array":
        array = np.array(arrays[value["path"]])
        return torch.from_numpy(array).to(getattr(torch, value["dtype"])) if value["dtype"] else array
    if value[_KIND] in ("mapping", "counter"):
        found = {_decoded(key, arrays): _decoded(item, arrays) for key, item in value["items"]}
        return Counter(found) if value[_KIND] == "counter" else found
    items = [_decoded(item, arrays) for item in value["items"]]
    kinds: dict[str, Any] = {"set": set, "frozenset": frozenset}
    return kinds.get(value[_KIND], tuple)(items)


def _ordered(values: Any) -> list[Any]:
    return sorted(values, key=repr) if isinstance(values, set | frozenset) else list(values)
