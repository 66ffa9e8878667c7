"""What a piece of model state holds: its applied set, and the fences that keep old leases out.

This module owns names of minibatches.  It never sees a gradient, and it does not know how long a task is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from elasticdl.rpc import elasticdl_pb2 as pb

TaskKey = tuple[int, int]  # (epoch, task)


@dataclass(frozen=True, slots=True, order=True)
class MinibatchName:
    """The n-th minibatch of a task of an epoch."""

    epoch: int
    task: int
    n: int


@dataclass(slots=True)
class _AppliedTask:
    """All n < watermark, and the extras, which are all > watermark."""

    watermark: int = 0
    extras: set[int] = field(default_factory=set)

    def __contains__(self, n: int) -> bool:
        return n < self.watermark or n in self.extras

    def add(self, n: int) -> None:
        self.extras.add(n)
        while self.watermark in self.extras:
            self.extras.remove(self.watermark)
            self.watermark += 1


class AppliedSet:
    """The names that a piece of state holds.  It travels with the state, never with the process.

    Attributes:
        num_applies: how many pushes have changed the state.  Whoever changes the state counts it, independently of
            the names: a difference to `num_names` proves a repeated or lost update.
    """

    def __init__(self) -> None:
        self._tasks: dict[TaskKey, _AppliedTask] = {}
        self.num_applies = 0

    def __contains__(self, name: MinibatchName) -> bool:
        task = self._tasks.get((name.epoch, name.task))
        return task is not None and name.n in task

    def __iter__(self) -> Iterator[MinibatchName]:
        for (epoch, number), task in sorted(self._tasks.items()):
            for n in (*range(task.watermark), *sorted(task.extras)):
                yield MinibatchName(epoch, number, n)

    @property
    def num_names(self) -> int:
        return sum(task.watermark + len(task.extras) for task in self._tasks.values())

    def add(self, name: MinibatchName) -> bool:
        """Adds a name; False if it was there already."""
        if name in self:
            return False
        self._tasks.setdefault((name.epoch, name.task), _AppliedTask()).add(name.n)
        return True

    def of_task(self, epoch: int, task: int) -> pb.AppliedTask:
        """Where one task stands."""
        known = self._tasks.get((epoch, task), _AppliedTask())
        return pb.AppliedTask(epoch=epoch, task=task, watermark=known.watermark, extras=sorted(known.extras))

    def to_message(self) -> pb.AppliedSet:
        tasks = [self.of_task(epoch, task) for epoch, task in sorted(self._tasks)]
        return pb.AppliedSet(tasks=tasks, num_applies=self.num_applies)

    @classmethod
    def from_message(cls, message: pb.AppliedSet) -> AppliedSet:
        applied = cls()
        for task in message.tasks:
            entry = applied._tasks.setdefault((task.epoch, task.task), _AppliedTask())
            entry.watermark = task.watermark
            for n in task.extras:
                if n not in entry:
                    entry.add(n)
        applied.num_applies = message.num_applies
        return applied


class Fences:
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
