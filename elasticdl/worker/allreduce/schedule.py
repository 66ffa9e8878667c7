"""The order of steps with --fixed_global_batch: step s is minibatches sG … (s+1)G-1 of an epoch's order.

All members of a group have the same `StepSchedule`: rank 0 broadcasts the queued minibatches and the closed epoch;
every member cuts the same steps from them, and computes the piece of its own rank.  The schedule owns the queue; it
knows nothing of leases, the master, or the broadcasts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from elasticdl.ps.applied import AppliedSet, MinibatchName

Queued = TypeVar("Queued")
NO_EPOCH = -1


class StepSchedule(Generic[Queued]):
    """The minibatches to train, in the order of steps; each occurs once, and none is in the model.

    Attributes:
        num_per_step: Minibatches in a step, of all members together.
    """

    def __init__(self, num_per_step: int, num_per_epoch: int, name_of: Callable[[Queued], MinibatchName]) -> None:
        """
        Args:
            num_per_epoch: Minibatches of an epoch; 0 if not known.
            name_of: Returns the name of a queued minibatch.
        """
        self.num_per_step = num_per_step
        self._num_per_epoch = num_per_epoch
        self._name_of = name_of
        self._queue: deque[Queued] = deque()
        self._closed_epoch = NO_EPOCH  # no more minibatches of this epoch, or earlier ones, come

    def __iter__(self) -> Iterator[Queued]:
        return iter(self._queue)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def clear(self) -> None:
        """Empty the queue when a group has been entered."""
        self._queue.clear()
        self._closed_epoch = NO_EPOCH

    def add(self, minibatches: Iterable[Queued], applied: AppliedSet) -> list[Queued]:
        """Queue the minibatches that are neither queued nor in the model, and return them.

        A task may come twice, if rank 0 has not noticed yet that it lost the earlier lease.
        """
        known = {self._name_of(one) for one in self._queue}
        new = [one for one in minibatches if self._name_of(one) not in known and self._name_of(one) not in applied]
        self._queue.extend(new)
        return new

    def close(self, epoch: int) -> None:
        """Note that no more minibatches of an epoch come: its rest is a step, full or not."""
        self._closed_epoch = max(self._closed_epoch, epoch)

    def is_closed(self, epoch: int) -> bool:
        return epoch <= self._closed_epoch

    def take_applied(self, applied: AppliedSet) -> list[Queued]:
        """Remove and return the minibatches at the head that are in the model now."""
        taken = []
        while self._queue and self._name_of(self._queue[0]) in applied:
            taken.append(self._queue.popleft())
        return taken

    def remove(self, is_out: Callable[[MinibatchName], bool]) -> None:
        """Remove minibatches, for example of a failed task."""
        self._queue = deque(one for one in self._queue if not is_out(self._name_of(one)))

    def epoch_to_close(self, applied: AppliedSet, has_rest: Callable[[int], bool]) -> int:
        """Return the epoch of the next step if the queue holds the whole rest of it, and less than a step.

        Otherwise return `NO_EPOCH`.

        Args:
            applied: The minibatches in the model.
            has_rest: Whether all leases of an epoch have come; called if the plan does not show it.
        """
        epoch = self._name_of(self._queue[0]).epoch if self._queue else NO_EPOCH
        if self.is_closed(epoch):
            return NO_EPOCH
        waiting = sum(self._name_of(one).epoch == epoch for one in self._queue)
        if waiting >= self.num_per_step:
            return NO_EPOCH
        if self._num_per_epoch and applied.num_names_of(epoch) + waiting >= self._num_per_epoch:
            return epoch
        return epoch if has_rest(epoch) else NO_EPOCH

    def steps(self) -> Iterator[list[Queued]]:
        """Yield the steps whose minibatches are all queued, in order."""
        step: list[Queued] = []
        for one in self._queue:
            if step and self._name_of(step[0]).epoch != self._name_of(one).epoch:
                yield step
                step = []
            step.append(one)
            if len(step) == self.num_per_step:
                yield step
                step = []
        if step and self.is_closed(self._name_of(step[0]).epoch):
            yield step

    def next(self) -> list[Queued]:
        """Return the next step; empty if it is not complete yet."""
        return next(self.steps(), [])

    @staticmethod
    def piece(step: Sequence[Queued], rank: int, size: int) -> Sequence[Queued]:
        """Return the contiguous part of a step that one of `size` members computes."""
        return step[rank * len(step) // size : (rank + 1) * len(step) // size]
