"""The names in a piece of model state: its applied set, and the fences that keep old leases out.

This module owns names of minibatches.  It never sees a gradient, and it does not know how long a task is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np

from elasticdl.rpc import elasticdl_pb2 as pb

TaskKey = tuple[int, int]  # (epoch, task)


@dataclass(frozen=True, slots=True, order=True)
class MinibatchName:
    """The n-th minibatch of a task of an epoch."""

    epoch: int
    task: int
    n: int


_BLOCK_BITS = 12
_LAST_PLACE = (1 << _BLOCK_BITS) - 1
_NOTHING = array("q")


class TaskNumbers(MutableMapping[TaskKey, int]):
    """A number for each of many tasks, 0 where none was set, as a `collections.Counter`; in 8 bytes, not 200.

    A job keeps some of every task of all its epochs.
    """

    def __init__(self) -> None:
        self._blocks: dict[TaskKey, array[int]] = {}  # of 4,096 tasks of an epoch, as long as it must be

    def __getitem__(self, key: TaskKey) -> int:
        epoch, task = key
        block = self._blocks.get((epoch, task >> _BLOCK_BITS), ())
        place = task & _LAST_PLACE
        return block[place] if place < len(block) else 0

    def __setitem__(self, key: TaskKey, number: int) -> None:
        epoch, task = key
        place = task & _LAST_PLACE
        self._block(epoch, task >> _BLOCK_BITS, place + 1)[place] = number

    def fill(self, epoch: int, first: int, count: int, number: int) -> None:
        """Set the number of successive tasks of an epoch."""
        while count > 0:
            place = first & _LAST_PLACE
            end = min(place + count, _LAST_PLACE + 1)
            block = self._block(epoch, first >> _BLOCK_BITS, end)
            block[place:end] = array("q", [number]) * (end - place)
            first, count = first + end - place, count - end + place

    def _block(self, epoch: int, number: int, size: int) -> array[int]:
        """Return a block, with room for at least this many tasks."""
        block = self._blocks.get((epoch, number))
        if block is None:
            block = self._blocks[epoch, number] = array("q")
        if len(block) < size:
            block.extend(array("q", bytes(8 * (size - len(block)))))
        return block

    @staticmethod
    def runs(*several: TaskNumbers) -> Iterator[tuple[int, ...]]:
        """Yield (epoch, first task, count, numbers …) of successive tasks that are alike in all of them, and not 0."""
        for epoch, number in sorted({key for one in several for key in one._blocks}):
            columns = [np.array(one._blocks.get((epoch, number), ()), np.int64) for one in several]
            size = max(map(len, columns))
            rows = np.stack([np.pad(column, (0, size - len(column))) for column in columns])
            ends = [*(np.flatnonzero((rows[:, 1:] != rows[:, :-1]).any(0)) + 1).tolist(), size]
            for start, end in zip([0, *ends], ends, strict=False):
                if rows[:, start].any():
                    yield epoch, (number << _BLOCK_BITS) + start, end - start, *rows[:, start].tolist()

    def __delitem__(self, key: TaskKey) -> None:
        self[key] = 0

    def __contains__(self, key: object) -> bool:
        return isinstance(key, tuple) and self[key] != 0

    def __iter__(self) -> Iterator[TaskKey]:
        for epoch, number in sorted(self._blocks):
            for place, found in enumerate(self._blocks[epoch, number]):
                if found:
                    yield epoch, (number << _BLOCK_BITS) + place

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TaskNumbers):
            return super().__eq__(other)
        return all(
            _are_equal(self._blocks.get(key, _NOTHING), other._blocks.get(key, _NOTHING))
            for key in self._blocks.keys() | other._blocks.keys()
        )

    def __len__(self) -> int:
        return sum(len(block) - block.count(0) for block in self._blocks.values())

    def total(self, epoch: int) -> int:
        """The sum of the numbers of an epoch's tasks."""
        return sum(sum(block) for (other, _), block in self._blocks.items() if other == epoch)

    def copy(self) -> TaskNumbers:
        copied = TaskNumbers()
        copied._blocks = {key: block[:] for key, block in self._blocks.items()}
        return copied


def _are_equal(one: array[int], other: array[int]) -> bool:
    """Whether they are, with zeros behind the end of the shorter one."""
    if len(one) > len(other):
        one, other = other, one
    return one == other[: len(one)] and other.count(0) - one.count(0) == len(other) - len(one)


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
        return pb.AppliedSet(tasks=[self.of_task(*key) for key in self.tasks()], num_applies=self.num_applies)

    @classmethod
    def from_message(cls, message: pb.AppliedSet) -> AppliedSet:
        applied = cls()
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
