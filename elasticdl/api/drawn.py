"""Minibatches as a script draws them, and those that it has drawn and not reported yet, oldest first."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

Name = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """The n-th minibatch of a task: the same records in every worker.

    Attributes:
        lease: under which it was handed out.
        epoch: from 0.
        task: its number in the epoch.
        n: its number in the task.
        shard: name of the part of the source; empty where only a size is known.
        indices: numbers of its records in that part.
        records: the records themselves, where ElasticDL reads them.
        ends_lease: the last one under its lease.
    """

    lease: int
    epoch: int
    task: int
    n: int
    shard: str
    indices: list[int]
    records: list[bytes] = field(default_factory=list, repr=False)
    ends_lease: bool = False

    @property
    def name(self) -> Name:
        """Unique in the job."""
        return (self.epoch, self.task, self.n)

    def __len__(self) -> int:
        return len(self.indices)


class OutstandingMinibatches:
    """Minibatches that are reported in order, by number or by records.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._minibatches: deque[Minibatch] = deque()
        self._records = 0  # reported, beyond the minibatches that were taken
        self._stream = 0  # number of the newest one

    def begin_stream(self) -> int:
        """Forgets all; only the stream of this number may add from now on."""
        with self._lock:
            self._stream += 1
            self._minibatches.clear()
            self._records = 0
            return self._stream

    def add(self, minibatches: Iterable[Minibatch], stream: int | None = None) -> bool:
        """Whether they were added: False if a newer stream has begun."""
        with self._lock:
            if stream not in (None, self._stream):
                return False
            self._minibatches.extend(minibatches)
            return True

    def oldest(self) -> Minibatch | None:
        with self._lock:
            return self._minibatches[0] if self._minibatches else None

    def take_reported(self, num_records: int | None) -> list[Minibatch]:
        """Take the minibatches that a number of further records completes; None: the oldest one, of any size."""
        with self._lock:
            if num_records is None:
                return [self._minibatches.popleft()] if self._minibatches else []
            found = []
            self._records += num_records
            while self._minibatches and self._records >= len(self._minibatches[0]):
                self._records -= len(self._minibatches[0])
                found.append(self._minibatches.popleft())
            return found

    def drop_oldest_task(self) -> Minibatch | None:
        """Takes all of the oldest one's lease; gives that one."""
        with self._lock:
            if not self._minibatches:
                return None
            oldest = self._minibatches[0]
            self._minibatches = deque(other for other in self._minibatches if other.lease != oldest.lease)
            self._records = 0
            return oldest
