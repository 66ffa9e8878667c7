"""Asynchronous training: while minibatch k computes, one call per PS carries the push of k-1 and the pull for k+1.

So a worker misses one update of its own.  A call is handed over as soon as its gradients are there, and begins when the
one before it has ended: servers never wait for this thread.  The pipeline is drained at the end of each task: what a
worker computes depends on its tasks alone, never on timing.  Between two pulls of dense values (--get_model_steps) it
continues with its own updates of them.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from elasticdl.frameworks.framework import Batch
from elasticdl.ps.client import LocalDenseValues, Pull, Pulled, TooStale
from elasticdl.worker.activity import Activity, ActivityClock
from elasticdl.worker.input.batches import TaskBatches
from elasticdl.worker.leases import HeldLease
from elasticdl.worker.ps.gradients import Computed, Gradients
from elasticdl.worker.ps.session import PsSession
from elasticdl.worker.strategy import Commit


@dataclass(frozen=True, slots=True)
class _Sent:
    """A call under way: the minibatch that it pushes, and the one that it pulls for."""

    call: Future[Pulled]
    pushed: Computed | None
    pulled: Batch | None


class PipelinedTraining:
    """For one thread."""

    def __init__(self, session: PsSession, gradients: Gradients, get_model_steps: int, clock: ActivityClock) -> None:
        """
        Args:
            get_model_steps: minibatches from one pull of dense values to the next.
        """
        self._session = session
        self._gradients = gradients
        self._dense = LocalDenseValues(session.report.optimizer, get_model_steps)
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
        following = next(batches, None)
        sent = self._send(held, None, following)
        while batch is not None:
            try:
                computed = self._gradients.compute(
                    held, batch, self._dense.parameters, pulled.rows, self._dense.versions
                )
                after = next(batches, None) if following is not None else None
            except BaseException:
                wait([sent.call])
                if sent.pushed is not None and sent.call.exception() is None:
                    commit(sent.pushed.batch.n, sent.pushed.loss)
                raise
            then = self._send(held, computed, after)
            try:
                pulled = self._received(held, sent, commit)
            except BaseException:
                wait([then.call])
                raise
            if not self._take(pulled):
                self._dense.apply(computed.push)
            sent, batch, following = then, None if batches.is_cut_short else following, after
        self._received(held, sent, commit)

    def _pull(self, batch: Batch) -> Pull:
        return Pull(dense=self._dense.begin_minibatch(), ids=batch.ids)

    def _take(self, pulled: Pulled) -> bool:
        """Whether the dense values came, too."""
        if pulled.parameters is None:
            return False
        self._dense.replace(pulled.parameters, pulled.versions)
        return True

    def _send(self, held: HeldLease, computed: Computed | None, following: Batch | None) -> _Sent:
        push = computed.push if computed is not None else None
        pull = self._pull(following) if following is not None else None
        return _Sent(self._calls.submit(self._session.exchange, held, push, pull), computed, following)

    def _received(self, held: HeldLease, sent: _Sent, commit: Commit) -> Pulled:
        """The answer of a call whose push is in the model then, and committed."""
        pushed = sent.pushed
        with self._clock.during(Activity.PS):
            try:
                pulled = sent.call.result()
            except TooStale:
                assert pushed is not None
                pushed = self._compute_again(held, pushed.batch)
                pull = Pull(dense=True, ids=sent.pulled.ids) if sent.pulled is not None else None
                pulled = self._session.exchange(held, None, pull)
        if pushed is not None:
            commit(pushed.batch.n, pushed.loss)
        return pulled

    def _compute_again(self, held: HeldLease, batch: Batch) -> Computed:
        """A minibatch that came too late, on new values, until it is in the model."""
        while True:
            pulled = self._session.exchange(held, None, Pull(dense=True, ids=batch.ids))
            assert pulled.parameters is not None
            computed = self._gradients.compute(
                held, batch, pulled.parameters, pulled.rows, pulled.versions, Activity.REPEAT
            )
            try:
                self._session.exchange(held, computed.push, None)
            except TooStale:
                continue
            return computed
