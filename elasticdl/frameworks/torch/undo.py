"""Copy the tensors that a step changes, to revert it: a module's buffers, its parameters, and the optimizer's state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from elasticdl.frameworks.torch.model import BuiltModule

_MOST_OF_MEMORY = 1 / 16  # maximum fraction of the device's memory for copies


class TensorCopies:
    """Copies of tensors; repeated copies of the same tensors take few kernels.

    Attributes:
        values: the copies.
    """

    def __init__(self, most_bytes: float = math.inf) -> None:
        """
        Args:
            most_bytes: of all copies together.
        """
        self.values: list[Any] = []
        self._most_bytes = most_bytes
        self._tensors: list[Any] = []
        self._sizes: list[int] = []
        self._pairs: list[tuple[list[Any], list[Any]]] = []

    def take(self, tensors: list[Any]) -> bool:
        """Copy them.

        Returns:
            False: they are too large for it.
        """
        if self.are_of(tensors):
            with torch.no_grad():
                for copies, originals in self._pairs:
                    torch._foreach_copy_(copies, originals)
            return True
        if sum(map(_num_bytes, tensors)) > self._most_bytes:
            return False
        self.values = [one.detach().clone() for one in tensors]
        self._tensors, self._sizes = tensors, [one.numel() for one in tensors]
        self._pairs = by_type(self.values, tensors)
        return True

    def are_of(self, tensors: Sequence[Any]) -> bool:
        """Whether these are the tensors that were copied."""
        is_same = len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
        return is_same and [one.numel() for one in tensors] == self._sizes

    def restore(self) -> None:
        """Copy the values back."""
        with torch.no_grad():
            for copies, originals in self._pairs:
                torch._foreach_copy_(originals, copies)


class StartValues:
    """The values of a module's buffers before a forward pass, and the changes by the pass.

    Attributes:
        num_values: Total number of values in the buffers.
    """

    def __init__(self, built: BuiltModule) -> None:
        self._places = built.buffers
        self._device = built.device
        self._starts = TensorCopies()
        self._masks = masks_among(self.now())
        self._sizes = [place.tensor.numel() for place in built.buffers]
        self.num_values = sum(self._sizes)

    def now(self) -> list[Any]:
        """Return the current buffers."""
        return [place.tensor for place in self._places]

    def take(self) -> None:
        """Copy the buffers."""
        self._starts.take(self.now())

    def restore(self) -> None:
        """Revert the changes of a forward pass; call this after backward, which may need the changed values."""
        if self._starts.are_of(self.now()):
            self._starts.restore()
            return
        with torch.no_grad():
            for place, start in zip(self._places, self._starts.values, strict=True):
                place.put(start)

    def change(self) -> Any:
        """Return what a forward pass has added to the buffers, as one vector."""
        if not self._places:
            return torch.zeros(0, device=self._device)
        return change_of(self.now(), self._starts.values, bool(self._masks))

    def changed(self) -> list[Any]:
        """Return tensors that are finite if what a forward pass has changed is: buffers, and of masks what is new."""
        now = self.now()
        if not self._masks:
            return now
        masks, starts = ([side[k] for k in self._masks] for side in (now, self._starts.values))
        with torch.no_grad():
            after = torch.cat([one.reshape(-1).to(torch.float32) for one in masks])
            new = torch.where(change_of(masks, starts, True) == 0, 0.0, after)
        return [*(one for k, one in enumerate(now) if k not in self._masks), new]

    def add(self, changes: Any) -> None:
        """Add a vector returned by `change` to the buffers; round it for integer buffers."""
        tensors = self.now()
        if not tensors:
            return
        with torch.no_grad():
            whole = changes.round().to(torch.int64)
            pieces = zip(changes.split(self._sizes), whole.split(self._sizes), tensors, strict=True)
            shaped = [(a if t.is_floating_point() else b).reshape(t.shape).to(t.dtype) for a, b, t in pieces]
            for targets, added in by_type(tensors, shaped):
                torch._foreach_add_(targets, added)


def masks_among(buffers: Sequence[Any]) -> list[int]:
    """Return the numbers of the buffers that hold an infinity or a NaN as float32, as masks of attention do."""
    return [k for k, one in enumerate(buffers) if not one.to(torch.float32).isfinite().all()]


def change_of(now: Sequence[Any], before: Sequence[Any], has_masks: bool) -> Any:
    """Return the change of buffers as one float32 vector.

    Args:
        now: The current values.
        before: The earlier values.
        has_masks: The buffers may contain values that are not finite; the change of an unchanged one is zero.
    """
    with torch.no_grad():
        zero = torch.zeros((), device=now[0].device)
        pairs = [_floats(one, start, zero) for one, start in zip(now, before, strict=True)]
        after, start = (torch.cat(side) for side in zip(*pairs, strict=True))
        change = after - start
        if not has_masks:
            return change
        return torch.where(after.view(torch.int32) == start.view(torch.int32), 0.0, change)


def _floats(now: Any, before: Any, zero: Any) -> tuple[Any, Any]:
    """Return a buffer and its start as float32 vectors; of integers their difference and zeros.

    A count of 2**24 and the next one are the same number in float32.
    """
    after, start = now.reshape(-1), before.reshape(-1)
    if now.is_floating_point() or now.is_complex():
        return after.to(torch.float32), start.to(torch.float32)
    change = after.to(torch.int64) - start.to(torch.int64)
    return change.to(torch.float32), zero.expand(change.shape)


class UpdateUndo:
    """What an optimizer changes, for models that are small beside the memory of their device."""

    def __init__(self, parameters: Sequence[Any], optimizer: Any, device: Any) -> None:
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._copies = TensorCopies(_memory(device) * _MOST_OF_MEMORY)
        self._states: dict[Any, dict[Any, Any]] = {}
        self._groups: list[dict[str, Any]] = []

    def take(self) -> bool:
        """Copy the parameters and the optimizer's state, including group settings: some optimizers count steps there.

        Returns:
            False: They are too large to copy.
        """
        self._states = {key: dict(state) for key, state in self._optimizer.state.items()}
        self._groups = [dict(group) for group in self._optimizer.param_groups]
        kept = [value for one in (*self._states.values(), *self._groups) for value in one.values()]
        tensors = [*self._parameters, *(value for value in kept if isinstance(value, torch.Tensor))]
        try:
            return self._copies.take(tensors)
        except torch.OutOfMemoryError:  # the steps themselves use all memory
            self._copies = TensorCopies(0.0)
            return False

    def restore(self) -> None:
        """Revert all updates since `take`, which must have returned True."""
        self._copies.restore()
        states = self._optimizer.state
        for key in [key for key in states if key not in self._states]:
            del states[key]
        for key, state in self._states.items():
            _put(state, states[key])
        for before, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            _put(before, group)


def _put(before: dict[Any, Any], present: dict[Any, Any]) -> None:
    present.clear()
    present.update(before)


def by_type(targets: Sequence[Any], others: Sequence[Any]) -> list[tuple[list[Any], list[Any]]]:
    """Return pairs of lists of one data type on one device, which one kernel can work off."""
    groups: dict[Any, tuple[list[Any], list[Any]]] = {}
    for target, other in zip(targets, others, strict=True):
        first, second = groups.setdefault((target.dtype, target.device), ([], []))
        first.append(target)
        second.append(other)
    return list(groups.values())


def _num_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _memory(device: Any) -> float:
    """In bytes; that of the processor is not counted."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else float("inf")
