"""A member's part of a synchronous step: compute gradients at the module's parameters, and update the parameters.

Nothing here waits for the model's device until the statistics of the step are read: once after the reduction, or after
each share if a share that is not finite must be left out.  A single member updates the model and begins the next step
before it reads them, so that the device always has work; a wrong update is reverted.

The last buffer contains, in order: how many shares reached each parameter, how many gradients overflowed at the loss
scale, the changes of the module's buffers (BatchNorm's statistics), and the statistics of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from elasticdl.frameworks.framework import NUM_TOLD, Floats, LocalGradient, Share
from elasticdl.frameworks.torch.buckets import Buckets
from elasticdl.frameworks.torch.computation import LossScale
from elasticdl.frameworks.torch.losses import ModuleLoss, backward
from elasticdl.frameworks.torch.model import BuiltModule
from elasticdl.frameworks.torch.optimizer import Rates
from elasticdl.frameworks.torch.randomness import seed_step
from elasticdl.frameworks.torch.undo import StartValues, UpdateUndo

_RUN_AHEAD = ("cuda",)  # devices that compute asynchronously
_LOSS, _GRADIENT, _CHANGE = "the loss", "the gradient", "the change of the non-trainable variables"
Ready = Callable[[Any], None]


class ModuleGradients:
    """The steps of one model."""

    def __init__(
        self, built: BuiltModule, loss: ModuleLoss, optimizer: Any, rates: Rates, overlaps: bool, scale: LossScale
    ) -> None:
        """
        Args:
            built: The model.
            loss: The user's loss.
            optimizer: The user's optimizer.
            rates: The user's schedule of learning rates.
            overlaps: Pass gradients on while others are computed, and check only at the end whether all are finite: a
                non-finite share then spoils the step.  False: such a share adds nothing.
            scale: The loss scale.
        """
        self._built = built
        self._loss = loss
        self._optimizer = optimizer
        self._rates = rates
        self._overlaps = overlaps
        self._scale = scale
        self._num_repeats = 0  # of the newest step
        self._withheld: Collection[int] = range(len(built.parameters)) if built.computation.shards_optimizer else ()
        self._is_alone = self._own_has_overflowed = False  # the newest step
        self._is_open = False  # a single member's step has changed the buffers, and may still be dropped
        self._is_updated = False  # it has also updated the parameters, possibly before its statistics are known
        self._begun: _BegunStep | None = None
        self._buckets = Buckets(built)
        self._starts, self._other_starts = StartValues(built), StartValues(built)
        self._numbers = _OwnNumbers(built.device)
        self._undo = UpdateUndo(list(built.parameters.values()), optimizer, built.device)
        self._num_parameters = len(built.parameters)
        self._last = torch.zeros(self._num_parameters + 1 + self._starts.num_values + NUM_TOLD, device=built.device)
        self._changes = self._last[self._num_parameters + 1 : -NUM_TOLD]
        self._told = self._last[-NUM_TOLD:]
        shared = [*self._buckets.flats, self._last]
        self._buffers: list[Any] = [one.numpy() for one in shared] if built.device.type == "cpu" else shared

    def local_gradient(self, shares: Sequence[Share], ready: Ready, num_repeats: int = 0) -> LocalGradient:
        """See `Framework.local_gradient`.

        Args:
            shares: See `Framework.local_gradient`.
            ready: See `Framework.local_gradient`.
            num_repeats: How often the same step has overflowed.
        """
        self._num_repeats = num_repeats
        self._is_alone = len(shares) == 1 and shares[0].is_alone
        if self._is_open or not self._is_alone:  # the last step was dropped, or another one was begun
            self.settle()
        if self._is_alone:
            return self._own_gradient(shares[0])
        not_finite: dict[int, str] = {}
        found: list[Any] = []  # `finiteness_of` each bucket

        def hand_over(bucket: int) -> None:
            flat = self._buckets.flats[bucket]
            if self._overlaps:
                found.append(finiteness_of([flat], self._built.device))
            if self._factor != 1.0:
                flat.div_(self._factor)
            ready(self._buffers[bucket])

        while (flaw := self._accumulate(shares, not_finite, hand_over if self._overlaps else None)) is not None:
            not_finite.update([flaw])
        self._buckets.hand_over_rest(hand_over)
        seen = torch.stack([*self._seen, torch.stack(found).amax()]) if shares and self._overlaps else None
        self._count(seen, len(not_finite))

        def told() -> Floats:
            numbers = np.array(self._told.cpu().numpy(), np.float32)
            if numbers[2] and seen is not None and not not_finite:
                not_finite.update(_flaws(seen.tolist()))
            return numbers

        return LocalGradient(list(self._buffers), told, not_finite)

    def apply_gradient(self, gradient: LocalGradient, learning_rate: float | None) -> None:
        """See `Framework.apply_gradient`.  `gradient` must be the last result of `local_gradient`."""
        if not self._is_alone:
            self._take_sums(gradient)
        if not self._is_updated:
            self._update(learning_rate)
        self._is_open = self._is_updated = False
        if not self._is_alone:
            self._starts.add(self._changes)

    def settle(self) -> None:
        """Restore the model's state between two steps: revert an unapplied step, and drop one begun ahead."""
        self._drop_begun()
        if self._is_updated:
            self._undo.restore()
        if self._is_open:
            self._starts.restore()
        self._is_open = self._is_updated = False

    @property
    def order(self) -> list[int]:
        """The numbers of the parameters in the order of the buffers."""
        return self._buckets.order

    def update_only(self, numbers: Collection[int]) -> None:
        """Let the optimizer update only these parameters from now on."""
        self._withheld = [number for number in range(self._num_parameters) if number not in numbers]

    def begin_exchange(self, owner_of: Sequence[int], rank: int) -> list[tuple[int, Any]]:
        """See `ShardsOptimizer.begin_exchange`.  The values replace the gradients, which are no longer needed."""
        by_number = dict(zip(self.order, owner_of, strict=True))
        self._buckets.put_parameters([number for number, owner in by_number.items() if owner == rank])
        runs = self._buckets.runs(by_number)
        return [(owner, self._buffers[bucket][start:end]) for owner, bucket, start, end in runs]

    def end_exchange(self) -> None:
        """See `ShardsOptimizer.end_exchange`; parameters updated by this process already have their values."""
        self._buckets.take_parameters(self._withheld)

    @property
    def has_overflowed(self) -> bool:
        """After the reduction, the same in every member: whether the step has to be computed again."""
        if self._is_alone:
            return self._own_has_overflowed
        return self._built.computation.scales_loss and bool(self._last[self._num_parameters])

    @property
    def _factor(self) -> float:
        return self._scale.at(self._num_repeats)

    def _update(self, learning_rate: float | None) -> None:
        self._rates.set(self._optimizer, learning_rate)
        self._built.computation.clip(list(self._built.parameters.values()))
        self._buckets.withhold(self._withheld)
        self._optimizer.step()
        self._scale.count_step(self._num_repeats)
        self._buckets.take_back()

    # -- the step of a group

    def _take_sums(self, gradient: LocalGradient) -> None:
        with torch.no_grad():
            for own, given, known in zip(
                [*self._buckets.flats, self._last], gradient.buffers, self._buffers, strict=True
            ):
                if given is not known:
                    own.copy_(torch.as_tensor(given))
                if gradient.rescale != 1.0:
                    own.mul_(gradient.rescale)
        used = self._buckets.used
        if not all(used):  # other members may have reached the other parameters
            used = [bool(count) for count in self._last[: self._num_parameters].tolist()]
        self._buckets.give(used)

    def _accumulate(
        self, shares: Sequence[Share], without: dict[int, str], hand_over: Callable[[int], None] | None
    ) -> tuple[int, str] | None:
        """Sum up the shares; stop at one that is not finite, and return its position and description."""
        self._last.zero_()
        self._seen: list[Any] = []  # for each share: its loss, and whether its change is finite
        kept = [position for position in range(len(shares)) if position not in without]
        self._buckets.clear(self._overlaps and len(kept) == 1 and not self._is_cut(shares[kept[0]]))
        self._built.train()
        self._starts.take()
        for position in kept:
            try:
                flaw = self._add(shares[position], hand_over if position == kept[-1] else None)
            finally:
                self._starts.restore()
            if flaw:
                return position, flaw
        self._told[1].fill_(sum(shares[position].scale for position in kept))
        return None

    def _is_cut(self, share: Share) -> bool:
        return 0 < self._built.computation.part_size < share.batch.size

    def _add(self, share: Share, hand_over: Callable[[int], None] | None) -> str:
        """Add a share; return a description of its values that are not finite: then it must not count."""
        seed_step(share.seed, self._built.device)
        total, change = torch.zeros((), device=self._built.device), self._changes[:0]
        parts = share.batch.data.on(self._built.device).parts(share.batch.size, self._built.computation.part_size)
        for k, (weight, samples) in enumerate(parts, start=1):
            loss = self._loss(samples)
            total.add_(loss.detach(), alpha=weight)
            if k == len(parts):
                change = self._starts.change()
                self._seen += [total, finiteness_of([change], self._built.device)]
                if hand_over is not None:
                    self._buckets.hand_over_during_backward(hand_over)
            if not self._overlaps and (
                flaw := _described(float(total), float(finiteness_of([change], self._built.device)))
            ):
                return flaw
            backward(loss, weight * share.scale * self._factor)
        if not self._overlaps and not math.isfinite(float(finiteness_of(self._buckets.flats, self._built.device))):
            return _described(0.0, 0.0, math.nan)
        self._changes.add_(change, alpha=share.scale)
        self._told[0].add_(total, alpha=share.scale)
        return ""

    def _count(self, seen: Any, num_left_out: int) -> None:
        """Write the number of non-finite shares, the overflow, and the reached parameters to the last buffer.

        Args:
            seen: For each share its loss and the finiteness of its change, then the finiteness of the gradient; None:
                non-finite shares were left out, or there are no shares.
            num_left_out: Number of shares that were left out.
        """
        if seen is None:
            self._told[2].fill_(num_left_out)
        else:
            is_ill = ~torch.isfinite(seen)
            num_ill = is_ill[:-1].reshape(-1, 2).any(1).sum()
            is_gradient_ill = is_ill[-1]
            if self._scale.may_overflow(self._num_repeats):
                is_overflow = is_gradient_ill & (num_ill == 0)
                self._last[self._num_parameters] = is_overflow
                is_gradient_ill = is_gradient_ill & ~is_overflow
            self._told[2] = torch.maximum(num_ill, is_gradient_ill.to(num_ill.dtype))
        counts, used = self._last[: self._num_parameters], self._buckets.used
        if all(used):
            counts.fill_(1.0)  # copying numbers from the host would wait for the device
        elif any(used):
            counts.copy_(torch.tensor(used, dtype=torch.float32))

    # -- the step of one member alone

    def _own_gradient(self, share: Share) -> LocalGradient:
        """Compute the gradient of a single share directly in the parameters and buffers, without weights and sums."""
        begun = self._take_begun(share)
        if begun is None:
            self._buckets.take_back()
            self._starts.take()
            self._start(share)
        self._is_open = True
        self._buckets.ignore_backward()
        total: Any = None
        try:
            for weight, loss in [(1.0, begun.loss)] if begun is not None else self._losses(share):
                backward(loss, weight * self._factor)
                part = loss.detach() if weight == 1.0 else loss.detach() * weight
                total = part if total is None else total + part
        except BaseException:
            self.settle()
            raise
        gradients = []
        for parameter in self._built.parameters.values():
            if parameter.grad is not None:
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()  # as in a group
                gradients.append(parameter.grad)
        read = self._numbers.later(total, self._starts.changed(), gradients)
        not_finite: dict[int, str] = {}

        @cache
        def told() -> Floats:
            loss, *flaws = read()
            change, gradient = (math.inf if flaw else 0.0 for flaw in flaws)
            return self._own_numbers(loss, change, gradient, not_finite)

        if self._runs_ahead:
            return LocalGradient([], told, not_finite, run_ahead=self._run_ahead)
        told()
        if self._factor != 1.0 and not (not_finite or self._own_has_overflowed):
            torch._foreach_div_(gradients, self._factor)
        return LocalGradient([], told, not_finite)

    def _own_numbers(self, loss: float, change: float, gradient: float, not_finite: dict[int, str]) -> Floats:
        """Return the numbers of a step; one that is not finite is undone.

        Args:
            change, gradient: see `finiteness_of`.
        """
        flaw = _described(loss, change, gradient)
        is_overflow = not _described(loss, change) and bool(flaw) and self._scale.may_overflow(self._num_repeats)
        self._own_has_overflowed = is_overflow
        if flaw:
            self.settle()
            self._buckets.take_back()
        if not flaw or is_overflow:
            return np.array([loss, 1.0, 0.0], np.float32)
        not_finite[0] = flaw
        return np.array([0.0, 0.0, 1.0], np.float32)

    def _start(self, share: Share) -> None:
        self._built.train()
        seed_step(share.seed, self._built.device)

    def _losses(self, share: Share) -> Iterator[tuple[float, Any]]:
        """Yield the weight and the loss of each part of a minibatch."""
        parts = share.batch.data.on(self._built.device)
        for weight, samples in parts.parts(share.batch.size, self._built.computation.part_size):
            yield weight, self._loss(samples)

    # -- one step ahead

    @property
    def _runs_ahead(self) -> bool:
        """Whether a step may be begun while the numbers of the one before are not known."""
        is_plain = self._overlaps and not self._withheld and not self._built.computation.scales_loss
        return is_plain and self._built.device.type in _RUN_AHEAD

    def _run_ahead(self, learning_rate: float | None, following: Share) -> None:
        """See `LocalGradient.run_ahead`."""
        if not self._undo.take():
            return
        self._is_updated = True
        try:
            self._update(learning_rate)
        except BaseException:
            self.settle()
            raise
        if self._is_cut(following):
            return
        self._other_starts.take()
        self._starts, self._other_starts = self._other_starts, self._starts
        self._begun = _BegunStep(following)
        try:
            self._start(following)
            ((_, self._begun.loss),) = self._losses(following)
        except Exception:  # noqa: BLE001  raised again in a step of its own
            self._drop_begun()

    def _take_begun(self, share: Share) -> _BegunStep | None:
        begun = self._begun
        if begun is None or begun.share.batch is not share.batch or begun.share.seed != share.seed:
            self._drop_begun()
            return None
        self._begun = None
        return begun

    def _drop_begun(self) -> None:
        if self._begun is not None:
            self._begun = None
            self._starts.restore()
            self._starts, self._other_starts = self._other_starts, self._starts


@dataclass(slots=True)
class _BegunStep:
    """A step of a member alone after its forward pass."""

    share: Share
    loss: Any = None


class _OwnNumbers:
    """The loss of a step of a member alone, and whether buffers and gradients are finite."""

    def __init__(self, device: Any) -> None:
        self._there = torch.zeros(3, device=device)
        self._loss, self._change, self._gradient = self._there.split(1)
        self._is_zero = True  # the flags for values that are not finite
        self._here = self._come = None
        if self._there.is_cuda:
            self._here, self._come = torch.empty(3, pin_memory=True), torch.cuda.Event()

    def later(self, loss: Any, buffers: Sequence[Any], gradients: Sequence[Any]) -> Callable[[], list[float]]:
        """Return a function that waits for the statistics, but not for later work of the device.

        Call it before the next step requests its own statistics, or not at all.

        Args:
            loss: Tensor with one element.
            buffers: Buffers to check for values that are not finite.
            gradients: Gradients to check for values that are not finite.
        """
        if not self._is_zero:
            self._there.zero_()
        self._is_zero = False
        self._loss.copy_(loss.reshape(1))
        _mark_flaws(buffers, self._change)
        _mark_flaws(gradients, self._gradient)
        if self._here is not None and self._come is not None:
            self._here.copy_(self._there, non_blocking=True)
            self._come.record()
        return self._read

    def _read(self) -> list[float]:
        """Return loss, and two numbers that are 0 where all is finite."""
        if self._come is not None:
            self._come.synchronize()
        numbers = list((self._there if self._here is None else self._here).tolist())
        self._is_zero = not any(numbers[1:])
        return numbers


def finiteness_of(tensors: Sequence[Any], device: Any) -> Any:
    """Return a float32 scalar on the tensors' device: 0, or infinity if one of their numbers is not finite."""
    found = torch.zeros(1, device=device)
    _mark_flaws(tensors, found)
    return torch.where(found[0] > 0, math.inf, 0.0)


def _mark_flaws(tensors: Sequence[Any], found: Any) -> None:
    """Set `found`, float32 of one element, to 1 if a number in the tensors is not finite.

    Many tensors are looked through by one kernel, which writes them back as they are.
    """
    kinds: dict[Any, list[Any]] = {}
    for tensor in tensors:
        dense = tensor.detach()._values() if tensor.is_sparse else tensor
        if dense.is_complex():
            dense = torch.view_as_real(dense.detach())
        if dense.is_floating_point() and dense.numel():
            kinds.setdefault(dense.dtype, []).append(dense)
    with torch.no_grad():
        for some in kinds.values():
            torch._amp_foreach_non_finite_check_and_unscale_(some, found, _one(found.device))


@cache
def _one(device: Any) -> Any:
    return torch.ones(1, device=device)


def _described(loss: float, change: float, gradient: float = 0.0) -> str:
    """Return which values of a share are not finite, for people; empty: all are finite."""
    words = [word for word, seen in ((_LOSS, loss), (_CHANGE, change)) if not math.isfinite(seen)]
    if not words and not math.isfinite(gradient):
        words = [_GRADIENT]
    return f"{', '.join(words)} {'is' if len(words) == 1 else 'are'} not finite" if words else ""


def _flaws(seen: Sequence[float]) -> dict[int, str]:
    """Return descriptions of non-finite shares, by position; the gradient is attributed to the last share.

    Args:
        seen: See `ModuleGradients._count`.
    """
    pairs = list(zip(seen[:-1:2], seen[1:-1:2], strict=True))
    found = {k: flaw for k, pair in enumerate(pairs) if (flaw := _described(*pair))}
    if not found and (flaw := _described(0.0, 0.0, seen[-1])):
        found[len(pairs) - 1] = flaw
    return found
