"""A member's part of a synchronous step: gradients at the module's parameters, and their update afterwards.

The last buffer holds, one after the other: how many shares reached each parameter, how many gradients overflowed at the
loss scale, the changes of the buffers of the module (BatchNorm's statistics), and the step's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from elasticdl.frameworks.framework import NUM_TOLD, LocalGradient, Share
from elasticdl.frameworks.torch.buckets import Buckets
from elasticdl.frameworks.torch.computation import LossScale
from elasticdl.frameworks.torch.losses import ModuleLoss
from elasticdl.frameworks.torch.model import BuiltModule
from elasticdl.frameworks.torch.optimizer import Rates
from elasticdl.frameworks.torch.randomness import seed_step

_LOSS, _GRADIENT, _CHANGE = "the loss", "the gradient", "the change of the non-trainable variables"
Ready = Callable[[Any], None]


class ModuleGradients:
    """The steps of one model."""

    def __init__(
        self, built: BuiltModule, loss: ModuleLoss, optimizer: Any, rates: Rates, overlaps: bool, scale: LossScale
    ) -> None:
        """
        Args:
            overlaps: hand gradients over while others are computed.  Then a share whose gradient alone, not its loss,
                is not finite spoils the step; without, it adds nothing.
            scale: of the loss.
        """
        self._built = built
        self._loss = loss
        self._optimizer = optimizer
        self._rates = rates
        self._overlaps = overlaps
        self._scale = scale
        self._num_repeats = 0  # of the newest step
        self._buckets = Buckets(built)
        self._num_parameters = len(built.parameters)
        num_changes = sum(buffer.tensor.numel() for buffer in built.buffers)
        self._last = torch.zeros(self._num_parameters + 1 + num_changes + NUM_TOLD)
        self._changes = self._last[self._num_parameters + 1 : -NUM_TOLD]
        self._told = self._last[-NUM_TOLD:]
        # On a GPU the last buffer goes there and back: it is small, and was made of numbers of this side.
        on_gpu = built.device.type != "cpu"
        self._shared_last = self._last.to(built.device) if on_gpu else self._last
        shared = [*self._buckets.flats, self._shared_last]
        self._buffers: list[Any] = shared if on_gpu else [buffer.numpy() for buffer in shared]

    def local_gradient(self, shares: Sequence[Share], ready: Ready, num_repeats: int = 0) -> LocalGradient:
        """See `Framework.local_gradient`.

        Args:
            num_repeats: how often the same step has overflowed.
        """
        self._num_repeats = num_repeats
        not_finite: dict[int, str] = {}
        wells: list[bool] = []

        def hand_over(bucket: int) -> None:
            wells.append(_is_finite(self._buckets.flats[bucket]))
            if self._factor != 1.0:
                self._buckets.flats[bucket].div_(self._factor)
            ready(self._buffers[bucket])

        while True:
            flaw = self._accumulate(shares, not_finite, hand_over if self._overlaps else None)
            if flaw is None:
                break
            position, words = flaw
            not_finite[position] = words
        self._buckets.hand_over_rest(hand_over)
        if not all(wells) and shares:
            if self._scale.may_overflow(num_repeats):
                self._last[self._num_parameters] = 1.0
            else:
                not_finite.setdefault(len(shares) - 1, f"{_GRADIENT} is not finite")
        self._told[2] = len(not_finite)
        self._last[: self._num_parameters] = torch.tensor(self._buckets.used, dtype=torch.float32)
        if self._shared_last is not self._last:
            self._shared_last.copy_(self._last)
        return LocalGradient(list(self._buffers), self._read_told, not_finite)

    def apply_gradient(self, gradient: LocalGradient, learning_rate: float | None) -> None:
        """See `Framework.apply_gradient`.  The gradient is the one that `local_gradient` returned last."""
        shared = [*self._buckets.flats, self._shared_last]
        with torch.no_grad():
            for own, given, known in zip(shared, gradient.buffers, self._buffers, strict=True):
                if given is not known:
                    own.copy_(torch.as_tensor(given))
                if gradient.rescale != 1.0:
                    own.mul_(gradient.rescale)
            if self._shared_last is not self._last:
                self._last.copy_(self._shared_last)
        self._rates.set(self._optimizer, learning_rate)
        self._buckets.give([bool(count) for count in self._last[: self._num_parameters].tolist()])
        self._built.computation.clip(list(self._built.parameters.values()))
        self._optimizer.step()
        self._scale.count_step(self._num_repeats)
        self._buckets.take_back()
        self._apply_changes()

    def _accumulate(
        self, shares: Sequence[Share], without: dict[int, str], hand_over: Callable[[int], None] | None
    ) -> tuple[int, str] | None:
        """Sums the shares up; the position of one that is not finite, and what of it, ends it."""
        self._buckets.clear()
        self._last.zero_()
        starts = [buffer.tensor.clone() for buffer in self._built.buffers]
        kept = [position for position in range(len(shares)) if position not in without]
        self._built.module.train()
        for position in kept:
            try:
                flaw = self._add(shares[position], starts, hand_over if position == kept[-1] else None)
            finally:
                self._restore(starts)
            if flaw:
                return position, flaw
        return None

    def _add(self, share: Share, starts: list[Any], hand_over: Callable[[int], None] | None) -> str:
        """Add a share; return a description of its values that are not finite: then it must not count."""
        seed_step(share.seed, self._built.device)
        value, change = 0.0, None
        parts = share.batch.data.on(self._built.device).parts(share.batch.size, self._built.computation.part_size)
        for k, (weight, samples) in enumerate(parts, start=1):
            loss = self._loss(samples)
            value += weight * float(loss.detach())
            if k == len(parts):
                change = self._change(starts)
            if flaw := _flaw(value, change):
                return flaw
            if k == len(parts) and hand_over is not None:
                self._buckets.hand_over_during_backward(hand_over)
            (loss * (weight * share.scale * self._factor)).backward()
        if not self._overlaps and not all(_is_finite(flat) for flat in self._buckets.flats):
            return f"{_GRADIENT} is not finite"
        self._changes.add_(change, alpha=share.scale)
        self._told += torch.tensor([value * share.scale, share.scale, 0.0])
        return ""

    def _change(self, starts: list[Any]) -> Any:
        """Return the changes of the module's buffers by a forward pass."""
        if not starts:
            return torch.zeros(0)
        parts = [
            (buffer.tensor.detach().to(torch.float32) - start.to(torch.float32)).reshape(-1)
            for buffer, start in zip(self._built.buffers, starts, strict=True)
        ]
        return torch.cat(parts).cpu()

    def _restore(self, starts: list[Any]) -> None:
        """After backward, which may still need what forward has left there."""
        with torch.no_grad():
            for buffer, start in zip(self._built.buffers, starts, strict=True):
                buffer.put(start)

    def _apply_changes(self) -> None:
        position = 0
        for buffer in self._built.buffers:
            tensor = buffer.tensor
            change = self._changes[position : position + tensor.numel()].reshape(tensor.shape).to(tensor.device)
            position += tensor.numel()
            if tensor.is_floating_point():
                tensor.add_(change.to(tensor.dtype))
            else:
                tensor.copy_(tensor + change.round().to(torch.int64))

    @property
    def has_overflowed(self) -> bool:
        """After the reduction, the same in every member: whether the step has to be computed again."""
        return self._built.computation.scales_loss and bool(self._shared_last[self._num_parameters])

    @property
    def _factor(self) -> float:
        return self._scale.at(self._num_repeats)

    def _read_told(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        told = self._shared_last[-NUM_TOLD:].cpu().numpy()
        return np.array(told, np.float32)


def _flaw(loss: float, change: Any) -> str:
    """Describe what of them is not finite; empty: nothing.

    Args:
        change: None: not known yet.
    """
    wrong = [_LOSS] if not math.isfinite(loss) else []
    wrong += [_CHANGE] if change is not None and not _is_finite(change) else []
    return f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not finite" if wrong else ""


def _is_finite(values: Any) -> bool:
    """Of all; the sum, which is quick, is asked first."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())
