"""The names in a piece of model state: its applied set, and the fences that keep old leases out.

This module owns names of minibatches.  It never sees a gradient, and it does not know how long a task is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.task_numbers import TaskKey, TaskNumbers


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
        watermarks: of each task.
        extras: of each task that has any.
        skipped: of each task that has any, the minibatches of which only the name is held (--nan_policy=skip).
        num_names: in the set.
        num_applies: how many names have been taken into the state.  Each change of the state counts, independently
            of the names: a difference to `num_names` proves a repeated or lost update.
    """

    def __init__(self) -> None:
        self.watermarks = TaskNumbers()
        self.extras: dict[TaskKey, set[int]] = {}  # none is empty
        self.skipped: dict[TaskKey, set[int]] = {}  # none is empty
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
        """Set where successive tasks stand of which nothing is known yet."""
        self.watermarks.fill(epoch, first, count, watermark)
        self.num_names += count * watermark

    def add(self, name: MinibatchName, is_skipped: bool = False) -> bool:
        """Add a name, if `is_skipped` that of a minibatch that is left out; False if it was there already."""
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
        """Fast: a message of it takes a hundred times longer."""
        copied = AppliedSet()
        copied.watermarks = self.watermarks.copy()
        copied.extras = {key: extras.copy() for key, extras in self.extras.items()}
        copied.skipped = {key: skipped.copy() for key, skipped in self.skipped.items()}
        copied.num_names, copied.num_applies = self.num_names, self.num_applies
        return copied

    def of_task(self, epoch: int, task: int) -> pb.AppliedTask:
        """Where one task stands."""
        watermark = self.watermarks[epoch, task]
        extras = sorted(self.extras.get((epoch, task), ()))
        skipped = sorted(self.skipped.get((epoch, task), ()))
        return pb.AppliedTask(epoch=epoch, task=task, watermark=watermark, extras=extras, skipped=skipped)

    def to_message(self) -> pb.AppliedSet:
        """Successive tasks that are alike, as most are, take one entry."""
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
        """The names that all of them hold; updates repeated or lost in one of them still show in `num_applies`."""
        if len(sets) == 1:
            return sets[0]
        applied = cls()
        for epoch, task in sets[0].tasks():
            applied._set_task(common_task([one.of_task(epoch, task) for one in sets]))
        applied.num_applies = applied.num_names + sum(one.num_applies - one.num_names for one in sets)
        return applied

    def _set_task(self, task: pb.AppliedTask) -> None:
        """Take over where a task stands of which nothing is known yet."""
        self.fill(task.epoch, task.task, 1 if task.watermark else 0, task.watermark)
        for n in task.extras:
            self.add(MinibatchName(task.epoch, task.task, n))
        if task.skipped:
            self.skipped[task.epoch, task.task] = set(task.skipped)

    def tasks(self) -> list[TaskKey]:
        """Return the tasks of which it holds a minibatch, in order."""
        tasks = list(self.watermarks)
        return sorted((*tasks, *(self.extras.keys() - self.watermarks.keys()))) if self.extras else tasks


def common_task(standings: Sequence[pb.AppliedTask]) -> pb.AppliedTask:
    """Of one task the minibatches that all of them hold."""
    least = min(standings, key=lambda known: known.watermark)
    extras: Iterable[int] = least.extras  # names above the lowest watermark can only be here
    for other in standings:
        held = frozenset(other.extras)
        extras = [n for n in extras if n < other.watermark or n in held]
    found = pb.AppliedTask(epoch=least.epoch, task=least.task, watermark=least.watermark, extras=extras)
    found.skipped.extend(sorted(frozenset.intersection(*(frozenset(known.skipped) for known in standings))))
    return found


class FencingTokens:
    """The newest lease known for each task: older ones are refused.

    Fences belong to the process, not to the state: after a restore the incarnation is new, and that keeps old calls
    out.
    """

    def __init__(self) -> None:
        self._newest = TaskNumbers()

    def refuses(self, lease: int, epoch: int, task: int) -> bool:
        """Whether a newer lease of the task is known; if not, this one is the newest from now on."""
        if lease < self._newest[epoch, task]:
            return True
        self._newest[epoch, task] = lease
        return False
