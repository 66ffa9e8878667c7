"""The tasks of this worker, from lease to model: the leases it holds, and the records and minibatches of each.

The port `Strategy` makes minibatches part of the model that all workers share.  The input pipeline draws leases in a
thread of its own; a new pipeline draws the unfinished tasks of a discarded one again.  A strategy skips the minibatches
that are in the model already.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from elasticdl.activities import Activity, ActivityClock
from elasticdl.data.reader import Reader
from elasticdl.frameworks.framework import (
    NO_SURPLUS,
    Batch,
    Floats,
    Inference,
    Mode,
    Parameters,
    Surplus,
    TableRows,
    TaskRecords,
)
from elasticdl.protocol import Shard, derive_seed
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.quarantine import Quarantine, inspected
from elasticdl_client.errors import DataError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.worker")
_MODES = {pb.TRAINING: Mode.TRAINING, pb.EVALUATION: Mode.EVALUATION, pb.PREDICTION: Mode.PREDICTION}


@dataclass(slots=True)
class TaskReading:
    """One input pipeline's attempt to read the records of a task.

    Attributes:
        record_numbers: Numbers of the records in the shard, in the order in which `feed` gets them.
        unreadable: Why the records could not be read; None if they could.
    """

    record_numbers: list[int] = field(default_factory=list)
    unreadable: DataError | None = None


@dataclass(slots=True)
class HeldLease:
    """A lease, from its grant to the master's answer to the report of its end."""

    lease: pb.Lease
    committed: set[int] = field(default_factory=set)  # minibatches that are in the model
    reading: TaskReading = field(default_factory=TaskReading)  # by the newest pipeline
    minibatch: int = 0  # the minibatch being computed
    revoked: bool = False

    @property
    def id(self) -> int:
        return self.lease.id

    @property
    def task_name(self) -> str:
        """Name of the task in the log."""
        return f"{pb.TaskType.Name(self.lease.type)} {self.lease.epoch}/{self.lease.task}"

    @property
    def record_numbers(self) -> list[int]:
        """See `TaskReading`."""
        return self.reading.record_numbers

    @property
    def unreadable(self) -> DataError | None:
        """See `TaskReading`."""
        return self.reading.unreadable

    def check_read(self) -> None:
        """Raise if the task's records could not all be read; called when all its minibatches have been taken.

        Raises:
            DataError: records could not be read.
        """
        if self.unreadable is not None:
            raise self.unreadable


class LeaseBook:
    """The held leases, in order of grant.  Thread-safe: the heartbeat, input pipeline and main loop use it."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._held: dict[int, HeldLease] = {}
        self._num_ended = 0

    def add(self, lease: pb.Lease) -> HeldLease:
        held = HeldLease(lease)
        with self._lock:
            self._held[lease.id] = held
        return held

    def get(self, lease_id: int) -> HeldLease | None:
        with self._lock:
            return self._held.get(lease_id)

    def remove(self, lease_id: int) -> None:
        with self._lock:
            self._end(lease_id)

    def revoke(self, lease_ids: Iterable[int]) -> list[HeldLease]:
        """Mark leases as revoked and remove them; return those that were held."""
        with self._lock:
            found = [held for i in lease_ids if (held := self._end(i)) is not None]
        for held in found:
            held.revoked = True
        return found

    def _end(self, lease_id: int) -> HeldLease | None:
        held = self._held.pop(lease_id, None)
        if held is not None:
            self._num_ended += 1
            self._lock.notify_all()
        return held

    @property
    def num_ended(self) -> int:
        """How many leases have ended."""
        return self._num_ended

    def wait_for_end(self, num_known: int, has_come: Callable[[], bool], timeout_s: float) -> None:
        """Wait until more than `num_known` leases have ended, or `has_come` is true; see `wake`."""
        with self._lock:
            self._lock.wait_for(lambda: self._num_ended > num_known or has_come(), timeout_s)

    def wake(self) -> None:
        """Make `wait_for_end` check its condition again."""
        with self._lock:
            self._lock.notify_all()

    def held(self) -> list[HeldLease]:
        with self._lock:
            return list(self._held.values())

    def commit(self, lease_id: int, minibatches: Iterable[int]) -> None:
        with self._lock:
            held = self._held.get(lease_id)
            if held is not None:
                held.committed.update(minibatches)

    def positions(self) -> list[pb.Position]:
        with self._lock:
            return [pb.Position(lease=h.id, minibatch=h.minibatch) for h in self._held.values()]

    def messages(self) -> list[pb.HeldLease]:
        """Return the held leases, to register with a restarted master."""
        with self._lock:
            return [pb.HeldLease(lease=h.lease, committed=sorted(h.committed)) for h in self._held.values()]


class LeaseSource(Protocol):
    """Grants leases: the master, or its substitute in a process without one."""

    leases: LeaseBook

    def request_lease(self) -> HeldLease | None:
        """Wait for a lease and return it; it is held from then on.  None when the job is over."""
        ...

    def lease_at_once(self, only: pb.TaskType) -> HeldLease | None:
        """Return a lease of a type if there is one now; it is held from then on."""
        ...


@dataclass(slots=True)
class TaskProgress:
    """Minibatches of a task that are in the model, or the task's end.

    Attributes:
        num_minibatches: Minibatches of the task, if it has ended; else None.
    """

    lease: int
    committed: list[int]
    loss: float | None = None
    num_minibatches: int | None = None
    surplus: Surplus = NO_SURPLUS


class ProgressLink(Protocol):
    """Receives the reports of a `Reporter`: the master, or its substitute.

    Attributes:
        leases: The leases that are reported on.
        report_s: Minimum seconds between two reports of progress.
    """

    leases: LeaseBook
    report_s: float

    def report(self, progress: Sequence[TaskProgress]) -> Sequence[pb.Ack]:
        """Report the progress of tasks, in this order.

        Returns:
            The answers to the first reports, at least to one.  If the last answer is a rejection, the following reports
            have not been delivered.
        """
        ...


class TaskStream:
    """The open leases of this worker, oldest first, and their minibatches."""

    def __init__(
        self,
        source: LeaseSource,
        reader: Callable[[pb.TaskType], Reader],
        begin: Callable[[HeldLease], None],
        seed: int,
        shuffle: bool,
        clock: ActivityClock,
        quarantine: Quarantine | None = None,
    ) -> None:
        """
        Args:
            reader: Returns the data source for a type of task.
            begin: Called once for each training lease, before its records are read.
            seed: The seed of the job.
            shuffle: Permute the records inside each training task.
            quarantine: Checks tasks for bad records; None: tasks are not checked beforehand.
        """
        self._source = source
        self._reader = reader
        self._begin = begin
        self._seed = seed
        self._shuffle = shuffle
        self._clock = clock
        self._quarantine = quarantine or Quarantine()
        self._asking = threading.Lock()  # one request at a time
        self._lock = threading.Lock()  # never held during a wait for the master
        self._open: list[HeldLease] = []
        self._over = False

    @classmethod
    def of(
        cls,
        spec: JobSpec,
        source: LeaseSource,
        reader: Callable[[pb.TaskType], Reader],
        clock: ActivityClock,
        begin: Callable[[HeldLease], None] = lambda held: None,
    ) -> TaskStream:
        """Return the stream of a job whose model a module defines; see the constructor."""
        return cls(source, reader, begin, spec.seed, spec.shuffle, clock, Quarantine.of(spec))

    def peek(self) -> HeldLease | None:
        """Return the oldest open lease; wait for one if there is none.  None when the job is over."""
        return self._first_unseen(set())

    def peek_at_once(self, task_type: pb.TaskType) -> HeldLease | None:
        """Return the oldest open lease, else a new one of a type if the master has one now, else None."""
        return self._first_unseen(set(), task_type)

    def reopen(self, leases: Sequence[HeldLease]) -> None:
        """Open leases that were closed, or belong to another stream, before all others."""
        with self._lock:
            known = {held.id for held in self._open}
            self._keep_open([*(held for held in leases if held.id not in known), *self._open])

    @property
    def is_over(self) -> bool:
        """Whether the master has said that there is no more work."""
        return self._over

    def close(self, held: HeldLease) -> None:
        """Close a lease that is done, has failed, or is lost."""
        with self._lock:
            self._keep_open([other for other in self._open if other is not held])

    def records(self, task_type: pb.TaskType, may_wait: Callable[[], bool] = lambda: True) -> Iterator[TaskRecords]:
        """Yield the records of consecutive leases of a type; end at the first lease of another type, which stays open.

        Args:
            may_wait: Called when no open lease is left; if it returns False, and the master has none now, end.
        """
        seen: set[int] = set()
        while True:
            held = self._first_unseen(seen, None if may_wait() else task_type)
            if held is None or held.lease.type != task_type or held.lease.merged:
                return
            seen.add(held.id)
            yield self._read(held)

    def batches(
        self, framework: Inference, task_type: pb.TaskType, records: Iterator[TaskRecords]
    ) -> Generator[Batch, None, None]:
        """Return the minibatches of `records`, checked by the quarantine; see `Framework.batches`.

        Raises:
            FeedError: see `inspected`.
        """
        return inspected(framework, _MODES[task_type], records, self._quarantine)

    def by_task(
        self,
        framework: Inference,
        task_type: pb.TaskType,
        is_leaving: Callable[[], bool] = lambda: False,
        may_wait: Callable[[], bool] = lambda: True,
    ) -> Iterator[tuple[HeldLease, TaskBatches]]:
        """Yield consecutive leases of a type, each with its minibatches; skip the rest of a lost lease.

        Args:
            is_leaving: Whether the worker terminates; no more minibatches then.
            may_wait: See `records`.

        Raises:
            FeedError: see `inspected`.
        """
        batches = self.batches(framework, task_type, self.records(task_type, may_wait))
        while True:
            with self._clock.during(Activity.INPUT):
                first = next(batches, None)
            if first is None:
                return
            held = self._source.leases.get(first.lease)
            if held is not None:
                yield held, TaskBatches(held, first, batches, self._clock, is_leaving)

    def _first_unseen(self, seen: set[int], at_once: pb.TaskType | None = None) -> HeldLease | None:
        """Return the oldest open lease not in `seen`, else a new one.

        Args:
            at_once: If given, do not wait: return a lease of this type if the master has one now.
        """
        with self._asking:
            with self._lock:
                self._keep_open([held for held in self._open if self._source.leases.get(held.id) is held])
                seen.intersection_update([held.id for held in self._open])  # else it grows with the job
                unseen = next((held for held in self._open if held.id not in seen), None)
            if unseen is not None or self._over:
                return unseen
            with self._clock.without_task():
                held = self._source.request_lease() if at_once is None else self._source.lease_at_once(at_once)
            if held is None:
                self._over = at_once is None
                return None
            with self._lock:
                self._keep_open([*self._open, held])
            return held

    def _keep_open(self, leases: list[HeldLease]) -> None:
        self._clock.add_tasks(len(leases) - len(self._open))
        self._open = leases

    def _read(self, held: HeldLease) -> TaskRecords:
        lease = held.lease
        seed = derive_seed(self._seed, lease.epoch, lease.task)
        records: Sequence[bytes] = ()
        # A discarded pipeline that still reads the same lease has a `TaskReading` of its own.
        reading = held.reading = TaskReading()
        try:
            if lease.type == pb.TRAINING:
                self._begin(held)
            shard = Shard(lease.shard.name, lease.shard.start, lease.shard.end, lease.shard.identity)
            records = self._reader(lease.type).read(shard)
        except DataError as error:
            _log.error("%s", error)
            reading.unreadable = error
        except LeaseLost:
            self._source.leases.revoke((held.id,))
        order = np.arange(len(records))
        if lease.excluded:
            order = np.setdiff1d(order, np.array(lease.excluded) - lease.shard.start, assume_unique=True)
        if self._shuffle and lease.type == pb.TRAINING:
            np.random.Generator(np.random.PCG64(seed)).shuffle(order)  # of an array: a list takes 150 times as long
        reading.record_numbers = (order + lease.shard.start).tolist()
        records = [records[i] for i in order.tolist()]
        return TaskRecords(lease.id, seed, records, lease.shard.name, reading.record_numbers)


def sample_of(reader: Reader, shard: Shard, seed: int) -> TaskRecords:
    """Return some records, without a lease.

    Args:
        seed: The seed of the job.

    Raises:
        DataError: the records cannot be read.
    """
    numbers = range(shard.start, shard.end)
    return TaskRecords(0, derive_seed(seed, 0, 0), reader.read(shard), shard.name, numbers)


def sample_batches(framework: Inference, mode: Mode, sample: TaskRecords) -> list[Batch]:
    """Return the minibatches of a sample.

    Raises:
        FeedError: see `inspected`.
    """
    return [batch for batch in inspected(framework, mode, iter((sample,)), Quarantine()) if batch.size]


class LeaseLost(Exception):
    """The current lease is no longer this worker's: results computed under it are dropped."""


class NotFinite(ArithmeticError):
    """A minibatch whose gradient is not finite: it is not applied, and the job ends."""

    def __init__(self, minibatch: int, what: str) -> None:
        super().__init__(what)
        self.minibatch = minibatch


class TaskBatches(Iterator[Batch]):
    """Iterates over the minibatches of one lease, without its closing element.

    Raises from `__next__`:
        LeaseLost: the lease was taken back.
        FeedError: user code raised.
    """

    def __init__(
        self,
        held: HeldLease,
        first: Batch,
        rest: Iterator[Batch],
        clock: ActivityClock,
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            is_leaving: See `TaskStream.by_task`.
        """
        self.num_minibatches: int | None = None  # known once the closing element was reached
        self.surplus = NO_SURPLUS  # known then, too
        self._is_leaving = is_leaving
        self._held = held
        self._first: Batch | None = first
        self._rest = rest
        self._clock = clock

    @property
    def is_cut_short(self) -> bool:
        """Whether the rest of the task should not be computed."""
        return self._is_leaving()

    def __next__(self) -> Batch:
        while self.num_minibatches is None and not self.is_cut_short:
            if self._held.revoked:
                raise LeaseLost
            batch = self._take()
            if batch.end:
                self.num_minibatches, self.surplus = batch.n, batch.surplus
            elif batch.n not in self._held.committed:
                return batch
        raise StopIteration

    def _take(self) -> Batch:
        if self._first is not None:
            batch, self._first = self._first, None
            return batch
        with self._clock.during(Activity.INPUT):
            return next(self._rest)


Commit = Callable[[int, float | None], None]  # called with (minibatch, loss) once it is in the model


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a model for evaluation or export; by default those of the framework itself.

    Attributes:
        parameters: None: those of the framework.
        rows: Returns the embedding rows of a minibatch, by table.
    """

    parameters: Parameters | None = None
    rows: Callable[[Batch], Mapping[str, Floats]] = lambda batch: {}


class ValueSource(Protocol):
    """Provides the values of a model to the tasks that read it.

    Raises `LeaseLost` if a lease is given that is no longer this worker's.
    """

    def values(self, held: HeldLease) -> Values:
        """Return the current values of the model."""
        ...

    def close(self) -> None:
        """Finish: the job is over, or this worker leaves."""
        ...


class OwnValues:
    """The `ValueSource` of a model in the memory of this process."""

    def values(self, held: HeldLease) -> Values:
        return Values()

    def close(self) -> None:
        """Do nothing."""


class ReadableModel(ValueSource, Protocol):
    """A model for evaluation and export to read, which may be trained meanwhile."""

    def tables(self, held: HeldLease) -> list[TableRows]:
        """Return the embedding tables; rows are read when their chunks are taken."""
        ...


class Strategy(ReadableModel, Protocol):
    """Makes minibatches part of the model that all workers share; see `ValueSource`."""

    def begin(self, held: HeldLease) -> None:
        """Begin a task: set ``held.committed`` to those of its minibatches that are in the model."""
        ...

    def train_task(self, held: HeldLease, batches: TaskBatches, commit: Commit) -> None:
        """Train the minibatches; on return all, or those before the cut, are in the model and committed."""
        ...

    def save_last(self) -> None:
        """Write the last checkpoint of the trained model, if this worker holds the model.

        Raises:
            LastCheckpointError: it cannot be written.
        """
        ...
