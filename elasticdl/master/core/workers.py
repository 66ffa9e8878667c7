"""Workers: registrations, heartbeats, and lease requests.

A worker is known by its id and the incarnation of its process.  Pods are in fleet/pods.py, leases in ledger/leases.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from elasticdl.master.core.events import LeaseRequested
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.slot_time import SlotTimes
from elasticdl.master.core.values import MessagePace, Position, TaskType
from elasticdl.protocol import HEARTBEAT_S, REPORT_S, Device

MOST_PER_SECOND = 500.0  # heartbeats of all workers, and as many reports: a message takes the master about 0.6 ms
LONGEST_PAUSE = 2.0  # seconds; hangs.py and slot_time.py take a longer silence for a hang or a loss
MOST_AHEAD = 64  # tasks that a worker may hold for its input processes


@dataclass(slots=True)
class Worker:
    """A worker process.

    Attributes:
        moved_at: Time of the last change of its positions or the last grant of a lease.
        stuck_since: When its heartbeats showed that it hangs and its leases were revoked; None if it does not hang.
        has_joined: Whether it has registered in this generation of the master, not only in an earlier one.
        is_leaving: It was ended from outside, or ends by itself, and gets no more tasks.
        has_ended: Its script has ended, so it sends no heartbeats.
        only: Task type that its request asks for; None means any.
        request_number: Number that the worker gave to its newest lease request.
        ahead: Number of tasks that its own input processes prepare, as last reported.
        group_version: Version of the group that it is in, as last reported; 0 means none.
        collective_seconds: How long it had been inside the current collective at its last heartbeat.
        device: Accelerator of its model, as last reported; None means none.
        optimizer_share: Its share of the optimizer's state, as last reported; 0 if the state is not sharded.
        checkpoint_attempt: Number of its newest reported checkpoint attempt, over all generations of the master.
        has_ledger: Whether it has reported the ledger of its own model.
        is_ending: It reported that it was asked to end and has to agree with other members on the last checkpoint.
        reached: Number of records that were done when it last had a part in a commit of training; 0 again once another
            worker has failed.
        num_minibatches: Minibatches that it has computed and that were committed in this generation of the master.
    """

    id: int
    incarnation: int
    heard_at: float
    moved_at: float
    stuck_since: float | None = None
    positions: tuple[Position, ...] = ()
    activity: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    has_joined: bool = True
    has_committed: bool = False
    reached: int = 0
    is_leaving: bool = False
    has_ended: bool = False
    waiting_call: int | None = None  # call of its waiting lease request
    waiting_since: float = 0.0
    request_number: int = 0
    only: TaskType | None = None
    ahead: int = 0
    group_version: int = 0
    collective_seconds: float = 0.0
    num_minibatches: float = 0.0
    device: Device | None = None
    optimizer_share: float = 0.0
    is_ending: bool = False
    checkpoint_attempt: int = 0
    has_ledger: bool = False

    def tries_checkpoint(self, attempt: int) -> bool:
        """Note an attempt at a checkpoint; return whether it is a new one.  0 is always new."""
        is_new = attempt == 0 or attempt > self.checkpoint_attempt
        self.checkpoint_attempt = max(self.checkpoint_attempt, attempt)
        return is_new


class Workers:
    """The registered workers.  All times are of the core's clock.

    Attributes:
        times: Accounts for the time of the wanted workers.
    """

    def __init__(self, times: SlotTimes) -> None:
        self.times = times
        self._workers: dict[int, Worker] = {}
        self._absent: dict[int, Worker] = {}  # registered in an earlier generation of the master and not in this one
        self._waiting: dict[int, Worker] = {}  # by call, the longest wait first
        self._non_blocking: dict[int, Worker] = {}  # waiting ones that want an answer at once
        self._hopeful: dict[int, Worker] = {}  # waiting ones that may be granted a lease, by id

    def get(self, worker_id: int) -> Worker | None:
        return self._workers.get(worker_id)

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    @property
    def num_known(self) -> int:
        return len(self._workers)

    @property
    def some_have_joined(self) -> bool:
        """Whether any worker has registered in this generation of the master."""
        return len(self._workers) > len(self._absent)

    def absent(self) -> Iterator[Worker]:
        """Yield the workers of an earlier generation of the master that stay and have not registered in this one."""
        return (worker for worker in self._absent.values() if not worker.is_leaving) if self._absent else iter(())

    def staying(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if not worker.is_leaving]

    @property
    def is_one_staying(self) -> bool:
        """Whether exactly one worker stays."""
        return len(list(islice((one for one in self._workers.values() if not one.is_leaving), 2))) == 1

    def pace(self, settings: JobSettings) -> MessagePace:
        """Return the intervals of messages: longer with many workers, but short enough that none seems silent."""
        silence = min(settings.lease_timeout, settings.collective_timeout if settings.has_groups else float("inf"))
        longest, share = max(HEARTBEAT_S, min(silence / 4, LONGEST_PAUSE)), len(self._workers) / MOST_PER_SECOND
        return MessagePace(min(max(HEARTBEAT_S, share), longest), min(max(REPORT_S, share), longest))

    def is_heard(self, after: float) -> bool:
        """Return whether a worker that stays and is not stuck has sent a heartbeat after this time."""
        workers = self._workers.values()
        return any(one.heard_at >= after and not one.is_leaving and one.stuck_since is None for one in workers)

    def known(self, worker_id: int, incarnation: int, clock: float) -> Worker | None:
        """Return the worker and note its heartbeat, or None if this incarnation has never registered.

        The registration may be from an earlier generation of the master.
        """
        worker = self._workers.get(worker_id)
        if worker is None or worker.incarnation != incarnation:
            return None
        worker.heard_at = clock
        return worker

    def join(self, worker_id: int, incarnation: int, clock: float) -> Worker:
        """Register a process; a known one keeps its state."""
        worker = self.known(worker_id, incarnation, clock)
        if worker is None:
            self.remove(worker_id)
            worker = self._workers[worker_id] = Worker(worker_id, incarnation, clock, clock)
        worker.has_joined = True
        self._absent.pop(worker_id, None)
        return worker

    def remove(self, worker_id: int) -> Worker | None:
        self._absent.pop(worker_id, None)
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self.stop_waiting(worker)
        return worker

    def on_heartbeat(
        self, worker: Worker, positions: tuple[Position, ...], activity: str, seconds: Mapping[str, float], clock: float
    ) -> None:
        """Update a worker by a heartbeat."""
        if positions != worker.positions:
            worker.moved_at = clock
        worker.positions, worker.activity, worker.seconds = positions, activity, dict(seconds)

    def wait(self, worker: Worker, request: LeaseRequested, clock: float) -> None:
        """Have a worker, which must not wait yet, wait for a lease."""
        worker.waiting_call, worker.waiting_since, worker.only = request.call, clock, request.only
        worker.request_number = request.number
        worker.ahead = max(worker.ahead, min(request.ahead, MOST_AHEAD))
        self._waiting[request.call] = self._hopeful[worker.id] = worker
        if request.at_once:
            self._non_blocking[request.call] = worker

    def stop_waiting(self, worker: Worker) -> None:
        """End a worker's wait: its request was answered or abandoned."""
        if worker.waiting_call is not None:
            self._waiting.pop(worker.waiting_call)
            self._hopeful.pop(worker.id, None)
            self._non_blocking.pop(worker.waiting_call, None)
            worker.waiting_call = None

    def waiting(self) -> list[Worker]:
        """Return the workers that wait for a lease, the longest wait first."""
        return list(self._waiting.values())

    def hopeful(self, shrunk: Iterable[int], all_may_hope: bool) -> list[Worker]:
        """Return the waiting workers that may get a lease; the others are known to have enough.

        Args:
            shrunk: Ids of workers that hold fewer leases than before.
            all_may_hope: The limit has risen: any worker may hold more leases than before.
        """
        if all_may_hope:
            self._hopeful = {worker.id: worker for worker in self._waiting.values()}
        for worker_id in shrunk:
            worker = self._workers.get(worker_id)
            if worker is not None and worker.waiting_call is not None:
                self._hopeful[worker_id] = worker
        return list(self._hopeful.values())

    def has_enough(self, worker: Worker) -> None:
        """Note that a waiting worker gets no lease until it holds fewer or may hold more."""
        self._hopeful.pop(worker.id, None)

    def stop_long_waits(self, since: float) -> list[int]:
        """End the waits of non-blocking requests, and of those that began before `since`; return their calls."""
        done = list(self._non_blocking.values())
        for worker in self._waiting.values():
            if worker.waiting_since > since:
                break
            if worker.waiting_call not in self._non_blocking:
                done.append(worker)
        calls = [worker.waiting_call for worker in done if worker.waiting_call is not None]
        for worker in done:
            self.stop_waiting(worker)
        return calls

    def abandon(self, call: int) -> None:
        """Drop the lease request of a client that has gone."""
        if (worker := self._waiting.get(call)) is not None:
            self.stop_waiting(worker)

    def snapshot(self) -> dict[str, Any]:
        return {
            "workers": [
                [
                    *(w.id, w.incarnation, w.has_committed, w.is_leaving, w.stuck_since is not None, w.has_ended),
                    *([w.checkpoint_attempt, w.has_ledger] if w.checkpoint_attempt or w.has_ledger else ()),
                ]
                for w in self._workers.values()
            ]
        }

    def restore(self, saved: Mapping[str, Any], clock: float) -> None:
        for worker_id, incarnation, has_committed, is_leaving, *rest in saved["workers"]:
            worker = Worker(worker_id, incarnation, clock, clock, has_joined=False, has_committed=has_committed)
            worker.is_leaving = is_leaving
            worker.stuck_since = clock if any(rest[:1]) else None
            worker.has_ended = any(rest[1:2])
            worker.checkpoint_attempt = sum(rest[2:3])
            worker.has_ledger = any(rest[3:4])
            self._workers[worker_id] = self._absent[worker_id] = worker
