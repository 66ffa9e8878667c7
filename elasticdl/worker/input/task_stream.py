"""From leases to minibatches: leases in order of grant, each taken once, prefetched, and the minibatches of one task.

The input pipeline draws from the stream of leases in a thread of its own; unfinished tasks of a discarded pipeline are
drawn again by the next one.  A strategy takes the minibatches without those that the model holds already.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from elasticdl.data.reader import Reader
from elasticdl.frameworks.framework import NO_SURPLUS, Batch, TaskRecords
from elasticdl.protocol import Shard
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.activity import Activity, ActivityClock
from elasticdl.worker.leases import HeldLease, LeaseBook, LeaseLink
from elasticdl.worker.ledger import derive_seed
from elasticdl_client.errors import DataError

_log = logging.getLogger("elasticdl.worker")


class TaskStream:
    """Leases that are open at this worker, oldest first."""

    def __init__(
        self,
        link: LeaseLink,
        reader: Callable[[pb.TaskType], Reader],
        begin: Callable[[HeldLease], None],
        seed: int,
        shuffle: bool,
        clock: ActivityClock,
    ) -> None:
        """
        Args:
            reader: the data source of a type of task.
            begin: called once when a training lease is taken, before its records are read.
            seed: the job's.
            shuffle: permute the records inside each training task.
        """
        self._link = link
        self._reader = reader
        self._begin = begin
        self._seed = seed
        self._shuffle = shuffle
        self._clock = clock
        self._asking = threading.Lock()  # one request at a time
        self._lock = threading.Lock()  # never held while the master is waited for
        self._open: list[HeldLease] = []
        self._over = False
        self.errors: dict[int, DataError] = {}  # by lease: why its records could not be read

    def peek(self) -> HeldLease | None:
        """The oldest open lease, waiting for one if need be; None when the job is over."""
        return self._first_unseen(set())

    def peek_at_once(self, task_type: pb.TaskType) -> HeldLease | None:
        """The oldest open lease, else one of a type if the master has one now."""
        return self._first_unseen(set(), task_type)

    def reopen(self, leases: Sequence[HeldLease]) -> None:
        """Leases that were closed, or of another stream, are open here, before all others."""
        with self._lock:
            known = {held.id for held in self._open}
            self._keep_open([*(held for held in leases if held.id not in known), *self._open])

    @property
    def is_over(self) -> bool:
        """The master has said that there is no more work."""
        return self._over

    def close(self, held: HeldLease) -> None:
        """The lease has been worked off, has failed or is lost."""
        with self._lock:
            self._keep_open([other for other in self._open if other is not held])
            self.errors.pop(held.id, None)

    def records(self, task_type: pb.TaskType, may_wait: Callable[[], bool] = lambda: True) -> Iterator[TaskRecords]:
        """Records of consecutive leases of a type; ends at the first lease of another type, which stays open.

        Args:
            may_wait: asked when there is no open lease left; if not, and the master has none at once, this is the end.
        """
        seen: set[int] = set()
        while True:
            held = self._first_unseen(seen, None if may_wait() else task_type)
            if held is None or held.lease.type != task_type or held.lease.merged:
                return
            seen.add(held.id)
            yield self._read(held)

    def _first_unseen(self, seen: set[int], at_once: pb.TaskType | None = None) -> HeldLease | None:
        """The oldest open lease not seen yet, else a new one.

        Args:
            at_once: not None: a lease of this type, if the master has one now.
        """
        with self._asking:
            with self._lock:
                self._keep_open([held for held in self._open if self._link.leases.get(held.id) is held])
                unseen = next((held for held in self._open if held.id not in seen), None)
            if unseen is not None or self._over:
                return unseen
            with self._clock.without_task():
                held = self._link.request_lease() if at_once is None else self._link.lease_at_once(at_once)
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
        try:
            if lease.type == pb.TRAINING:
                self._begin(held)
            shard = Shard(lease.shard.name, lease.shard.start, lease.shard.end)
            records = self._reader(lease.type).read(shard)
        except DataError as error:
            _log.error("%s", error)
            self.errors[held.id] = error
        except LeaseLost:
            self._link.leases.revoke((held.id,))
        order = np.arange(len(records))
        if lease.excluded:
            order = np.setdiff1d(order, np.array(lease.excluded) - lease.shard.start, assume_unique=True)
        if self._shuffle and lease.type == pb.TRAINING:
            np.random.Generator(np.random.PCG64(seed)).shuffle(order)  # of a list it takes 150 times as long
        held.record_numbers = (order + lease.shard.start).tolist()
        records = [records[i] for i in order.tolist()]
        return TaskRecords(lease.id, seed, records, lease.shard.name, held.record_numbers)


class LeaseLost(Exception):
    """The lease being worked on is no longer ours: results computed under it are dropped."""


class NotFinite(ArithmeticError):
    """A minibatch whose gradient would spoil the model: it is not pushed, and the job ends."""

    def __init__(self, minibatch: int, what: str) -> None:
        super().__init__(what)
        self.minibatch = minibatch


class TaskBatches(Iterator[Batch]):
    """Iterates over the minibatches of one lease, up to and without its closing element.

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
            is_leaving: the worker is terminating: no more minibatches.
        """
        self.num_minibatches: int | None = None  # known when the closing element was reached
        self.surplus = NO_SURPLUS  # the same
        self._is_leaving = is_leaving
        self._held = held
        self._first: Batch | None = first
        self._rest = rest
        self._clock = clock

    @classmethod
    def by_task(
        cls,
        batches: Iterator[Batch],
        leases: LeaseBook,
        clock: ActivityClock,
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[HeldLease, TaskBatches]]:
        """Those of consecutive leases, each with its own; the rest of a lost lease is skipped.

        Args:
            batches: as `Framework.batches` gives them.
        """
        while True:
            with clock.during(Activity.INPUT):
                first = next(batches, None)
            if first is None:
                return
            held = leases.get(first.lease)
            if held is not None:
                yield held, cls(held, first, batches, clock, is_leaving)

    @property
    def is_cut_short(self) -> bool:
        """Whether the rest of the task need not be computed."""
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
