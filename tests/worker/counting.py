"""A framework whose records are numbers, and a minibatch the list of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Batch, FeedError, Mode, Surplus, TaskRecords
from elasticdl.protocol import Shard
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl_client.errors import DataError


def lease(number: int, length: int = 4, task_type: pb.TaskType = pb.TRAINING, life: int = 0) -> pb.Lease:
    """Of the records from 100 times its task on.

    Args:
        life: of the task, which may be granted again.
    """
    shard = pb.ShardMessage(name="s", start=100 * number, end=100 * number + length)
    return pb.Lease(id=1000 + 4000 * life + number, type=task_type, task=number, shard=shard)


@dataclass
class Numbers:
    """A reader whose records are their own numbers.

    Attributes:
        torn: shards that begin there cannot be read.
    """

    torn: set[int] = field(default_factory=set)

    def shards(self) -> list[Shard]:
        return [Shard("s", 0, 10_000)]

    def read(self, shard: Shard) -> list[bytes]:
        if shard.start in self.torn:
            raise DataError(f"the records from {shard.start} on are torn")
        return [str(number).encode() for number in range(shard.start, shard.end)]

    def metadata(self) -> Metadata:
        return Metadata()


@dataclass
class Counting:
    """The parts of a framework that a feeder needs.

    Attributes:
        bad: user code raises on these records.
        dropped: the user's filter takes these away.
        repeated: the user's feed makes a second sample of these, at the end of the task.
        breaks_at: our own code raises on this one.
        made: every minibatch made, by lease and number.
    """

    size: int = 2
    bad: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    repeated: set[int] = field(default_factory=set)
    breaks_at: int = -1
    made: list[tuple[int, int]] = field(default_factory=list)

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        for task in tasks:
            numbers = [int(record) for record in task.records if int(record) not in self.dropped]
            numbers += [number for number in numbers if number in self.repeated]
            starts = range(0, len(numbers), self.size)
            for n, start in enumerate(starts):
                yield self._batch(task.lease, n, numbers[start : start + self.size])
            surplus = Surplus(len(numbers) - len(task.records), "filter" if self.dropped else "")
            yield Batch(task.lease, len(starts), end=True, surplus=surplus)

    def _batch(self, lease_id: int, n: int, numbers: list[int]) -> Batch:
        if self.breaks_at in numbers:
            raise AssertionError("a mistake of ours")
        if found := self.bad.intersection(numbers):
            raise FeedError(lease_id, n, f"ValueError: ugly {min(found)}") from ValueError(f"ugly {min(found)}")
        self.made.append((lease_id, n))
        return Batch(lease_id, n, size=len(numbers), data=numbers)
