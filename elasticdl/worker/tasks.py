"""The stream of leases as a worker works them off: in order of grant, each taken once, prefetched by one.

The input pipeline draws from it in a thread of its own; what a thrown-away pipeline had drawn and not finished is
drawn again by the next one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from elasticdl.data.reader import Reader, Shard
from elasticdl.frameworks.framework import TaskRecords
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.activity import ActivityClock
from elasticdl.worker.batches import LeaseLost
from elasticdl.worker.leases import HeldLease
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.seeds import derive_seed
from elasticdl_client.errors import DataError

_log = logging.getLogger("elasticdl.worker")


class TaskStream:
    """Leases that are open at this worker, oldest first."""

    def __init__(
        self,
        link: MasterLink,
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
        self._lock = threading.Lock()
        self._open: list[HeldLease] = []
        self._over = False
        self.errors: dict[int, DataError] = {}  # by lease: why its records could not be read

    def peek(self) -> HeldLease | None:
        """The oldest open lease, waiting for one if need be; None when the job is over."""
        with self._lock:
            return self._first_unseen(set())

    def close(self, held: HeldLease) -> None:
        """The lease has been worked off, has failed or is lost."""
        with self._lock:
            self._open = [other for other in self._open if other is not held]
            self.errors.pop(held.id, None)

    def records(self, task_type: pb.TaskType) -> Iterator[TaskRecords]:
        """Records of consecutive leases of a type; ends at the first lease of another type, which stays open."""
        seen: set[int] = set()
        while True:
            with self._lock:
                held = self._first_unseen(seen)
            if held is None or held.lease.type != task_type or held.lease.merged:
                return
            seen.add(held.id)
            yield self._read(held)

    def _first_unseen(self, seen: set[int]) -> HeldLease | None:
        self._open = [held for held in self._open if not held.revoked]
        for held in self._open:
            if held.id not in seen:
                return held
        if self._over:
            return None
        with self._clock.without_task():
            lease = self._link.request_lease()
        if lease is None:
            self._over = True
            return None
        held = self._link.leases.add(lease)
        self._open.append(held)
        return held

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
        excluded = {number - lease.shard.start for number in lease.excluded}
        order = [i for i in range(len(records)) if i not in excluded]
        if self._shuffle and lease.type == pb.TRAINING:
            np.random.Generator(np.random.PCG64(seed)).shuffle(order)
        held.record_numbers = [lease.shard.start + i for i in order]
        return TaskRecords(lease.id, seed, [records[i] for i in order])
