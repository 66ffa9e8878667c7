"""Asynchronous training: while minibatch k computes, one call per PS carries the push of k-1 and the pull for k+1.

So a worker misses one update of its own.  The pipeline is drained at the end of each task: what a worker computes
depends on its tasks alone, never on timing.  Between two pulls of dense values (--get_model_steps) it goes on with its
own updates of them.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

from elasticdl.frameworks.framework import Batch
from elasticdl.ps.client import DenseCopy, Pull, Pulled, TooStale
from elasticdl.worker.activity import Activity, ActivityClock
from elasticdl.worker.batches import TaskBatches
from elasticdl.worker.gradients import Computed, Gradients
from elasticdl.worker.leases import HeldLease
from elasticdl.worker.ps_session import PsSession
from elasticdl.worker.strategy import Commit


class PipelinedTraining:
    """For one thread."""

    def __init__(self, session: PsSession, gradients: Gradients, get_model_steps: int, clock: ActivityClock) -> None:
        """
        Args:
            get_model_steps: minibatches from one pull of dense values to the next.
        """
        self._session = session
        self._gradients = gradients
        self._dense = DenseCopy(session.report.optimizer, get_model_steps)
        self._clock = clock
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="exchange")

    def train_task(self, held: HeldLease, batches: TaskBatches, commit: Commit) -> None:
        """See `Strategy.train_task`."""
        try:
            self._train(held, batches, commit)
        except BaseException:
            self._dense.forget()
            raise

    def close(self) -> None:
        self._calls.shutdown(wait=False)

    def _train(self, held: HeldLease, batches: TaskBatches, commit: Commit) -> None:
        batch = next(batches, None)
        if batch is None:
            return
        with self._clock.during(Activity.PS):
            pulled = self._session.exchange(held, None, self._pull(batch))
        self._take(pulled)
        waiting: Computed | None = None
        while batch is not None:
            following = next(batches, None)
            call = self._send(held, waiting, following)
            try:
                computed = self._gradients.compute(
                    held, batch, self._dense.parameters, pulled.rows, self._dense.versions
                )
            except BaseException:
                wait([call])
                if waiting is not None and call.exception() is None:
                    commit(waiting.batch.n, waiting.loss)
                raise
            pulled = self._received(held, call, waiting, following, commit)
            if not self._take(pulled):
                self._dense.apply(computed.push)
            waiting, batch = computed, None if batches.is_cut_short else following
        self._received(held, self._send(held, waiting, None), waiting, None, commit)

    def _pull(self, batch: Batch) -> Pull:
        return Pull(dense=self._dense.begin_minibatch(), ids=batch.ids)

    def _take(self, pulled: Pulled) -> bool:
        """Whether the dense values came, too."""
        if pulled.parameters is None:
            return False
        self._dense.replace(pulled.parameters, pulled.versions)
        return True

    def _send(self, held: HeldLease, waiting: Computed | None, following: Batch | None) -> Future[Pulled]:
        push = waiting.push if waiting is not None else None
        pull = self._pull(following) if following is not None else None
        return self._calls.submit(self._session.exchange, held, push, pull)

    def _received(
        self,
        held: HeldLease,
        call: Future[Pulled],
        waiting: Computed | None,
        following: Batch | None,
        commit: Commit,
    ) -> Pulled:
        """The answer of a call whose push is in the model then, and committed."""
        with self._clock.during(Activity.PS):
            try:
                pulled = call.result()
            except TooStale:
                assert waiting is not None
                waiting = self._compute_again(held, waiting.batch)
                pull = Pull(dense=True, ids=following.ids) if following is not None else None
                pulled = self._session.exchange(held, None, pull)
        if waiting is not None:
            commit(waiting.batch.n, waiting.loss)
        return pulled

    def _compute_again(self, held: HeldLease, batch: Batch) -> Computed:
        """A minibatch that came too late, on new values, until it is in the model."""
        while True:
            pulled = self._session.exchange(held, None, Pull(dense=True, ids=batch.ids))
            assert pulled.parameters is not None
            computed = self._gradients.compute(held, batch, pulled.parameters, pulled.rows, pulled.versions)
            try:
                self._session.exchange(held, computed.push, None)
            except TooStale:
                continue
            return computed
