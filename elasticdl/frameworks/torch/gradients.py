"""A member's part of a synchronous step: gradients at the module's parameters, and their update afterwards.

Nothing here waits for the model's device before the step's numbers are read, which is once: after the reduction, or,
where a share that is not finite must be left out, at each share.

The last buffer holds, one after the other: how many shares reached each parameter, how many gradients overflowed at the
loss scale, the changes of the buffers of the module (BatchNorm's statistics), and the step's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from operator import is_
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
        self._buckets = Buckets(built)
        self._starts = StartValues(built)
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
        if self._is_alone:
            return self._own_gradient(shares[0])
        not_finite: dict[int, str] = {}
        sizes: list[Any] = []  # the largest number of each bucket

        def hand_over(bucket: int) -> None:
            flat = self._buckets.flats[bucket]
            if self._overlaps:
                sizes.append(self._largest([flat]))
            if self._factor != 1.0:
                flat.div_(self._factor)
            ready(self._buffers[bucket])

        while (flaw := self._accumulate(shares, not_finite, hand_over if self._overlaps else None)) is not None:
            not_finite.update([flaw])
        self._buckets.hand_over_rest(hand_over)
        seen = torch.stack([*self._seen, torch.stack(sizes).amax()]) if shares and self._overlaps else None
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
        self._rates.set(self._optimizer, learning_rate)
        self._built.computation.clip(list(self._built.parameters.values()))
        self._buckets.withhold(self._withheld)
        self._optimizer.step()
        self._scale.count_step(self._num_repeats)
        self._buckets.take_back()
        if not self._is_alone:
            self._starts.add(self._changes)

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

    def _largest(self, tensors: Sequence[Any]) -> Any:
        """Return the largest absolute value: a scalar on the device, not finite if one of them is not; of none 0."""
        largest = largest_of(tensors)
        return torch.zeros((), device=self._built.device) if largest is None else largest

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
        self._seen: list[Any] = []  # of each share: its loss, and the largest change of a buffer
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
                self._seen += [total, self._largest([change])]
                if hand_over is not None:
                    self._buckets.hand_over_during_backward(hand_over)
            if not self._overlaps and (flaw := _described(float(total), float(self._largest([change])))):
                return flaw
            backward(loss, weight * share.scale * self._factor)
        if not self._overlaps and not math.isfinite(float(self._largest(self._buckets.flats))):
            return _described(0.0, 0.0, math.nan)
        self._changes.add_(change, alpha=share.scale)
        self._told[0].add_(total, alpha=share.scale)
        return ""

    def _count(self, seen: Any, num_left_out: int) -> None:
        """Write down how many shares are not finite, whether the gradient overflows, and which parameters it reaches.

        Args:
            seen: of each share its loss and the largest change, then the largest number of the gradient; None: shares
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
        parameters = list(self._built.parameters.values())
        self._buckets.take_back()
        self._built.train()
        self._starts.take()
        seed_step(share.seed, self._built.device)
        total: Any = None
        try:
            with self._buckets.left_alone():
                parts = share.batch.data.on(self._built.device)
                for weight, samples in parts.parts(share.batch.size, self._built.computation.part_size):
                    loss = self._loss(samples)
                    backward(loss, weight * self._factor)
                    part = loss.detach() if weight == 1.0 else loss.detach() * weight
                    total = part if total is None else total + part
        except BaseException:
            self._starts.restore()
            raise
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()  # as in a group
        gradients = [p.grad for p in parameters if p.grad is not None]
        largest = [_norms(some) for some in (self._starts.now(), gradients)]
        numbers = torch.stack([total.to(torch.float32), *largest[0], *largest[1]]).tolist()
        end = 1 + len(largest[0])
        seen = [numbers[0], max(numbers[1:end], default=0.0, key=_order), max(numbers[end:], default=0.0, key=_order)]
        flaw = _described(*seen)
        is_overflow = not _described(*seen[:2]) and bool(flaw) and self._scale.may_overflow(self._num_repeats)
        self._own_has_overflowed = is_overflow
        if flaw:
            self._starts.restore()
            self._buckets.take_back()
        elif self._factor != 1.0:
            torch._foreach_div_(gradients, self._factor)
        is_ill = bool(flaw) and not is_overflow
        told = np.array([0.0, 0.0, 1.0] if is_ill else [seen[0], 1.0, 0.0], np.float32)
        return LocalGradient([], lambda: told, {0: flaw} if is_ill else {})


class StartValues:
    """The buffers of a module as they were before a forward pass, and its changes.

    Attributes:
        num_values: in all of them.
    """

    def __init__(self, built: BuiltModule) -> None:
        self._places = built.buffers
        self._device = built.device
        self._starts: list[Any] = []
        self._last_seen: list[Any] = []  # the buffers that were copied last
        self._last_sizes: list[int] = []
        self._sizes = [place.tensor.numel() for place in built.buffers]
        self.num_values = sum(self._sizes)

    def now(self) -> list[Any]:
        """The buffers."""
        return [place.tensor for place in self._places]

    def take(self) -> None:
        """Copy the buffers."""
        tensors = self.now()
        if not self._has_kinds_of(tensors):
            self._starts = [one.clone() for one in tensors]
        else:
            _copy(self._starts, tensors)
        self._last_seen, self._last_sizes = tensors, [one.numel() for one in tensors]

    def restore(self) -> None:
        """Undo what a forward pass has changed; after backward, which may still need it."""
        tensors = self.now()
        if self._has_kinds_of(tensors):
            _copy(tensors, self._starts)
            return
        with torch.no_grad():
            for place, start in zip(self._places, self._starts, strict=True):
                place.put(start)

    def _has_kinds_of(self, tensors: Sequence[Any]) -> bool:
        """Whether the copies are of the shapes and data types of some tensors."""
        sizes = [one.numel() for one in tensors]
        if sizes == self._last_sizes and all(map(is_, tensors, self._last_seen)):
            return True
        return [_kind(one) for one in tensors] == [_kind(one) for one in self._starts]

    def change(self) -> Any:
        """Return what a forward pass has added to the buffers, as one vector."""
        if not self._places:
            return torch.zeros(0, device=self._device)
        with torch.no_grad():
            flat = [
                torch.cat([one.reshape(-1).to(torch.float32) for one in side]) for side in (self.now(), self._starts)
            ]
            return flat[0] - flat[1]

    def add(self, changes: Any) -> None:
        """Change the buffers by a vector as `change` gives it; those of integers by rounded numbers."""
        tensors = self.now()
        if not tensors:
            return
        with torch.no_grad():
            whole = changes.round().to(torch.int64)
            pieces = zip(changes.split(self._sizes), whole.split(self._sizes), tensors, strict=True)
            shaped = [(a if t.is_floating_point() else b).reshape(t.shape).to(t.dtype) for a, b, t in pieces]
            for targets, added in _by_type(tensors, shaped):
                torch._foreach_add_(targets, added)


def _flat(tensors: Sequence[Any]) -> Any:
    return torch.cat([one.reshape(-1).to(torch.float32) for one in tensors])


def _copy(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    with torch.no_grad():
        for some, theirs in _by_type(targets, sources):
            torch._foreach_copy_(some, theirs)


def _by_type(targets: Sequence[Any], others: Sequence[Any]) -> list[tuple[list[Any], list[Any]]]:
    """Pairs of lists of one data type, which one kernel can work off."""
    groups: dict[Any, tuple[list[Any], list[Any]]] = {}
    for target, other in zip(targets, others, strict=True):
        first, second = groups.setdefault(target.dtype, ([], []))
        first.append(target)
        second.append(other)
    return list(groups.values())


def _kind(tensor: Any) -> tuple[Any, Any]:
    return tensor.shape, tensor.dtype


def largest_of(tensors: Sequence[Any]) -> Any:
    """Return the largest absolute value in tensors: a scalar on their device, not finite if one of them is not.

    None: there is no number in them.
    """
    norms = _norms(tensors)
    if not norms:
        return None
    return norms[0] if len(norms) == 1 else torch.stack(norms).amax()


def _norms(tensors: Sequence[Any]) -> list[Any]:
    """Return the largest absolute value of each tensor of floats or complex numbers, in float32."""
    dense = [one.detach()._values() if one.is_sparse else one.detach() for one in tensors]
    floating = [one for one in dense if (one.is_floating_point() or one.is_complex()) and one.numel()]
    return [norm.to(torch.float32) for norm in torch._foreach_norm(floating, math.inf)] if floating else []


def _order(number: float) -> float:
    """Numbers that are not finite come last."""
    return number if math.isfinite(number) else math.inf


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
