"""The names in a piece of model state: its applied set, and the fences that keep old leases out.

This module owns names of minibatches.  It never sees a gradient, and it does not know how long a task is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from elasticdl.rpc import elasticdl_pb2 as pb

TaskKey = tuple[int, int]  # (epoch, task)


@dataclass(frozen=True, slots=True, order=True)
class MinibatchName:
    """The n-th minibatch of a task of an epoch."""

    epoch: int
    task: int
    n: int


class AppliedSet:
    """The names that a piece of state holds.  It travels with the state, never with the process.

    Of a task it holds all n < watermark, and the extras, which are all > watermark.

    Attributes:
        num_applies: how many names have been taken into the state.  Each change of the state counts, independently
            of the names: a difference to `num_names` proves a repeated or lost update.
    """

    def __init__(self) -> None:
        self._watermarks: dict[TaskKey, int] = {}
        self._extras: dict[TaskKey, set[int]] = {}  # none is empty
        self.num_applies = 0

    def __contains__(self, name: MinibatchName) -> bool:
        key = (name.epoch, name.task)
        return name.n < self._watermarks.get(key, 0) or name.n in self._extras.get(key, ())

    def __iter__(self) -> Iterator[MinibatchName]:
        for epoch, task in self._tasks():
            known = self.of_task(epoch, task)
            for n in (*range(known.watermark), *known.extras):
                yield MinibatchName(epoch, task, n)

    @property
    def num_names(self) -> int:
        return sum(self._watermarks.values()) + sum(len(extras) for extras in self._extras.values())

    def add(self, name: MinibatchName) -> bool:
        """Adds a name; False if it was there already."""
        if name in self:
            return False
        key = (name.epoch, name.task)
        watermark = self._watermarks.get(key, 0)
        if name.n != watermark:
            self._extras.setdefault(key, set()).add(name.n)
            return True
        watermark += 1
        extras = self._extras.get(key)
        if extras is not None:
            while watermark in extras:
                extras.remove(watermark)
                watermark += 1
            if not extras:
                del self._extras[key]
        self._watermarks[key] = watermark
        return True

    def has_same_names(self, other: AppliedSet) -> bool:
        return self._watermarks == other._watermarks and self._extras == other._extras

    def copy(self) -> AppliedSet:
        """Fast: a message of it takes a hundred times longer."""
        copied = AppliedSet()
        copied._watermarks = self._watermarks.copy()
        copied._extras = {key: extras.copy() for key, extras in self._extras.items()}
        copied.num_applies = self.num_applies
        return copied

    def of_task(self, epoch: int, task: int) -> pb.AppliedTask:
        """Where one task stands."""
        watermark = self._watermarks.get((epoch, task), 0)
        extras = sorted(self._extras.get((epoch, task), ()))
        return pb.AppliedTask(epoch=epoch, task=task, watermark=watermark, extras=extras)

    def to_message(self) -> pb.AppliedSet:
        return pb.AppliedSet(tasks=[self.of_task(*key) for key in self._tasks()], num_applies=self.num_applies)

    @classmethod
    def from_message(cls, message: pb.AppliedSet) -> AppliedSet:
        applied = cls()
        for task in message.tasks:
            if task.watermark:
                applied._watermarks[task.epoch, task.task] = task.watermark
            for n in task.extras:
                applied.add(MinibatchName(task.epoch, task.task, n))
        applied.num_applies = message.num_applies
        return applied

    @classmethod
    def common(cls, sets: Sequence[AppliedSet]) -> AppliedSet:
        """The names that all of them hold; updates repeated or lost in one of them still show in `num_applies`."""
        if len(sets) == 1:
            return sets[0]
        applied = cls()
        for epoch, task in sets[0]._tasks():
            known = common_task([one.of_task(epoch, task) for one in sets])
            if known.watermark:
                applied._watermarks[epoch, task] = known.watermark
            if known.extras:
                applied._extras[epoch, task] = set(known.extras)
        applied.num_applies = applied.num_names + sum(one.num_applies - one.num_names for one in sets)
        return applied

    def _tasks(self) -> list[TaskKey]:
        return sorted(self._watermarks.keys() | self._extras.keys())


def common_task(standings: Sequence[pb.AppliedTask]) -> pb.AppliedTask:
    """Of one task the minibatches that all of them hold."""
    least = min(standings, key=lambda known: known.watermark)
    extras: Iterable[int] = least.extras  # names above the lowest watermark can only be here
    for other in standings:
        held = frozenset(other.extras)
        extras = [n for n in extras if n < other.watermark or n in held]
    return pb.AppliedTask(epoch=least.epoch, task=least.task, watermark=least.watermark, extras=extras)


class FencingTokens:
    """The newest lease known for each task: older ones are refused.

    Fences belong to the process, not to the state: after a restore the incarnation is new, and that keeps old calls
    out.
    """

    def __init__(self) -> None:
        self._newest: dict[TaskKey, int] = {}

    def refuses(self, lease: int, epoch: int, task: int) -> bool:
        """Whether a newer lease of the task is known; if not, this one is the newest from now on."""
        if lease < self._newest.get((epoch, task), lease):
            return True
        self._newest[epoch, task] = lease
        return False
