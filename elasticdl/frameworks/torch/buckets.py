"""Gradients in flat buffers, each handed over during backward as soon as no more is added to it.

A parameter's gradient is a piece of a buffer, to which several backward passes add; the gradient of a single one is
copied there, a buffer at once.  Buffers are in reverse order of the parameters, about the order in which backward
reaches them, and are handed over in that order, whatever backward does: the members of a group must reduce the same
buffers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from elasticdl.frameworks.torch.computation import is_channels_last
from elasticdl.frameworks.torch.model import BuiltModule

_FIRST_BYTES = 1 << 20  # small, so that the reduction begins early
_BUCKET_BYTES = 25 << 20
_FLOAT_BYTES = 4

Ready = Callable[[int], None]


class Buckets:
    """The gradients of one model.

    Attributes:
        flats: float32 vectors on the model's device.
        used: For each parameter, by number: whether backward has reached it since `clear`.
    """

    def __init__(self, built: BuiltModule) -> None:
        self._parameters = list(built.parameters.values())
        self.flats: list[Any] = []
        self.used = [False] * len(self._parameters)
        self._views: list[Any] = [None] * len(self._parameters)
        self._bucket_of = [0] * len(self._parameters)
        self._members = _grouped(self._parameters)  # parameters of each bucket
        for members in self._members:
            self._add(members, built.device)
        self._pending: list[int] = []  # parameters of each bucket that the last backward has not reached yet
        self._reached: set[int] = set()  # by it
        self._next = 0  # the first bucket that has not been handed over
        self._ready: Ready | None = None
        self._is_single = False
        self._hooks: list[Any] = []
        self.heed_backward()

    def clear(self, is_single: bool = False) -> None:
        """Set all gradients to zero; backward adds to them.

        Args:
            is_single: There will be only one backward.  Its own gradient tensors are then used, and copied when a
                bucket is complete, with few kernels.
        """
        self.heed_backward()
        self._is_single = is_single
        self.used = [False] * len(self._parameters)
        for flat in () if is_single else self.flats:
            flat.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view if _fits(parameter) and not is_single else None
        self._next = 0
        self._ready = None

    def hand_over_during_backward(self, ready: Ready) -> None:
        """Pass each bucket to `ready` once it is complete; call this before the last backward."""
        self._pending = list(map(len, self._members))
        self._reached.clear()
        self._ready = ready

    def hand_over_rest(self, ready: Ready) -> None:
        """Pass the remaining buckets to `ready`; call this after backward."""
        self._ready = None
        while self._next < len(self.flats):
            self._hand_over(ready)

    def give(self, used: Sequence[bool]) -> None:
        """Set the `grad` of each parameter for the optimizer; None for a parameter that is not used."""
        for parameter, view, is_used in zip(self._parameters, self._views, used, strict=True):
            parameter.grad = None
            if is_used:
                parameter.grad = view if _fits(parameter) else view.to(parameter.dtype)

    def withhold(self, numbers: Collection[int]) -> None:
        """Take the gradients of these parameters away from the optimizer, which then leaves them alone."""
        for number in numbers:
            self._parameters[number].grad = None

    @property
    def order(self) -> list[int]:
        """The numbers of the parameters in the order of the buckets."""
        return [number for members in self._members for number in members]

    def runs(self, owner_of: Mapping[int, int]) -> list[tuple[int, int, int, int]]:
        """Return the longest ranges of buckets with one owner: (owner, bucket, start, end).

        Args:
            owner_of: The owner of each parameter, by number.
        """
        found: list[tuple[int, int, int, int]] = []
        for bucket, members in enumerate(self._members):
            end = 0
            for owner, run in groupby(members, owner_of.__getitem__):
                start, end = end, end + sum(self._parameters[number].numel() for number in run)
                found.append((owner, bucket, start, end))
        return found

    def put_parameters(self, numbers: Collection[int]) -> None:
        """Write the values of these parameters where their gradients lie."""
        with torch.no_grad():
            for number in numbers:
                self._views[number].copy_(self._parameters[number])

    def take_parameters(self, numbers: Collection[int]) -> None:
        """Do the inverse of `put_parameters`."""
        with torch.no_grad():
            for number in numbers:
                self._parameters[number].copy_(self._views[number])

    def heed_backward(self) -> None:
        """Register hooks that follow backward; this is the initial state."""
        if not self._hooks:
            for number, parameter in enumerate(self._parameters):
                hook = parameter.register_post_accumulate_grad_hook(lambda p, k=number: self._accumulated(k, p))
                self._hooks.append(hook)

    def ignore_backward(self) -> None:
        """Remove the hooks, so that backward sets the parameters' gradients as fast as without buckets."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def take_back(self) -> None:
        """Remove the gradients of all parameters; call this before and after the optimizer's step."""
        for parameter in self._parameters:
            parameter.grad = None

    def _add(self, members: list[int], device: Any) -> None:
        flat = torch.zeros(sum(self._parameters[k].numel() for k in members), device=device)
        position = 0
        for number in members:
            parameter = self._parameters[number]
            piece = flat[position : position + parameter.numel()]
            # With the strides of the parameter, or backward would transpose it.
            self._views[number] = (
                piece.as_strided(parameter.shape, parameter.stride())
                if is_channels_last(parameter)
                else piece.view(parameter.shape)
            )
            self._bucket_of[number] = len(self.flats)
            position += parameter.numel()
        self.flats.append(flat)

    def _accumulated(self, number: int, parameter: Any) -> None:
        """Take a parameter's gradient; called after backward has added to it."""
        view = self._views[number]
        if not self._is_single and parameter.grad is not view:
            found = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            view.add_(found)
            parameter.grad = view if _fits(parameter) else None
        self.used[number] = True
        if self._ready is not None:
            self._count(number, self._ready)

    def _count(self, number: int, ready: Ready) -> None:
        bucket = self._bucket_of[number]
        if bucket < self._next:
            raise RuntimeError(
                "a parameter's gradient was computed in several parts, the later ones after it was reduced: "
                "use torch.utils.checkpoint with use_reentrant=False, and no backward() in forward()"
            )
        if number in self._reached:
            return
        self._reached.add(number)
        self._pending[bucket] -= 1
        while self._next < len(self.flats) and self._pending[self._next] == 0:
            self._hand_over(ready)

    def _hand_over(self, ready: Ready) -> None:
        """Pass the next bucket, which is complete, to `ready`."""
        if self._is_single:
            self._copy_gradients(self._members[self._next])
        self._next += 1
        ready(self._next - 1)

    def _copy_gradients(self, members: Sequence[int]) -> None:
        targets, sources = [], []
        for number in members:
            parameter, view = self._parameters[number], self._views[number]
            if not self.used[number]:
                view.zero_()
            else:
                targets.append(view)
                sources.append(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
                parameter.grad = None
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)


def _grouped(parameters: Sequence[Any]) -> list[list[int]]:
    """Return the numbers of the parameters in each bucket, the last parameters first."""
    groups: list[list[int]] = []
    left = 0
    for number in reversed(range(len(parameters))):
        size = parameters[number].numel() * _FLOAT_BYTES
        if not groups or size > left:
            groups.append([])
            left = _BUCKET_BYTES if len(groups) > 1 else _FIRST_BYTES
        groups[-1].append(number)
        left -= size
    return groups


def _fits(parameter: Any) -> bool:
    """Return whether a view of a flat buffer can be the parameter's gradient."""
    return bool(parameter.dtype == torch.float32 and parameter.layout == torch.strided)
