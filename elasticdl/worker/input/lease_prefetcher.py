"""Leases ahead of their use: drawn from the master in a thread, or given by rank 0 of a group.

A lease is held from the moment it arrives, so that heartbeats renew it however late it is taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from elasticdl.frameworks.framework import Surplus
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.input.batch_prefetcher import InterruptibleLeases, PrefetchInterrupted
from elasticdl.worker.leases import HeldLease, LeaseBook


class LocalLeases:
    """Leases that another member holds, given to this process's input pipeline one after another.

    See `InterruptibleLeases`; no call reaches the master.
    """

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
                raise PrefetchInterrupted
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


class LeasePrefetcher:
    """Draws every lease that the master grants, in a thread of its own; `take` is called by one thread."""

    def __init__(self, requests: InterruptibleLeases) -> None:
        self._requests = requests
        self._changed = threading.Condition()
        self._drawn: deque[HeldLease | None] = deque()
        self._error: BaseException | None = None  # why nothing comes any more

    def start(self) -> None:
        threading.Thread(target=self._run, name="drawer", daemon=True).start()

    def take(self, timeout_s: float) -> list[HeldLease | None]:
        """All that came, waiting for something; None: the job is over.

        Raises:
            MasterGone: nothing comes any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._drawn or self._error, timeout_s)
            taken = list(self._drawn)
            self._drawn.clear()
            if self._error is not None and not taken:
                raise self._error
            return taken

    def _run(self) -> None:
        try:
            while True:
                held = self._requests.request_lease()
                with self._changed:
                    self._drawn.append(held)
                    self._changed.notify_all()
                if held is None:
                    return
        except BaseException as error:  # noqa: BLE001  raised again by `take`
            with self._changed:
                self._error = error
                self._changed.notify_all()
