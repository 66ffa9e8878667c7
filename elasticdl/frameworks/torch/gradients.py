"""A member's part of a synchronous step: gradients at the module's parameters, and their update afterwards.

Nothing here waits for the model's device before the step's numbers are read, which is once: after the reduction, or,
where a share that is not finite must be left out, at each share.  A member alone updates the model and begins the next
step before it reads them, so that the device always has work; an update that should not have been is undone.

The last buffer holds, one after the other: how many shares reached each parameter, how many gradients overflowed at the
loss scale, the changes of the buffers of the module (BatchNorm's statistics), and the step's numbers.
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

_RUN_AHEAD = ("cuda",)  # where the host only queues what a device computes
_LOSS, _GRADIENT, _CHANGE = "the loss", "the gradient", "the change of the non-trainable variables"
Ready = Callable[[Any], None]


class ModuleGradients:
    """The steps of one model."""

    def __init__(
        self, built: BuiltModule, loss: ModuleLoss, optimizer: Any, rates: Rates, overlaps: bool, scale: LossScale
    ) -> None:
        """
        Args:
            overlaps: hand gradients over while others are computed, and look at the end whether all is finite.  Then a
                share that is not spoils the step; without, it adds nothing.
            scale: of the loss.
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
        self._is_open = False  # a member's alone: the buffers are changed, and it may still be dropped
        self._is_updated = False  # by it already, although its numbers may not be known
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
            num_repeats: how often the same step has overflowed.
        """
        self._num_repeats = num_repeats
        self._is_alone = len(shares) == 1 and shares[0].is_alone
        if self._is_open or not self._is_alone:  # the step before was dropped, or another one was begun
            self.settle()
        if self._is_alone:
            return self._own_gradient(shares[0])
        not_finite: dict[int, str] = {}
        found: list[Any] = []  # of each bucket, see `finiteness_of`

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
        """See `Framework.apply_gradient`.  The gradient is the one that `local_gradient` returned last."""
        if not self._is_alone:
            self._take_sums(gradient)
        if not self._is_updated:
            self._update(learning_rate)
        self._is_open = self._is_updated = False
        if not self._is_alone:
            self._starts.add(self._changes)

    def settle(self) -> None:
        """Leave the model as it is between two steps: without a step that is not applied, and without a begun one."""
        self._drop_begun()
        if self._is_updated:
            self._undo.restore()
        if self._is_open:
            self._starts.restore()
        self._is_open = self._is_updated = False

    @property
    def order(self) -> list[int]:
        """Numbers of the parameters in the order of the buffers."""
        return self._buckets.order

    def update_only(self, numbers: Collection[int]) -> None:
        """From now on the optimizer updates these parameters alone."""
        self._withheld = [number for number in range(self._num_parameters) if number not in numbers]

    def begin_exchange(self, owner_of: Sequence[int], rank: int) -> list[tuple[int, Any]]:
        """See `ShardsOptimizer.begin_exchange`.  The gradients are not needed any more: values lie in their place."""
        by_number = dict(zip(self.order, owner_of, strict=True))
        self._buckets.put_parameters([number for number, owner in by_number.items() if owner == rank])
        runs = self._buckets.runs(by_number)
        return [(owner, self._buffers[bucket][start:end]) for owner, bucket, start, end in runs]

    def end_exchange(self) -> None:
        """See `ShardsOptimizer.end_exchange`; a parameter that this process updates itself has its value already."""
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
        if not all(used):  # those that this member has not reached, another one may have
            used = [bool(count) for count in self._last[: self._num_parameters].tolist()]
        self._buckets.give(used)

    def _accumulate(
        self, shares: Sequence[Share], without: dict[int, str], hand_over: Callable[[int], None] | None
    ) -> tuple[int, str] | None:
        """Sums the shares up; the position of one that is not finite, and what of it, ends it."""
        self._last.zero_()
        self._seen: list[Any] = []  # of each share: its loss, and whether its change is finite
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
        """Write down how many shares are not finite, whether the gradient overflows, and which parameters it reaches.

        Args:
            seen: of each share its loss and the finiteness of its change, then that of the gradient; None: shares
                that are not finite are left out, or there is none.
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
            counts.fill_(1.0)  # numbers from the host would be waited for
        elif any(used):
            counts.copy_(torch.tensor(used, dtype=torch.float32))

    # -- the step of one member alone

    def _own_gradient(self, share: Share) -> LocalGradient:
        """The gradient where the optimizer looks for it, and the buffers changed: nothing is weighted or summed up."""
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
        """Weights and losses of the parts of a minibatch."""
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
        """See `LocalGradient`."""
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
        self._is_zero = True  # what says that numbers are not finite
        self._here = self._come = None
        if self._there.is_cuda:
            self._here, self._come = torch.empty(3, pin_memory=True), torch.cuda.Event()

    def later(self, loss: Any, buffers: Sequence[Any], gradients: Sequence[Any]) -> Callable[[], list[float]]:
        """Return a function that waits for the numbers, and for nothing that the device is given afterwards.

        It is called before the next step asks for its own numbers, or not at all.

        Args:
            loss: of one element.
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
    """Describe what of a share is not finite; empty: nothing."""
    words = [word for word, seen in ((_LOSS, loss), (_CHANGE, change)) if not math.isfinite(seen)]
    if not words and not math.isfinite(gradient):
        words = [_GRADIENT]
    return f"{', '.join(words)} {'is' if len(words) == 1 else 'are'} not finite" if words else ""


def _flaws(seen: Sequence[float]) -> dict[int, str]:
    """The flaws, by the position of the share; the gradient counts for the last one.

    Args:
        seen: see `ModuleGradients._count`.
    """
    pairs = list(zip(seen[:-1:2], seen[1:-1:2], strict=True))
    found = {k: flaw for k, pair in enumerate(pairs) if (flaw := _described(*pair))}
    if not found and (flaw := _described(0.0, 0.0, seen[-1])):
        found[len(pairs) - 1] = flaw
    return found
