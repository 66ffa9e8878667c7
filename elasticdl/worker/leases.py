"""The leases that this worker holds, what of each is in the model, and which the master has taken back."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

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
        """What a restarted master is told."""
        with self._lock:
            return [pb.HeldLease(lease=h.lease, committed=sorted(h.committed)) for h in self._held.values()]
