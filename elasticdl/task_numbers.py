"""Store one number per task, compactly: watermarks of ledgers and applied sets, samples, fencing tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, MutableMapping
from itertools import groupby, zip_longest

TaskKey = tuple[int, int]  # (epoch, task)

_BLOCK_BITS = 12
BLOCK_SIZE = 1 << _BLOCK_BITS  # tasks; also the maximum length of a run
_LAST_PLACE = BLOCK_SIZE - 1
_NOTHING = array("q")


class TaskNumbers(MutableMapping[TaskKey, int]):
    """Maps tasks to numbers, 0 by default, like a `collections.Counter`, in 8 bytes per task instead of 200.

    A job keeps such numbers for every task of all its epochs.
    """

    def __init__(self) -> None:
        self._blocks: dict[TaskKey, array[int]] = {}  # each for up to 4,096 tasks of an epoch

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
        """Set the same number for `count` consecutive tasks of an epoch."""
        while count > 0:
            place = first & _LAST_PLACE
            end = min(place + count, BLOCK_SIZE)
            block = self._block(epoch, first >> _BLOCK_BITS, end)
            block[place:end] = array("q", [number]) * (end - place)
            first, count = first + end - place, count - end + place

    def _block(self, epoch: int, number: int, size: int) -> array[int]:
        """Return a block with space for at least `size` tasks."""
        block = self._blocks.get((epoch, number))
        if block is None:
            block = self._blocks[epoch, number] = array("q")
        if len(block) < size:
            block.extend(array("q", bytes(8 * (size - len(block)))))
        return block

    @staticmethod
    def runs(*several: TaskNumbers) -> Iterator[tuple[int, ...]]:
        """Yield (epoch, first task, count, numbers …) for runs of tasks with equal numbers; skip those with only 0."""
        for epoch, number in sorted({key for one in several for key in one._blocks}):
            columns = [one._blocks.get((epoch, number), _NOTHING) for one in several]
            task = number << _BLOCK_BITS
            for numbers, alike in groupby(zip_longest(*columns, fillvalue=0)):
                count = sum(1 for _ in alike)
                if any(numbers):
                    yield epoch, task, count, *numbers
                task += count

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

    def put(self, epoch: int, numbers: array[int]) -> None:
        """Set the numbers of all tasks of an epoch."""
        for first in range(0, len(numbers), BLOCK_SIZE):
            self._blocks[epoch, first >> _BLOCK_BITS] = array("q", numbers[first : first + BLOCK_SIZE])

    def of_epoch(self, epoch: int, num_tasks: int) -> array[int]:
        """Return the numbers of the first tasks of an epoch."""
        found = array("q")
        for number in range(-(-num_tasks // (BLOCK_SIZE))):
            found.extend(array("q", bytes(8 * ((number << _BLOCK_BITS) - len(found)))))
            found.extend(self._blocks.get((epoch, number), _NOTHING))
        found.extend(array("q", bytes(8 * max(0, num_tasks - len(found)))))
        return found[:num_tasks]

    def last_epoch(self) -> int:
        """Return the newest epoch that has a task with a number other than 0; -1: there is none."""
        return max((epoch for (epoch, _), block in self._blocks.items() if any(block)), default=-1)

    def least(self, other: TaskNumbers) -> TaskNumbers:
        """Return the minimum of both numbers for each task."""
        found = TaskNumbers()
        for key in self._blocks.keys() & other._blocks.keys():
            one, two = self._blocks[key], other._blocks[key]
            found._blocks[key] = one[:] if one == two else array("q", map(min, one, two))
        return found

    def total_of_all(self) -> int:
        """Return the sum of all numbers."""
        return sum(sum(block) for block in self._blocks.values())

    def total(self, epoch: int) -> int:
        """Return the sum of the numbers of an epoch's tasks."""
        return sum(sum(block) for (other, _), block in self._blocks.items() if other == epoch)

    def copy(self) -> TaskNumbers:
        copied = TaskNumbers()
        copied._blocks = {key: block[:] for key, block in self._blocks.items()}
        return copied


def _are_equal(one: array[int], other: array[int]) -> bool:
    """Return whether two arrays are equal if the shorter one is padded with zeros."""
    if len(one) > len(other):
        one, other = other, one
    return one == other[: len(one)] and other.count(0) - one.count(0) == len(other) - len(one)
