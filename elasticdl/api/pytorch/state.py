"""Everything of a script that must be the same in all members, as arrays by name and back, without pickle.

Any object with `state_dict` and `load_state_dict` can be registered.  Tensors and arrays become arrays; the rest of a
state, numbers, words and the structure around them, becomes one JSON text, kept as an array of bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elasticdl.frameworks.torch.model import as_array
from elasticdl_client.errors import CheckpointError, ModelDefinitionError

_STRUCTURE = "structure"
_KIND = "kind"

Arrays = dict[str, npt.NDArray[Any]]


class RegisteredState:
    """The objects that a script has registered, by name, in order."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    def add(self, thing: Any, name: str = "") -> None:
        """Registers an object; once is enough.

        Args:
            name: empty: made of its type.

        Raises:
            ModelDefinitionError: it has no state that can be had and set, or the name is taken.
        """
        if any(known is thing for known in self._objects.values()):
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
        self._objects[unique] = plain(thing)

    @property
    def modules(self) -> list[torch.nn.Module]:
        return [thing for thing in self._objects.values() if isinstance(thing, torch.nn.Module)]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [thing for thing in self._objects.values() if isinstance(thing, torch.optim.Optimizer)]

    def state(self) -> Arrays:
        """Copies of everything.

        Raises:
            ModelDefinitionError: a state holds what cannot be written down.
        """
        arrays: Arrays = {}
        structure = {name: _encoded(thing.state_dict(), name, arrays) for name, thing in self._objects.items()}
        arrays[_STRUCTURE] = np.frombuffer(json.dumps(structure).encode(), np.uint8).copy()
        return arrays

    def load_state(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """The inverse of `state`.

        Raises:
            CheckpointError: the state is of other objects.
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
                    f"The state of {name} does not fit this script's {type(thing).__name__}: {error}",
                    "Build the same model and optimizer as the script that wrote it.",
                ) from error


def plain(thing: Any) -> Any:
    """A module without the wrapper of `torch.compile`."""
    return getattr(thing, "_orig_mod", thing)


def _kind_of(thing: Any) -> str:
    if isinstance(thing, torch.nn.Module):
        return "model"
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    return type(thing).__name__.lower()


def _encoded(value: Any, path: str, arrays: Arrays) -> Any:
    """A JSON value; arrays go where they belong."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor | np.ndarray):
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
    raise ModelDefinitionError(
        f"{path} is a {type(value).__name__}, which other members cannot be given.",
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
