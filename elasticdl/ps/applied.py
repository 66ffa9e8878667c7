"""The names in a piece of model state: its applied set, and the fences that keep old leases out.

This module owns names of minibatches.  It never sees a gradient, and it does not know how long a task is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass

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
        block = self._blocks.get((epoch, task >> _BLOCK_BITS))
        if block is None:
            block = self._blocks[epoch, task >> _BLOCK_BITS] = array("q")
        lacking = (task & _LAST_PLACE) + 1 - len(block)
        if lacking > 0:
            block.extend(array("q", bytes(8 * lacking)))
        block[task & _LAST_PLACE] = number

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
        num_names: in the set.
        num_applies: how many names have been taken into the state.  Each change of the state counts, independently
            of the names: a difference to `num_names` proves a repeated or lost update.
    """

    def __init__(self) -> None:
        self._watermarks = TaskNumbers()
        self._extras: dict[TaskKey, set[int]] = {}  # none is empty
        self.num_names = self.num_applies = 0

    def __contains__(self, name: MinibatchName) -> bool:
        key = (name.epoch, name.task)
        return name.n < self._watermarks[key] or name.n in self._extras.get(key, ())

    def __iter__(self) -> Iterator[MinibatchName]:
        for epoch, task in self.tasks():
            known = self.of_task(epoch, task)
            for n in (*range(known.watermark), *known.extras):
                yield MinibatchName(epoch, task, n)

    def add(self, name: MinibatchName) -> bool:
        """Adds a name; False if it was there already."""
        if name in self:
            return False
        self.num_names += 1
        key = (name.epoch, name.task)
        watermark = self._watermarks[key]
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
        copied.num_names, copied.num_applies = self.num_names, self.num_applies
        return copied

    def of_task(self, epoch: int, task: int) -> pb.AppliedTask:
        """Where one task stands."""
        watermark = self._watermarks[epoch, task]
        extras = sorted(self._extras.get((epoch, task), ()))
        return pb.AppliedTask(epoch=epoch, task=task, watermark=watermark, extras=extras)

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
        if task.watermark:
            self._watermarks[task.epoch, task.task] = task.watermark
            self.num_names += task.watermark
        for n in task.extras:
            self.add(MinibatchName(task.epoch, task.task, n))

    def tasks(self) -> list[TaskKey]:
        """Return the tasks of which it holds a minibatch, in order."""
        tasks = list(self._watermarks)
        return sorted((*tasks, *(self._extras.keys() - self._watermarks.keys()))) if self._extras else tasks


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
        self._newest = TaskNumbers()

    def refuses(self, lease: int, epoch: int, task: int) -> bool:
        """Whether a newer lease of the task is known; if not, this one is the newest from now on."""
        if lease < self._newest[epoch, task]:
            return True
        self._newest[epoch, task] = lease
        return False
