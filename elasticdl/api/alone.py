"""A job of one process without a master: the same tasks in the same order, granted and counted in memory.

It stands in for the link to a master, so that a script that knows of ElasticDL runs by itself, too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from elasticdl.frameworks.framework import Surplus
from elasticdl.protocol.values import REPORT_S, Shard
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.leases import HeldLease, LeaseBook
from elasticdl.worker.seeds import task_order
from elasticdl_client.errors import JobError


class AloneLink:
    """Grants every task of the plan once per epoch; a failure ends the script, as no other process could retry it."""

    def __init__(self, shards: Sequence[Shard], plan: pb.Plan, seed: int) -> None:
        self.leases = LeaseBook()
        self.report_s = REPORT_S
        self._tasks = tasks_of(shards, plan)
        self._plan = plan
        self._seed = seed
        self._lock = threading.Lock()
        self._num_committed = 0
        self._granted: Iterator[pb.Lease] = self._grants()

    def request_lease(self) -> HeldLease | None:
        with self._lock:
            lease = next(self._granted, None)
            return None if lease is None else self.leases.add(lease)

    def lease_at_once(self, only: pb.TaskType) -> HeldLease | None:
        return self.request_lease()

    def report_progress(
        self, lease: int, committed: list[int], loss: float | None, skipped: Sequence[int] = (), not_finite: str = ""
    ) -> pb.Ack:
        self._num_committed += len(committed)
        return pb.Ack(accepted=True, model_version=self._num_committed)

    def finish(self, lease: int, num_minibatches: int, surplus: Surplus) -> pb.Ack:
        return pb.Ack(accepted=True, model_version=self._num_committed)

    def fail(self, lease: int, minibatch: int, error: str, details: str, bad_records: list[int]) -> pb.Ack:
        raise JobError(f"minibatch {minibatch} failed: {error}")

    def stop_training(self, reason: str) -> pb.Ack:
        with self._lock:
            self._granted = iter(())
        return pb.Ack(accepted=True, model_version=self._num_committed)

    def _grants(self) -> Iterator[pb.Lease]:
        epoch = number = 0
        while self._plan.num_epochs <= 0 or epoch < self._plan.num_epochs:
            for task in task_order(self._seed, epoch, len(self._tasks)):
                number += 1
                shard = self._tasks[task]
                message = pb.ShardMessage(name=shard.name, start=shard.start, end=shard.end)
                yield pb.Lease(id=number, type=pb.TRAINING, epoch=epoch, task=task, shard=message)
            epoch += 1


def tasks_of(shards: Sequence[Shard], plan: pb.Plan) -> list[Shard]:
    """The tasks of an epoch, as a master cuts them."""
    size = plan.minibatch_size * plan.num_minibatches_per_task
    return [
        Shard(shard.name, start, min(start + size, shard.end))
        for shard in sorted(shards)
        for start in range(shard.start, shard.end, size)
    ]
