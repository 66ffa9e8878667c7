"""Sum the gradients of the user's own backward, weighted, over all members, and store the sums in the parameters.

Hooks on the parameters take each gradient as soon as backward has computed it.  When `backward()` returns, the
parameters have the sums of the whole step, so that the user's next operations (clipping, a scaler, the optimizer) work
on them as in a single process.  Changes of the modules' buffers (BatchNorm's statistics) are averaged with the same
weights.

If a script calls `backward()` several times for a batch, for example with two optimizers, each gradient is summed
separately and added to the parameters' gradients.  The first batch shows whether a script does this.

`backward()` does not return normally if its gradient is incomplete: it raises `PartDone` if more minibatches of the
step follow, and `StepDropped` if the group is broken.  If a trainer of another library needs it to return, it returns
without any gradient, so that an optimizer does nothing, and `ended_by` holds the exception.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from elasticdl.activities import Activity, ActivityClock
from elasticdl.api.pytorch.alone import GradientGroup
from elasticdl.collective import Reduction
from elasticdl.frameworks.torch.buckets import Buckets
from elasticdl.frameworks.torch.computation import Computation, device_meter
from elasticdl.frameworks.torch.model import BuiltModule, buffers_of, plain_name
from elasticdl.frameworks.torch.undo import change_of, masks_among
from elasticdl.worker.allreduce.group_session import GroupEnded
from elasticdl_client.errors import JobError, ModelDefinitionError


def items_of(num_items: Any) -> float:
    """Return the divisor of the loss of a batch as a number.

    Raises:
        JobError: The argument is not a valid number of items.
    """
    try:
        items = float(num_items)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
        items = math.nan
    if not 0 <= items < math.inf:
        raise JobError(
            f"num_items of a step is {num_items}", "give the number of items that the batch's loss is a mean of"
        )
    return items


class PartDone(BaseException):
    """The gradient of a minibatch is stored, and more minibatches of the step follow.  User code must not catch it."""


class StepDropped(BaseException):
    """The group is broken: nothing of this step is applied.  User code must not catch it."""


@dataclass(frozen=True, slots=True)
class StepPosition:
    """The position and weight of a minibatch in a step.

    Attributes:
        weight: Weight of its mean gradient in the gradient of the step; 0: it only replaces missing work of a member,
            or its loss has no items.
        counts_items: The weight is a number of items; their sum over the step is not known in advance.
        is_first: It is the member's first minibatch in the step.
        is_last: It is the member's last minibatch in the step.
        is_own: The step has only this minibatch: nothing is weighted or summed.
    """

    weight: float
    is_first: bool
    is_last: bool
    is_own: bool = False
    counts_items: bool = False


@dataclass(frozen=True, slots=True)
class _Uncleared:
    """A gradient of the previous batch that was not cleared.

    Attributes:
        number: Number of its parameter.
        gradient: The gradient.
        version: The tensor's version counter, which every change in place increments.
    """

    number: int
    gradient: Any
    version: int


class ScriptGradients(Buckets):
    """Sums the gradients of all modules of a script; see the module's docstring.

    Attributes:
        device: Device of the parameters.
        meter: Meter of that device.
        is_complete: Backward is complete.
        is_several: A batch has several `backward()`; None: no batch is complete yet.
        raises: `backward()` raises an exception if its gradient is incomplete.
        ended_by: That exception, if it is not raised.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], clock: ActivityClock) -> None:
        together = torch.nn.ModuleList(modules)  # contains shared submodules only once
        trained = _trained_of(together)
        self._frozen = [pair for pair in together.named_parameters() if not pair[1].requires_grad]
        device = next(iter(trained.values())).device
        places = buffers_of(together)
        _check_shaped([*together.named_parameters(), *((place.name, place.tensor) for place in places)])
        super().__init__(BuiltModule(None, device, trained, {}, places, Computation()))
        self.device = device
        self.meter = device_meter(device)
        self._places, self._shapes = places, [place.tensor.shape for place in places]
        self._has_masks = bool(masks_among([place.tensor for place in places]))
        num_changes = sum(place.tensor.numel() for place in places)
        self._clock = clock
        sizes = [len(self._parameters) + 2, num_changes, 1]  # + 2: sums of weights, by records and by items
        self._last = torch.zeros(sum(sizes), device=device)
        self._counts, self._changes, self._loss = self._last.split(sizes)
        self._weight_by_records = self._weight_by_items = 0.0  # sums over this member's minibatches
        self._starts: list[Any] = []
        self._place: StepPosition | None = None
        self._group: GradientGroup | None = None
        self._reductions: list[Reduction] = []
        self._is_queued = False
        self._is_local = False
        self._uncleared: _Uncleared | None = None
        self._versions = [parameter._version for parameter in self._parameters]  # at the last backward
        self._marks: list[Any] = []  # buffers after the last sum of the batch
        self._mean_loss = torch.zeros((), device=device)
        self._sparse: set[int] = set()  # numbers of parameters with sparse gradients
        self._held: dict[int, Any] = {}  # gradients of earlier backwards of the batch, while one more is computed
        self._has_reached = self._is_again = False
        self.is_several: bool | None = None
        self.is_complete = False
        self.raises = True
        self.ended_by: PartDone | StepDropped | None = None

    def begin(self, place: StepPosition, group: GradientGroup) -> None:
        """Prepare for a minibatch; call it before the user's code.

        Raises:
            ModelDefinitionError: The shape of a buffer has changed since the previous minibatch.
        """
        self._check_shapes()
        self.meter.sample()
        self._uncleared = self._left_over() if self.is_complete and place.is_first else None
        self._clear()
        if self._uncleared is not None:
            self._parameters[self._uncleared.number].grad = self._uncleared.gradient
        self._place, self._group = place, group
        self._reductions.clear()
        self._is_queued = self.is_complete = self._is_again = False
        self.ended_by = None
        if place.is_first:
            self.used = [False] * len(self._parameters)
            self._next = 0
            self._changes.zero_()
            self._loss.zero_()
            self._weight_by_records = self._weight_by_items = 0.0
        if place.counts_items:
            self._weight_by_items += place.weight
        else:
            self._weight_by_records += place.weight
        if not place.is_own:
            self._marks = self._starts = [one.tensor.clone() for one in self._places]
            if place.is_last:
                self.hand_over_during_backward(self._reduce)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward only adds to the gradients; a later backward completes the minibatch."""
        self._is_local = True
        try:
            yield
        finally:
            self._is_local = False

    def add_loss(self, loss: Any) -> None:
        """Add the loss of a forward pass to `mean_loss`; call it before its backward."""
        place = self._place
        if place is not None and (place.is_own or place.weight):
            self._loss.add_(loss.detach().to(self._loss.dtype).reshape(1), alpha=1.0 if place.is_own else place.weight)

    @property
    def mean_loss(self) -> Any:
        """The mean of the losses passed to `add_loss`, over the records of the whole step, after backward."""
        return self._mean_loss

    def end(self) -> None:
        """End the minibatch after its step."""
        self._place = None
        if self.is_several is None:
            self._learn(self._is_again)

    def drop(self) -> None:
        """Discard the minibatch: revert its changes of buffers and clear its gradients."""
        place, self._place = self._place, None
        self._ready = None
        self._held.clear()
        if place is not None and not place.is_own:
            self._marks = self._starts
            self._restore()
        self._clear()

    def _learn(self, is_several: bool) -> None:
        self.is_several = is_several
        if is_several:
            for number, parameter in enumerate(self._parameters):
                is_trained = parameter.requires_grad
                parameter.requires_grad_(True)  # a frozen parameter does not accept hooks
                parameter.register_hook(lambda _, k=number, p=parameter: self._set_aside(k, p))
                parameter.requires_grad_(is_trained)

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    # During backward ------------------------------------------------------------------------------------------------

    def _accumulated(self, number: int, parameter: Any) -> None:
        """Take a parameter's gradient; called after backward has added to it."""
        if self.ended_by is not None:
            parameter.grad = None
            return
        try:
            self._reach(number, parameter)
        except StepDropped as dropped:
            self._end(dropped)

    def _reach(self, number: int, parameter: Any) -> None:
        place = self._place
        self._versions[number], self._has_reached = parameter._version, True
        if parameter.grad is not None and parameter.grad.is_sparse:
            self._sparse.add(number)  # also in the rehearsal: a step may have sums only of other members
        if self._uncleared is not None and self._uncleared.number == number:
            self._check_cleared(number, parameter, self._uncleared)
        if place is None or (self._is_local and not self._held):
            return
        if self._is_local:
            raise ModelDefinitionError(
                "controller.no_sync() stands in a batch that has several backward() outside of it.",
                "Leave no_sync() out: each backward() is summed over all workers by itself.",
            )
        if self.is_complete:
            self._is_again = True
            if not place.is_own:
                self._begin_again()
        self._queue()
        if place.is_own:
            return
        self._take(number, parameter)
        if place.is_last and self._ready is not None:
            self._count(number, self._ready)

    def _queue(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_done)

    def _set_aside(self, number: int, parameter: Any) -> None:
        """Hold a parameter's earlier gradient, so that backward, which is about to add to it, begins with none."""
        if self._place is None or self._place.is_own or self.ended_by is not None:
            return
        if not self._is_queued:
            self._has_reached = False
            self._queue()
        self._held[number], parameter.grad = parameter.grad, None

    def _begin_again(self) -> None:
        """Prepare to sum another backward of the batch."""
        assert self._group is not None
        if self.is_several is False:
            raise ModelDefinitionError(
                "backward() was called again for a batch, and the first batch had one backward().",
                "Call it equally often for every batch, if need be on a loss times zero; or add the losses up, or put "
                "all calls but the last into `with controller.no_sync():`.",
            )
        try:
            if self.is_several is None:
                self._learn(True)
                raise self._group.abandon("a batch has several backward(): its step is made again")
            self._group.continue_step()
        except GroupEnded as ended:
            raise StepDropped from ended
        self.is_complete = False
        self.used = [False] * len(self._parameters)
        self._next = 0
        self._changes.zero_()
        self.hand_over_during_backward(self._reduce)

    def _take(self, number: int, parameter: Any) -> None:
        assert self._place is not None
        found, parameter.grad = parameter.grad, None
        if found is None or not self._place.weight:
            return
        with torch.no_grad():
            dense = found.to_dense() if found.is_sparse else found
            view = self._views[number]
            if self.used[number]:
                view.add_(dense, alpha=self._place.weight)
            elif dense.dtype == view.dtype:
                torch.mul(dense, self._place.weight, out=view)
            else:
                view.copy_(dense).mul_(self._place.weight)
        self.used[number] = True

    def _reduce(self, bucket: int) -> None:
        with torch.no_grad():
            for number, its_bucket in enumerate(self._bucket_of):
                if its_bucket == bucket and not self.used[number]:
                    self._views[number].zero_()
        self._begin_reduce(self.flats[bucket])

    def _begin_reduce(self, buffer: Any) -> None:
        assert self._group is not None
        try:
            self._reductions.append(self._group.begin_reduce(buffer))
        except GroupEnded as ended:
            raise StepDropped from ended

    def _backward_done(self) -> None:
        """Complete a backward; the autograd engine calls it at the end, before `backward()` returns."""
        self._is_queued = False
        try:
            if self.ended_by is not None:
                return
            if self._has_reached:
                self._complete()
            else:  # torch.autograd.grad, which does not accumulate gradients
                self._put_back()
        except (PartDone, StepDropped) as ended:
            self._end(ended)

    def _end(self, reason: PartDone | StepDropped) -> None:
        if self.raises:
            raise reason
        self.ended_by = reason
        self._clear()

    def _complete(self) -> None:
        place = self._place
        if place is None:
            return
        self._check_frozen()
        self._check_shapes()
        if self._uncleared is not None:  # backward did not reach its parameter
            self._parameters[self._uncleared.number].grad = None
        if not place.is_own:
            for number, parameter in enumerate(self._parameters):
                if not self.is_several:  # else it was already taken, or is the sum of an earlier backward
                    self._take(number, parameter)
            self._add_changes(place.weight)
            self._restore()
        self.is_complete = True
        if not place.is_last:
            raise PartDone
        if not place.is_own:
            self._sum_up()
        self._mean_loss = self._loss[0].clone()
        self._loss.zero_()

    def _sum_up(self) -> None:
        assert self._group is not None
        self.hand_over_rest(self._reduce)
        weights = self._weight_by_records, self._weight_by_items
        self._counts.copy_(torch.tensor([*self.used, *weights], dtype=torch.float32))
        self._begin_reduce(self._last)
        try:
            with self._clock.during(Activity.COLLECTIVE):
                self._group.finish_reduce(self._reductions)
        except GroupEnded as ended:
            raise StepDropped from ended
        self._reductions.clear()
        *counts, by_records, by_items = self._counts.tolist()
        self._divide_by_items(by_records, by_items)
        used = [bool(count) for count in counts]
        if self.is_several:
            self._add_sums(used)
        else:
            self.give(used)
        self._give_sparse()
        self._apply_changes()

    def _divide_by_items(self, by_records: float, by_items: float) -> None:
        """Divide the sums by the sum of the items; weights by records already sum up to 1.

        Raises:
            JobError: Only some minibatches of the step have num_items, so that weights have different units; raised in
                all members.
        """
        if not by_items:
            return
        if by_records:
            raise JobError(
                "some batches of a step have num_items, and others have none",
                "give controller.step(num_items=…) for every batch, or for none",
            )
        with torch.no_grad():
            torch._foreach_div_([*self.flats, self._changes, self._loss], by_items)

    def _give_sparse(self) -> None:
        """Make the sums of sparse gradients sparse, as optimizers such as SparseAdam require."""
        for number in self._sparse:
            parameter = self._parameters[number]
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_sparse(1)

    def _add_sums(self, used: Sequence[bool]) -> None:
        """Add the sums to the gradients of earlier backwards."""
        with torch.no_grad():
            for number, (parameter, view, is_used) in enumerate(zip(self._parameters, self._views, used, strict=True)):
                before = self._held.pop(number, parameter.grad)
                if before is not None and before.is_sparse:
                    before = before.to_dense()
                if is_used:
                    parameter.grad = view.to(parameter.dtype, copy=True) if before is None else before.add_(view)
                else:
                    parameter.grad = before

    def _put_back(self) -> None:
        for number, gradient in self._held.items():
            self._parameters[number].grad = gradient
        self._held.clear()

    def _left_over(self) -> _Uncleared | None:
        """Return the smallest gradient of the previous batch that no optimizer has used; None: there is none."""
        numbered = enumerate(zip(self._parameters, self._versions, strict=True))
        left = [(p.grad.numel(), k) for k, (p, version) in numbered if p.grad is not None and p._version == version]
        if not left:
            return None
        _, number = min(left)
        gradient = self._parameters[number].grad.clone()
        return _Uncleared(number, gradient, gradient._version)

    def _check_cleared(self, number: int, parameter: Any, before: _Uncleared) -> None:
        """Raise if backward has added to the gradient of the previous batch."""
        self._uncleared = None
        is_held = number in self._held
        found = self._held.get(number, parameter.grad)
        if found is before.gradient and found._version == before.version + (not is_held):
            raise ModelDefinitionError(
                "backward() would add to the gradient of the batch before, which no optimizer has used. "
                "Gradients cannot be accumulated over several batches: workers join and leave between them.",
                "Call zero_grad() and step() of the optimizer for every batch (Accelerate: "
                "gradient_accumulation_steps=1). For updates of 256 records: --fixed_global_batch=256, alone "
                "create_elastic_controller(fixed_global_batch=256).",
            )

    def _check_frozen(self) -> None:
        """Refuse a gradient without a place in the buffers; also alone, else the error appears with a second worker."""
        for name, parameter in self._frozen:
            if parameter.requires_grad and parameter.grad is not None:
                raise ModelDefinitionError(
                    f"{_name_in_module(name)} is trained now, and was frozen when controller.loader() was called: its "
                    "gradient would not be averaged over the workers.",
                    "Call loader() while all that is ever trained has requires_grad=True, and freeze it after that.",
                )

    def _check_shapes(self) -> None:
        """Refuse a buffer with a changed shape; also alone, see `_check_frozen`."""
        for place, shape in zip(self._places, self._shapes, strict=True):
            now = getattr(place.tensor, "shape", None)  # a buffer may be set to None, or deleted
            if now != shape:
                what = "is gone" if now is None else f"has the shape {tuple(now)}"
                raise ModelDefinitionError(
                    f"The buffer {_name_in_module(place.name)} {what}, and had the shape "
                    f"{tuple(shape)} when controller.loader() was called: their changes are averaged over the workers.",
                    "Give it its last shape at the start; or register_buffer(…, persistent=False): each worker then "
                    "has its own.",
                )

    def _add_changes(self, weight: float) -> None:
        if not self._places or not weight:
            return
        change = change_of([one.tensor for one in self._places], self._marks, self._has_masks)
        self._changes.add_(change, alpha=weight)

    def _restore(self) -> None:
        """Revert the changes of buffers since the last sum, hidden from the autograd graph of a later backward."""
        for one, start in zip(self._places, self._marks, strict=True):
            if getattr(one.tensor, "shape", None) == start.shape and one.tensor.dtype == start.dtype:
                one.tensor.data.copy_(start)
            else:
                one.put(start)

    def _apply_changes(self) -> None:
        """Apply the forward passes' changes of buffers, averaged over all members."""
        position = 0
        for one in self._places:
            tensor = one.tensor.data
            change = self._changes[position : position + tensor.numel()].reshape(tensor.shape)
            position += tensor.numel()
            if tensor.is_floating_point():
                tensor.add_(change.to(tensor.dtype))
            else:
                tensor.copy_(tensor + change.round().to(torch.int64))
        if self.is_several:
            self._marks = [one.tensor.clone() for one in self._places]


def _trained_of(together: torch.nn.ModuleList) -> dict[str, Any]:
    """Return the trainable parameters, by the number of their module and their name.

    Raises:
        ModelDefinitionError: There is no trainable parameter, or an unsupported one.
    """
    trained = {name: p for name, p in together.named_parameters() if p.requires_grad}
    if not trained:
        raise ModelDefinitionError(
            "No model with a parameter to train is registered.",
            "Give it to create_elastic_controller: state=[…], or register it before controller.loader(…); what "
            "needs len(loader), as schedules do, may follow: controller.register(scheduler).",
        )
    for name, parameter in trained.items():
        if parameter.is_complex():
            raise ModelDefinitionError(
                f"{_name_in_module(name)} is complex, and gradients are summed in float32.",
                "Keep it as a real parameter of twice the size, and use torch.view_as_complex in forward().",
            )
    return trained


def _check_shaped(named: Sequence[tuple[str, Any]]) -> None:
    """Refuse parameters and buffers of lazy layers."""
    for name, tensor in named:
        if torch.nn.parameter.is_lazy(tensor):
            raise ModelDefinitionError(
                f"{_name_in_module(name)} has no shape yet.",
                "Give the layer its sizes, or call the model once before controller.loader().",
            )


def _name_in_module(name: str) -> str:
    """Return the name of a parameter or buffer in its own module, from its name in the list of modules."""
    return plain_name(name.partition(".")[2])
