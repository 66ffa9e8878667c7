"""The leases that this worker holds, what of each is in the model, and which the master has taken back."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from elasticdl.frameworks.framework import NO_SURPLUS, Surplus
from elasticdl.rpc import elasticdl_pb2 as pb


@dataclass(slots=True)
class HeldLease:
    """A lease between its grant and the master's answer to its end."""

    lease: pb.Lease
    committed: set[int] = field(default_factory=set)  # minibatches that are in the model
    record_numbers: list[int] = field(default_factory=list)  # in the shard, in the order that `feed` gets them
    minibatch: int = 0  # the one being computed
    revoked: bool = False

    @property
    def id(self) -> int:
        return self.lease.id

    @property
    def task_name(self) -> str:
        """For the log."""
        return f"{pb.TaskType.Name(self.lease.type)} {self.lease.epoch}/{self.lease.task}"


class LeaseBook:
    """All held leases, in order of grant.  Thread-safe: the heartbeat, the input pipeline and the main loop use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, HeldLease] = {}

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
            self._held.pop(lease_id, None)

    def revoke(self, lease_ids: Iterable[int]) -> list[HeldLease]:
        """Marks leases as taken back and forgets them; returns those that were held."""
        with self._lock:
            found = [held for i in lease_ids if (held := self._held.pop(i, None)) is not None]
        for held in found:
            held.revoked = True
        return found

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
        """Return the held leases, for a restarted master."""
        with self._lock:
            return [pb.HeldLease(lease=h.lease, committed=sorted(h.committed)) for h in self._held.values()]


class LeaseLink(Protocol):
    """Grants leases and receives reports: the master, or its substitute in a process without one."""

    leases: LeaseBook

    def request_lease(self) -> HeldLease | None:
        """Waits for a task, which is held from then on; None when the job is over."""
        ...

    def lease_at_once(self, only: pb.TaskType) -> HeldLease | None:
        """A task of a type if there is one now; it is held then."""
        ...

    def report_progress(
        self, lease: int, committed: list[int], loss: float | None, skipped: Sequence[int] = (), not_finite: str = ""
    ) -> pb.Ack: ...

    def finish(self, lease: int, num_minibatches: int, surplus: Surplus) -> pb.Ack: ...

    def fail(self, lease: int, minibatch: int, error: str, details: str, bad_records: list[int]) -> pb.Ack: ...


@dataclass(slots=True)
class TaskProgress:
    """Minibatches of a task that are in the model, or the task's end.

    Attributes:
        num_minibatches: of the task, which is done; None: it is not.
    """

    lease: int
    committed: list[int]
    loss: float | None = None
    num_minibatches: int | None = None
    surplus: Surplus = NO_SURPLUS


class PacedLink(LeaseLink, Protocol):
    """The same for a reporter.

    Attributes:
        report_s: seconds between two reports of progress, at least.
    """

    report_s: float

    def report(self, progress: Sequence[TaskProgress]) -> Sequence[pb.Ack]:
        """Report the progress of tasks, in this order.

        Returns:
            The answers to the first of them, at least to one.  If the last answer is a refusal, the rest is not
            reported yet.
        """
        ...
