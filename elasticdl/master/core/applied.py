"""AppliedSet: which minibatches a piece of model state holds, per task a watermark and the extras above it.

This module owns the set arithmetic.  It knows nothing of tasks' sizes, leases or parameter servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

TaskName = tuple[int, int]  # (epoch, task)


@dataclass(frozen=True, slots=True)
class CommittedTask:
    """Minibatches of one task: all n < watermark, and the extras, each of them > watermark."""

    watermark: int = 0
    extras: frozenset[int] = frozenset()

    @classmethod
    def of(cls, watermark: int = 0, extras: Iterable[int] = ()) -> CommittedTask:
        """From any watermark and extras: those below the watermark are dropped, those that touch it raise it."""
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
    """The minibatches that one piece of state holds.

    Attributes:
        tasks: a task that is missing has nothing applied.
        num_applies: how many pushes changed the state: equals `num_names`, or something was repeated.
        skipped: of some tasks the minibatches of which the state holds the name alone (--nan_policy=skip).
    """

    tasks: Mapping[TaskName, CommittedTask] = field(default_factory=dict)
    num_applies: int = 0
    skipped: Mapping[TaskName, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tasks: Iterable[tuple[int, int, int, Iterable[int]]],
        num_applies: int,
        skipped: Mapping[TaskName, frozenset[int]] | None = None,
    ) -> CommittedSet:
        """From (epoch, task, watermark, extras) of each task, as the wire message lists them."""
        return cls({(e, t): CommittedTask.of(w, x) for e, t, w, x in tasks}, num_applies, skipped or {})

    def __or__(self, other: CommittedSet) -> CommittedSet:
        names = self.tasks.keys() | other.tasks.keys()
        tasks = {name: self.of_task(*name) | other.of_task(*name) for name in names}
        left_out = self.skipped.keys() | other.skipped.keys()
        skipped = {name: self.skipped_in(*name) | other.skipped_in(*name) for name in left_out}
        return CommittedSet(tasks, self.num_applies, skipped)

    def of_task(self, epoch: int, task: int) -> CommittedTask:
        return self.tasks.get((epoch, task), NOTHING)

    def skipped_in(self, epoch: int, task: int) -> frozenset[int]:
        return self.skipped.get((epoch, task), frozenset())

    @property
    def num_names(self) -> int:
        return sum(len(applied) for applied in self.tasks.values())

    @property
    def num_repeated(self) -> int:
        """Pushes that were applied although their name was there already; 0 unless something is broken."""
        return max(0, self.num_applies - self.num_names)


def intersection(sets: Iterable[CommittedSet]) -> CommittedSet:
    """Return the names that every set holds; empty for no sets.  `num_applies` is that of its own names."""
    tasks: dict[TaskName, CommittedTask] | None = None
    skipped: dict[TaskName, frozenset[int]] = {}
    for one in sets:
        if tasks is None:
            tasks, skipped = dict(one.tasks), dict(one.skipped)
        else:
            tasks = {name: applied & one.tasks[name] for name, applied in tasks.items() if name in one.tasks}
            skipped = {name: found & one.skipped_in(*name) for name, found in skipped.items()}
    result = CommittedSet({name: applied for name, applied in (tasks or {}).items() if len(applied)})
    return CommittedSet(result.tasks, result.num_names, skipped)
