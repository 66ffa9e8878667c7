"""The names of the minibatches in a piece of model state (its applied set), and the fences against old leases.

This module owns names of minibatches.  It never sees a gradient, and does not know how long a task is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.task_numbers import TaskKey, TaskNumbers


@dataclass(frozen=True, slots=True, order=True)
class MinibatchName:
    """The n-th minibatch of a task in an epoch."""

    epoch: int
    task: int
    n: int


class AppliedSet:
    """The names in a piece of state.  It moves with the state, not with the process.

    Of each task it contains all n < watermark, and the extras, which are all > watermark.

    Attributes:
        watermarks: The watermark of each task.
        extras: The extras of each task that has any.
        skipped: By task, the minibatches of which only the name is in the state (--nan_policy=skip).
        num_names: The number of names.
        num_applies: How many updates were applied to the state, counted independently of the names: a difference from
            `num_names` proves a repeated or lost update.
    """

    def __init__(self) -> None:
        self.watermarks = TaskNumbers()
        self.extras: dict[TaskKey, set[int]] = {}  # no set is empty
        self.skipped: dict[TaskKey, set[int]] = {}  # no set is empty
        self.num_names = self.num_applies = 0

    def __contains__(self, name: MinibatchName) -> bool:
        key = (name.epoch, name.task)
        return name.n < self.watermarks[key] or name.n in self.extras.get(key, ())

    def __iter__(self) -> Iterator[MinibatchName]:
        for epoch, task in self.tasks():
            known = self.of_task(epoch, task)
            for n in (*range(known.watermark), *known.extras):
                yield MinibatchName(epoch, task, n)

    def fill(self, epoch: int, first: int, count: int, watermark: int) -> None:
        """Set the watermark of successive tasks that have no names yet."""
        self.watermarks.fill(epoch, first, count, watermark)
        self.num_names += count * watermark

    def add(self, name: MinibatchName, is_skipped: bool = False) -> bool:
        """Add a name, `is_skipped` if its minibatch is left out; return False if it was there already."""
        if name in self:
            return False
        self.num_names += 1
        key = (name.epoch, name.task)
        if is_skipped:
            self.skipped.setdefault(key, set()).add(name.n)
        watermark = self.watermarks[key]
        if name.n != watermark:
            self.extras.setdefault(key, set()).add(name.n)
            return True
        watermark += 1
        extras = self.extras.get(key)
        if extras is not None:
            while watermark in extras:
                extras.remove(watermark)
                watermark += 1
            if not extras:
                del self.extras[key]
        self.watermarks[key] = watermark
        return True

    def num_names_of(self, epoch: int) -> int:
        extras = sum(len(found) for (other, _), found in self.extras.items() if other == epoch)
        return self.watermarks.total(epoch) + extras

    def has_same_names(self, other: AppliedSet) -> bool:
        return self.watermarks == other.watermarks and self.extras == other.extras

    def copy(self) -> AppliedSet:
        """Return a copy; a message would take a hundred times longer."""
        copied = AppliedSet()
        copied.watermarks = self.watermarks.copy()
        copied.extras = {key: extras.copy() for key, extras in self.extras.items()}
        copied.skipped = {key: skipped.copy() for key, skipped in self.skipped.items()}
        copied.num_names, copied.num_applies = self.num_names, self.num_applies
        return copied

    def of_task(self, epoch: int, task: int) -> pb.AppliedTask:
        """Return the minibatches of one task."""
        watermark = self.watermarks[epoch, task]
        extras = sorted(self.extras.get((epoch, task), ()))
        skipped = sorted(self.skipped.get((epoch, task), ()))
        return pb.AppliedTask(epoch=epoch, task=task, watermark=watermark, extras=extras, skipped=skipped)

    def to_message(self) -> pb.AppliedSet:
        """Return it as a message; successive tasks with equal values, as most have, take one entry."""
        message, plain = pb.AppliedSet(num_applies=self.num_applies), self.watermarks.copy()
        others = sorted(self.extras.keys() | self.skipped.keys())
        for key in others:
            plain[key] = 0
        for epoch, first, count, watermark in TaskNumbers.runs(plain):
            if count > 1:
                message.runs.add(epoch=epoch, first_task=first, num_tasks=count, watermark=watermark)
            else:
                others.append((epoch, first))
        message.tasks.extend(self.of_task(*key) for key in sorted(others))
        return message

    @classmethod
    def from_message(cls, message: pb.AppliedSet) -> AppliedSet:
        applied = cls()
        for run in message.runs:
            applied.fill(run.epoch, run.first_task, run.num_tasks, run.watermark)
        for task in message.tasks:
            applied._set_task(task)
        applied.num_applies = message.num_applies
        return applied

    @classmethod
    def common(cls, sets: Sequence[AppliedSet]) -> AppliedSet:
        """Return the names in all sets; an update repeated or lost in one of them still shows in `num_applies`."""
        if len(sets) == 1:
            return sets[0]
        applied = cls()
        for epoch, task in sets[0].tasks():
            applied._set_task(common_task([one.of_task(epoch, task) for one in sets]))
        applied.num_applies = applied.num_names + sum(one.num_applies - one.num_names for one in sets)
        return applied

    def _set_task(self, task: pb.AppliedTask) -> None:
        """Set the minibatches of a task that has no names yet."""
        self.fill(task.epoch, task.task, 1 if task.watermark else 0, task.watermark)
        for n in task.extras:
            self.add(MinibatchName(task.epoch, task.task, n))
        if task.skipped:
            self.skipped[task.epoch, task.task] = set(task.skipped)

    def tasks(self) -> list[TaskKey]:
        """Return the tasks with at least one minibatch, in order."""
        tasks = list(self.watermarks)
        return sorted((*tasks, *(self.extras.keys() - self.watermarks.keys()))) if self.extras else tasks


def common_task(standings: Sequence[pb.AppliedTask]) -> pb.AppliedTask:
    """Return the minibatches of one task that are in all sets."""
    least = min(standings, key=lambda known: known.watermark)
    extras: Iterable[int] = least.extras  # names above the lowest watermark can only be here
    for other in standings:
        held = frozenset(other.extras)
        extras = [n for n in extras if n < other.watermark or n in held]
    found = pb.AppliedTask(epoch=least.epoch, task=least.task, watermark=least.watermark, extras=extras)
    found.skipped.extend(sorted(frozenset.intersection(*(frozenset(known.skipped) for known in standings))))
    return found


class FencingTokens:
    """The newest known lease of each task: older leases are rejected.

    Fences belong to the process, not to the state: after a restore the incarnation is new, which rejects old calls.
    """

    def __init__(self) -> None:
        self._newest = TaskNumbers()

    def refuses(self, lease: int, epoch: int, task: int) -> bool:
        """Return whether a newer lease of the task is known; if not, this one becomes the newest."""
        if lease < self._newest[epoch, task]:
            return True
        self._newest[epoch, task] = lease
        return False
