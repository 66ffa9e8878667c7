"""AppliedSet: the minibatches that a piece of model state contains; per task a watermark, and extras above it.

This module owns the set arithmetic.  It knows nothing of tasks' sizes, leases or parameter servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import and_

from elasticdl.task_numbers import TaskNumbers

TaskName = tuple[int, int]  # (epoch, task)
Minibatches = Mapping[TaskName, frozenset[int]]


@dataclass(frozen=True, slots=True)
class CommittedTask:
    """The applied minibatches of one task: all n < watermark, and the extras, each of them > watermark."""

    watermark: int = 0
    extras: frozenset[int] = frozenset()

    @classmethod
    def of(cls, watermark: int = 0, extras: Iterable[int] = ()) -> CommittedTask:
        """Make one of any watermark and extras: drop extras below the watermark, merge adjacent ones into it."""
        rest = {n for n in extras if n >= watermark}
        while watermark in rest:
            rest.remove(watermark)
            watermark += 1
        return cls(watermark, frozenset(rest))

    def __len__(self) -> int:
        return self.watermark + len(self.extras)

    def __contains__(self, n: int) -> bool:
        return n < self.watermark or n in self.extras

    def __iter__(self) -> Iterator[int]:
        yield from range(self.watermark)
        yield from sorted(self.extras)

    def __and__(self, other: CommittedTask) -> CommittedTask:
        low, high = sorted((self, other), key=lambda a: a.watermark)
        return CommittedTask.of(low.watermark, (n for n in low.extras if n in high))

    def __or__(self, other: CommittedTask) -> CommittedTask:
        return CommittedTask.of(max(self.watermark, other.watermark), self.extras | other.extras)


NOTHING = CommittedTask()


@dataclass(frozen=True, slots=True)
class CommittedSet:
    """The minibatches that one piece of state contains: of each task those below its watermark, and the extras.

    Attributes:
        watermarks: Watermark of each task; 0 for a task without minibatches below it.
        num_applies: Number of pushes that changed the state; greater than `num_names` if a push was applied twice.
        extras: Extras by task, only of tasks that have some.
        skipped: Minibatches whose name alone is in the state, not their update (--nan_policy=skip).
    """

    watermarks: TaskNumbers = field(default_factory=TaskNumbers)
    num_applies: int = 0
    extras: Minibatches = field(default_factory=dict)
    skipped: Minibatches = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tasks: Iterable[tuple[int, int, int, Iterable[int]]],
        num_applies: int,
        skipped: Minibatches | None = None,
        runs: Iterable[tuple[int, int, int, int]] = (),
    ) -> CommittedSet:
        """Make a set of (epoch, task, watermark, extras) of each task, as the wire message lists them.

        Args:
            runs: (epoch, first task, number of tasks, watermark) of consecutive tasks without extras.
        """
        watermarks, extras = TaskNumbers(), {}
        for run in runs:
            watermarks.fill(*run)
        for epoch, task, watermark, above in tasks:
            one = CommittedTask.of(watermark, above)
            watermarks[epoch, task] = one.watermark
            if one.extras:
                extras[epoch, task] = one.extras
        return cls(watermarks, num_applies, extras, skipped or {})

    def __or__(self, other: CommittedSet) -> CommittedSet:
        names = {*self.watermarks, *other.watermarks, *self.extras, *other.extras}
        united = ((*name, self.of_task(*name) | other.of_task(*name)) for name in names)
        left_out = self.skipped.keys() | other.skipped.keys()
        skipped = {name: self.skipped_in(*name) | other.skipped_in(*name) for name in left_out}
        tasks = ((epoch, task, one.watermark, one.extras) for epoch, task, one in united)
        return CommittedSet.of(tasks, self.num_applies, skipped)

    def of_task(self, epoch: int, task: int) -> CommittedTask:
        return CommittedTask(self.watermarks[epoch, task], self.extras.get((epoch, task), frozenset()))

    def skipped_in(self, epoch: int, task: int) -> frozenset[int]:
        return self.skipped.get((epoch, task), frozenset())

    def tasks(self) -> dict[TaskName, CommittedTask]:
        """Return the tasks with applied minibatches, in order; slow, as there may be millions."""
        names = [*self.watermarks, *(self.extras.keys() - self.watermarks.keys())]
        return {name: self.of_task(*name) for name in sorted(names)}

    @property
    def last_epoch(self) -> int:
        """The newest epoch with an applied minibatch; -1 for an empty set."""
        return max(self.watermarks.last_epoch(), max((epoch for epoch, _ in self.extras), default=-1))

    @property
    def num_names(self) -> int:
        return self.watermarks.total_of_all() + sum(map(len, self.extras.values()))

    @property
    def num_repeated(self) -> int:
        """Number of pushes applied although their name was in the set already; not 0 only after a bug."""
        return max(0, self.num_applies - self.num_names)


def intersection(sets: Sequence[CommittedSet]) -> CommittedSet:
    """Return the minibatches that are in every set; empty for no sets.  `num_applies` is the number of these."""
    if not sets:
        return CommittedSet()
    common = reduce(TaskNumbers.least, [one.watermarks for one in sets])
    extras: dict[TaskName, frozenset[int]] = {}
    for name in {name for one in sets for name in one.extras}:
        found = reduce(and_, [one.of_task(*name) for one in sets])
        common[name] = found.watermark
        if found.extras:
            extras[name] = found.extras
    names = reduce(and_, [one.skipped.keys() for one in sets])
    skipped = {name: reduce(and_, [one.skipped[name] for one in sets]) for name in names}
    result = CommittedSet(common, 0, extras, skipped)
    return replace(result, num_applies=result.num_names)
