"""Leases: the holder of each task, since when, and the newest lease of each task.

Ids are generation << 32 | counter, so they grow over all generations of the master.  This module knows neither the
content of a task nor what happens to a task whose lease ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elasticdl.master.core.group.groups import WorkerGroups
from elasticdl.master.core.plan.tasks import Tasks
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import Lease, MetricArrays, Occasion, Position, TaskType
from elasticdl.master.core.workers import MOST_AHEAD, Worker, Workers
from elasticdl.protocol import Shard

MIN_PER_WORKER = 2  # the one being computed, and a prefetched one
MAX_FINISHED = 1024  # kept finished leases, so that repeated reports are recognised
MAX_UNWRITTEN = 10_000  # leases that a generation of the master may have granted after its last journal, in a second

TaskKey = tuple[TaskType, int, int]  # type, epoch, task


def key_of(lease: Lease) -> TaskKey:
    return (lease.type, lease.epoch, lease.task)


@dataclass(slots=True)
class Holding:
    """A lease in force."""

    lease: Lease
    worker_id: int
    renewed_at: float
    call: int | None  # the request that it answered, until the worker has named the lease
    request: int = 0  # the worker's number of that request


class Leases:
    """All leases in force, and the ids of recent finished ones."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._counter = 0
        self.newest_before: int | None = None  # of earlier generations, as journalled; None if it was not
        self.floor = 0  # leases up to this id are of a model that has lost something since
        self._holdings: dict[int, Holding] = {}
        self._by_task: dict[TaskKey, int] = {}
        self._by_worker: dict[int, dict[int, Holding]] = {}
        self._by_call: dict[int, Holding] = {}
        self._num_busy: Counter[TaskType] = Counter()
        self._finished: dict[int, None] = {}  # in order of their ends
        self._shrunk: set[int] = set()  # workers that have lost or ended a lease since the last `take_shrunk`
        self.is_shared = False  # AllReduce: a worker may hold more, for its group
        self.most_per_worker = MIN_PER_WORKER  # without groups

    def grant(
        self,
        worker_id: int,
        call: int,
        clock: float,
        key: TaskKey,
        shard: Shard,
        version: int,
        merged: tuple[MetricArrays, ...] = (),
        excluded: Iterable[int] = (),
        committed: Iterable[int] = (),
        occasion: Occasion | None = None,
    ) -> Lease:
        """Grant a new lease as the answer to `call`."""
        self._counter += 1
        lease = Lease(self.newest, *key, shard, tuple(sorted(excluded)), version, merged, tuple(committed), occasion)
        self.hold(lease, worker_id, clock, call)
        return lease

    @property
    def newest(self) -> int:
        """The newest granted id; if this generation has granted none, the end of earlier generations' ids."""
        return (self.generation << 32) | self._counter

    @property
    def newest_known(self) -> int | None:
        """For the journal: the newest lease id of all generations; None if unknown."""
        return self.newest if self._counter else self.newest_before

    def may_be_of_earlier_generation(self, lease_id: int) -> bool:
        """Return whether an earlier generation of the master can have granted a lease; its journal may lack some."""
        generation, counter = divmod(lease_id, 1 << 32)
        if generation >= self.generation or lease_id <= self.floor:
            return False
        if self.newest_before is None:
            return True
        last, known = divmod(self.newest_before, 1 << 32)
        return generation < last or counter <= MAX_UNWRITTEN + (known if generation == last else 0)

    def hold(self, lease: Lease, worker_id: int, clock: float, call: int | None = None) -> None:
        assert key_of(lease) not in self._by_task, f"granted twice: {lease}"
        holding = self._holdings[lease.id] = Holding(lease, worker_id, clock, call)
        self._by_task[key_of(lease)] = lease.id
        if call is not None:
            self._by_call[call] = holding
        self._count_busy(worker_id, -1)
        self._by_worker.setdefault(worker_id, {})[lease.id] = holding
        self._count_busy(worker_id, 1)

    def _count_busy(self, worker_id: int, sign: int) -> None:
        """Add a worker to those that are busy with a type of task (`sign` 1), or remove it (-1)."""
        if held := self._by_worker.get(worker_id):
            self._num_busy[held[min(held)].lease.type] += sign

    def get(self, lease_id: int, worker_id: int) -> Lease | None:
        """Return the lease if it is in force and this worker's, else None."""
        holding = self._holdings.get(lease_id)
        return holding.lease if holding is not None and holding.worker_id == worker_id else None

    def of_task(self, key: TaskKey) -> Lease | None:
        lease_id = self._by_task.get(key)
        return None if lease_id is None else self._holdings[lease_id].lease

    def of_worker(self, worker_id: int) -> list[Lease]:
        return [holding.lease for holding in self._by_worker.get(worker_id, {}).values()]

    def num_of_worker(self, worker_id: int) -> int:
        return len(self._by_worker.get(worker_id, ()))

    def take_shrunk(self) -> set[int]:
        """Return the workers that have lost or ended a lease since the last call."""
        shrunk, self._shrunk = self._shrunk, set()
        return shrunk

    def of_type(self, task_type: TaskType) -> list[Lease]:
        return [holding.lease for holding in self._holdings.values() if holding.lease.type is task_type]

    def num_busy(self, task_type: TaskType) -> int:
        """Return the number of workers whose oldest lease is of a type: they process leases in the order of grants."""
        return self._num_busy[task_type]

    def note_request(self, lease: Lease, number: int) -> None:
        """Record the request that was answered with a lease."""
        self._holdings[lease.id].request = number

    def never_received(self, worker_id: int, oldest_request: int, held: Sequence[int]) -> list[Lease]:
        """Return the leases of a worker that were granted in lost answers.

        Args:
            oldest_request: The answers to all requests before this one have arrived or never will.
            held: Ids of the leases that the worker has from those answers.
        """
        return [
            one.lease
            for one in self._by_worker.get(worker_id, {}).values()
            if one.call is not None and one.request < oldest_request and one.lease.id not in held
        ]

    def answered_by(self, call: int) -> Lease | None:
        """Return the lease that was the answer to a call."""
        holding = self._by_call.get(call)
        return None if holding is None else holding.lease

    def all(self) -> list[Lease]:
        return [holding.lease for holding in self._holdings.values()]

    def raise_floor(self) -> None:
        """Forbid every generation of the master to hold a lease granted so far again."""
        self.floor = self.newest

    def end(self, lease: Lease) -> None:
        holding = self._holdings.pop(lease.id)
        del self._by_task[key_of(lease)]
        self._forget_call(holding)
        worker_id = holding.worker_id
        self._shrunk.add(worker_id)
        self._count_busy(worker_id, -1)
        del self._by_worker[worker_id][lease.id]
        self._count_busy(worker_id, 1)
        if not self._by_worker[worker_id]:
            del self._by_worker[worker_id]

    def _forget_call(self, holding: Holding) -> None:
        if holding.call is not None:
            del self._by_call[holding.call]
            holding.call = None

    def finish(self, lease: Lease) -> None:
        self.end(lease)
        self._finished[lease.id] = None
        if len(self._finished) > MAX_FINISHED:
            del self._finished[next(iter(self._finished))]

    def has_finished(self, lease_id: int) -> bool:
        """Return whether a lease has finished recently: a repeated report under it is accepted without effect."""
        return lease_id in self._finished

    def renew(self, worker_id: int, positions: Sequence[Position], clock: float) -> tuple[int, ...]:
        """Renew the leases that a heartbeat names; return the ids of those that are no longer this worker's."""
        revoked = []
        for position in positions:
            holding = self._holdings.get(position.lease)
            if holding is not None and holding.worker_id == worker_id:
                holding.renewed_at = clock
                self._forget_call(holding)
            elif not self.has_finished(position.lease):
                revoked.append(position.lease)
        return tuple(revoked)

    def renew_one(self, lease: Lease, clock: float) -> None:
        self._holdings[lease.id].renewed_at = clock

    def expired(self, before: float) -> list[Lease]:
        return [holding.lease for holding in self._holdings.values() if holding.renewed_at < before]

    def holder_of(self, lease: Lease) -> int:
        return self._holdings[lease.id].worker_id

    def snapshot(self) -> list[list[Any]]:
        """Return id, worker, type, epoch, task and model version of each lease."""
        return [[h.lease.id, h.worker_id, *key_of(h.lease), h.lease.model_version] for h in self._holdings.values()]

    def validate(self) -> None:
        assert sorted(self._by_task.values()) == sorted(self._holdings)
        of_workers = [lease_id for held in self._by_worker.values() for lease_id in held]
        assert sorted(of_workers) == sorted(self._holdings)
        assert {h.call for h in self._by_call.values()} == set(self._by_call)
        oldest = Counter(held[min(held)].lease.type for held in self._by_worker.values())
        assert +self._num_busy == oldest, (self._num_busy, oldest)
        for holding in self._holdings.values():
            assert self._by_task[key_of(holding.lease)] == holding.lease.id
            assert holding.lease.id >> 32 <= self.generation
            assert holding.lease.id > self.floor
            assert len(self.of_worker(holding.worker_id)) <= self.most_per_worker + MOST_AHEAD or self.is_shared


def most_per_worker(settings: JobSettings, ahead: int = 0) -> int:
    """Return the most leases of a worker: one computed, one to finish, and with `--input_workers` one for each process.

    Args:
        ahead: Number of tasks for the worker's own input processes.
    """
    return MIN_PER_WORKER + max(settings.input_workers, ahead)


class LeaseQuota:
    """Limits the leases of a worker: its task and those that it prepares; in groups only members have any."""

    def __init__(self, settings: JobSettings, leases: Leases, groups: WorkerGroups, workers: Workers) -> None:
        self._settings = settings
        self._leases = leases
        self._groups = groups
        self._workers = workers

    def may_ask(self, worker: Worker, tasks: Tasks) -> bool:
        """Return whether a worker holds fewer leases than it may."""
        held = self._leases.of_worker(worker.id)
        if not self._settings.has_groups:
            return len(held) < self._most(worker, tasks)
        if not self._groups.is_member(worker.id):
            return False
        if worker.only is TaskType.EVALUATION:
            return self.may_evaluate(worker)
        if not self._settings.fixed_global_batch:
            return sum(lease.type is not TaskType.EVALUATION for lease in held) < self._most(worker, tasks)
        return True

    def _most(self, worker: Worker, tasks: Tasks) -> int:
        """Return the most leases of a worker; near the end of the plan only its share, so that others have work."""
        most = most_per_worker(self._settings, worker.ahead)
        if most == MIN_PER_WORKER or tasks.can_begin:
            return most
        return min(most, MIN_PER_WORKER + self._share(tasks))

    def _share(self, tasks: Tasks) -> int:
        """Return a worker's share of the remaining tasks, as far as it matters."""
        settings = self._settings
        num_processes = max(settings.num_workers * settings.processes_per_worker, self._workers.num_known)
        num_workers = len(self._groups.members) if settings.has_groups else num_processes
        return min(tasks.num_todo // max(1, num_workers), MOST_AHEAD + settings.input_workers)

    def outlook(self, tasks: Tasks) -> tuple[object, ...]:
        """Return the inputs of `may_ask` beside the worker: while they are equal, a worker at its limit stays there."""
        group = (self._groups.stands, self._groups.newest_version) if self._settings.has_groups else ()
        return (*group, -1 if tasks.can_begin else self._share(tasks))

    def may_evaluate(self, worker: Worker) -> bool:
        """Return whether a worker may evaluate; in groups, in addition to its training."""
        held = self._leases.of_worker(worker.id)
        return not self._settings.has_groups or sum(one.type is TaskType.EVALUATION for one in held) < MIN_PER_WORKER

    def may_train(self, worker: Worker, tasks: Tasks) -> bool:
        """Return whether a worker may train; with --fixed_global_batch only rank 0 does, for the whole group."""
        settings = tasks.settings
        if not settings.has_groups or not settings.fixed_global_batch:
            return True
        held = [lease for lease in self._leases.of_worker(worker.id) if lease.type is TaskType.TRAINING]
        missing = sum(tasks.num_missing((lease.epoch, lease.task)) for lease in held)
        step = settings.fixed_global_batch // settings.minibatch_size
        ahead = (most_per_worker(settings, worker.ahead) - 1) * settings.num_minibatches_per_task
        return worker.id == self._groups.members[0] and missing < step + ahead

    def all_held_by(self, worker_id: int, tasks: Tasks) -> tuple[int, int]:
        """With a fixed global batch: of how many epochs every task is done or a worker's, and its newest lease."""
        if not tasks.settings.fixed_global_batch or worker_id not in self._groups.members[:1]:
            return 0, 0
        held = [lease for lease in self._leases.of_worker(worker_id) if lease.type is TaskType.TRAINING]
        own = {(lease.epoch, lease.task) for lease in held}
        return tasks.num_whole(own), max((lease.id for lease in held), default=0)
