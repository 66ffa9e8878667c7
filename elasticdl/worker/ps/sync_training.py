"""Synchronous training: gradients are applied in rounds, which PS 0 closes.

A minibatch is pushed to every PS, which hold it; then this worker waits at PS 0 until the round is closed and takes it
to the other PS together with its next pull.  A minibatch that comes too late for its round is computed again on newer
values.  Nothing is pipelined.
"""

from __future__ import annotations

from elasticdl.frameworks.framework import Batch
from elasticdl.ps.client import PsClient, Pull, Pulled, TooStale
from elasticdl.worker.activity import Activity, ActivityClock
from elasticdl.worker.input.batches import LeaseLost, TaskBatches
from elasticdl.worker.leases import HeldLease
from elasticdl.worker.ps.gradients import Computed, Gradients
from elasticdl.worker.ps.session import PsSession
from elasticdl.worker.strategy import Commit


class SynchronousTraining:
    """For one thread."""

    def __init__(self, session: PsSession, gradients: Gradients, clock: ActivityClock) -> None:
        self._session = session
        self._gradients = gradients
        self._clock = clock

    def train_task(self, held: HeldLease, batches: TaskBatches, commit: Commit) -> None:
        """See `Strategy.train_task`."""
        batch = next(batches, None)
        pulled = self._pulled(held, batch) if batch is not None else None
        while batch is not None:
            assert pulled is not None
            computed = self._compute(held, batch, pulled)
            following = next(batches, None)
            computed, pulled = self._brought_in(held, computed, following)
            commit(computed.batch.n, computed.loss)
            batch = following

    def close(self) -> None:
        """Nothing is left over."""

    def _compute(
        self, held: HeldLease, batch: Batch, pulled: Pulled, activity: Activity = Activity.COMPUTE
    ) -> Computed:
        assert pulled.parameters is not None
        return self._gradients.compute(held, batch, pulled.parameters, pulled.rows, pulled.versions, activity)

    def _pulled(self, held: HeldLease, batch: Batch) -> Pulled:
        with self._clock.during(Activity.PS):
            return self._session.exchange(held, None, Pull(dense=True, ids=batch.ids))

    def _brought_in(self, held: HeldLease, computed: Computed, following: Batch | None) -> tuple[Computed, Pulled]:
        """The minibatch as it has entered the model of every PS, and the values for the following one."""
        pull = Pull(dense=True, ids=following.ids) if following is not None else None
        while True:
            try:
                return computed, self._round(held, computed, pull)
            except TooStale:
                pulled = self._pulled(held, computed.batch)
                computed = self._compute(held, computed.batch, pulled, Activity.REPEAT)

    def _round(self, held: HeldLease, computed: Computed, pull: Pull | None) -> Pulled:
        def check() -> None:
            if held.revoked:
                raise LeaseLost

        def call(ps: PsClient) -> Pulled:
            if not all(ps.exchange(computed.push, None).repeated_push):
                ps.close_round(computed.push, check)
            return ps.exchange(None, pull)

        # From the push on when a PS is lost: what was held there is gone.
        with self._clock.during(Activity.PS):
            return self._session.on_ps(held, call)
