"""The minibatches of one task, as a strategy takes them: without those that the model holds already."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from elasticdl.frameworks.framework import NO_SURPLUS, Batch
from elasticdl.worker.activity import Activity, ActivityClock
from elasticdl.worker.leases import HeldLease, LeaseBook


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
