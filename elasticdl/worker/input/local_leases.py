"""Leases that somebody else holds, given to this process's input pipeline one after another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from elasticdl.frameworks.framework import Surplus
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.input.batch_prefetcher import Interrupted
from elasticdl.worker.leases import HeldLease, LeaseBook


class LocalLeases:
    """See `InterruptibleLeases`; the master hears of none of them."""

    def __init__(self) -> None:
        self.leases = LeaseBook()
        self._changed = threading.Condition()
        self._given: deque[HeldLease] = deque()
        self._is_interrupted = False

    def give(self, held: HeldLease) -> None:
        """One of `leases`, the next to be drawn."""
        with self._changed:
            self._given.append(held)
            self._changed.notify_all()

    def take_all_back(self) -> None:
        """Nothing is held here any more."""
        with self._changed:
            self._given.clear()
        self.leases.revoke([held.id for held in self.leases.held()])

    def interrupt(self) -> None:
        with self._changed:
            self._is_interrupted = True
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._is_interrupted = False

    def request_lease(self) -> HeldLease | None:
        """Waits for one; what is taken back meanwhile is not held any more.

        Raises:
            Interrupted: the feeder begins anew.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._given) or self._is_interrupted)
            if self._is_interrupted:
                raise Interrupted
            return self._given.popleft()

    def lease_at_once(self, only: pb.TaskType) -> HeldLease | None:
        return None

    def report_progress(
        self, lease: int, committed: list[int], loss: float | None, skipped: Sequence[int] = (), not_finite: str = ""
    ) -> pb.Ack:
        return pb.Ack(accepted=True)

    def finish(self, lease: int, num_minibatches: int, surplus: Surplus) -> pb.Ack:
        return pb.Ack(accepted=True)

    def fail(self, lease: int, minibatch: int, error: str, details: str, bad_records: list[int]) -> pb.Ack:
        return pb.Ack(accepted=True)
