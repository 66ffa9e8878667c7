"""ParameterServerStrategy: gradients are pushed to the parameter servers under the minibatch's name, values are pulled.

They are exchanged in a pipeline (asynchronous), or in rounds (synchronous).  `Gradients` computes them; values that are
not finite never leave the worker.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from elasticdl.activities import Activity
from elasticdl.frameworks.framework import (
    Batch,
    Floats,
    Framework,
    Ids,
    ModelReport,
    Parameters,
    Step,
    Table,
    TableRows,
)
from elasticdl.protocol import derive_seed
from elasticdl.ps.client import LocalDenseValues, PsClient, Pull, Pulled, Push, TooStale
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.ps.session import PsSession
from elasticdl.worker.tasks import Commit, HeldLease, LeaseLost, NotFinite, TaskBatches, Values
from elasticdl_client.job_spec import JobSpec

_EXPORT_BYTES = 16 << 20  # size of one chunk of an exported table


class Training(Protocol):
    """Brings the minibatches of a task into the model: pipelined, or in rounds."""

    def train_task(self, held: HeldLease, batches: TaskBatches, commit: Commit) -> None:
        """See `Strategy.train_task`."""
        ...

    def close(self) -> None:
        """Finish: the job is over, or this worker leaves."""
        ...


class ParameterServerStrategy:
    """The `Strategy` of a job with parameter servers."""

    def __init__(self, link: MasterLink, session: PsSession, training: Training) -> None:
        self._link = link
        self._session = session
        self._training = training

    @classmethod
    def of(
        cls, spec: JobSpec, link: MasterLink, framework: Framework, report: ModelReport, token: str
    ) -> ParameterServerStrategy:
        """Return the strategy of a job.

        Args:
            report: Report of the framework on the model.
            token: The token of the job.
        """
        session = PsSession(link, framework, report, token, spec)
        gradients = Gradients(framework, link, spec.seed, spec.skips_not_finite)
        training: Training = SynchronousTraining(session, gradients)
        if spec.use_async:
            training = PipelinedTraining(session, gradients, spec.get_model_steps)
        return cls(link, session, training)

    def begin(self, held: HeldLease) -> None:
        standing = self._session.on_ps(held, lambda ps: ps.standing(held.id, held.lease.epoch, held.lease.task))
        self._link.leases.commit(held.id, standing)

    def train_task(self, held: HeldLease, batches: TaskBatches, commit: Commit) -> None:
        self._training.train_task(held, batches, commit)

    def values(self, held: HeldLease) -> Values:
        return self._session.values(held)

    def tables(self, held: HeldLease) -> list[TableRows]:
        found = []
        for table in self._session.report.tables:
            ids: Ids | range = range(table.input_dim)
            if not table.input_dim:
                ids = self._session.on_ps(held, lambda ps, name=table.name: ps.known_ids(name))  # type: ignore[misc]
            initial = self._session.initial_row(table)
            found.append(TableRows(table.name, table.dim, len(ids), self._chunks(held, table, ids), initial))
        return found

    def save_last(self) -> None:
        """Do nothing: the servers write checkpoints."""

    def close(self) -> None:
        self._training.close()
        self._session.close()

    def _chunks(self, held: HeldLease, table: Table, ids: Ids | range) -> Iterator[tuple[Ids, Floats]]:
        step = max(1, _EXPORT_BYTES // (4 * table.dim))
        for start in range(0, len(ids), step):
            part = np.array(ids[start : start + step], np.int64)
            pull = Pull(dense=False, ids={table.name: part}, read_only=True)
            yield part, self._session.exchange(held, None, pull).rows[table.name]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A call in flight: the minibatch that it pushes, and the one that it pulls values for."""

    call: Future[Pulled]
    pushed: Computed | None
    pulled: Batch | None


class PipelinedTraining:
    """Asynchronous training: while minibatch k computes, one call per PS carries the push of k-1 and the pull for k+1.

    So a worker computes without its own newest update.  A call is queued as soon as its gradients are computed, and
    starts when the call before it has ended: servers never wait for this thread.  The pipeline is drained at the end of
    each task, so a worker's results depend on its tasks, not on timing.  Between two pulls of dense values
    (--get_model_steps) it applies its own updates to them locally.  For use by one thread.
    """

    def __init__(self, session: PsSession, gradients: Gradients, get_model_steps: int) -> None:
        """
        Args:
            get_model_steps: Minibatches from one pull of dense values to the next.
        """
        self._session = session
        self._gradients = gradients
        self._dense = LocalDenseValues(session.report.optimizer, get_model_steps)
        self._clock = session.clock
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
        """Take over pulled values; return whether they contain the dense ones."""
        if pulled.parameters is None:
            return False
        self._dense.replace(pulled.parameters, pulled.versions)
        return True

    def _send(self, held: HeldLease, computed: Computed | None, following: Batch | None) -> _Sent:
        push = computed.push if computed is not None else None
        pull = self._pull(following) if following is not None else None
        return _Sent(self._calls.submit(self._session.exchange, held, push, pull), computed, following)

    def _received(self, held: HeldLease, sent: _Sent, commit: Commit) -> Pulled:
        """Wait for the answer of a call and return it; its push is in the model then, and committed."""
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
        """Compute a minibatch that came too late again, on new values, until it is in the model."""
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


class SynchronousTraining:
    """Synchronous training: gradients are applied in rounds, which PS 0 closes.

    A minibatch is pushed to every PS, which holds it back; then this worker waits at PS 0 until the round is closed,
    and passes the result to the other servers with its next pull.  A minibatch that comes too late for its round is
    computed again on newer values.  Nothing is pipelined.  For use by one thread.
    """

    def __init__(self, session: PsSession, gradients: Gradients) -> None:
        self._session = session
        self._gradients = gradients
        self._clock = session.clock

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
        """Do nothing: no calls are in flight."""

    def _compute(
        self, held: HeldLease, batch: Batch, pulled: Pulled, activity: Activity = Activity.COMPUTE
    ) -> Computed:
        assert pulled.parameters is not None
        return self._gradients.compute(held, batch, pulled.parameters, pulled.rows, pulled.versions, activity)

    def _pulled(self, held: HeldLease, batch: Batch) -> Pulled:
        with self._clock.during(Activity.PS):
            return self._session.exchange(held, None, Pull(dense=True, ids=batch.ids))

    def _brought_in(self, held: HeldLease, computed: Computed, following: Batch | None) -> tuple[Computed, Pulled]:
        """Apply a minibatch on every PS; return it as it was applied, and the values for the following one."""
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

        # If a PS is lost, repeat from the push on: its held gradients are gone.
        with self._clock.during(Activity.PS):
            return self._session.on_ps(held, call)


_log = logging.getLogger("elasticdl.worker")


@dataclass(frozen=True, slots=True)
class Computed:
    """A computed minibatch that is not pushed yet.

    Attributes:
        loss: None: the minibatch is left out of the model, and its push is empty.
    """

    batch: Batch
    loss: float | None
    push: Push


class Gradients:
    """Computes minibatches; values that are not finite never leave the worker."""

    def __init__(self, framework: Framework, link: MasterLink, seed: int, skips_not_finite: bool) -> None:
        """
        Args:
            seed: The seed of the job.
            skips_not_finite: Whether a minibatch with NaN or infinity is left out of the model; else it ends the job.
        """
        self._framework = framework
        self._link, self._clock = link, link.clock
        self._seed = seed
        self._skips_not_finite = skips_not_finite
        self._compiled = False

    def compute(
        self,
        held: HeldLease,
        batch: Batch,
        parameters: Parameters,
        rows: Mapping[str, Floats],
        versions: Sequence[int],
        activity: Activity = Activity.COMPUTE,
    ) -> Computed:
        """Compute the gradients of a minibatch.

        Args:
            versions: Versions of the values, by PS.
            activity: The activity that the time is attributed to.

        Raises:
            NotFinite: the loss or a gradient is not finite, which ends the job.
            LeaseLost: the master rejects the report that a minibatch is left out.
        """
        lease = held.lease
        held.minibatch = batch.n
        seed = derive_seed(self._seed, lease.epoch, lease.task, batch.n)
        with self._clock.during(activity if self._compiled else Activity.COMPILE):
            step = self._framework.gradients(batch, parameters, rows, seed)
        self._compiled = True
        what = _not_finite(step)
        if not what:
            return Computed(batch, step.loss, self._push(held, batch, step, versions))
        if not self._skips_not_finite:
            raise NotFinite(batch.n, what)
        _log.warning("Minibatch %d of %s is left out of the model: %s", batch.n, held.task_name, what)
        # Report it before the push: a name in the model without its records must be known to the master.
        if not self._link.report_not_finite(held.id, what, [batch.n]).accepted:
            raise LeaseLost
        return Computed(batch, None, Push(held.id, lease.epoch, lease.task, batch.n, None, None, {}, versions))

    def _push(self, held: HeldLease, batch: Batch, step: Step, versions: Sequence[int]) -> Push:
        lease = held.lease
        return Push(
            lease=held.id,
            epoch=lease.epoch,
            task=lease.task,
            minibatch=batch.n,
            gradient=step.gradient,
            change=step.change,
            row_gradients={name: (batch.ids[name], rows) for name, rows in step.row_gradients.items()},
            pulled_versions=versions,
            learning_rate=self._framework.learning_rate(lease.epoch, max(versions, default=0)),
            num_records=batch.size,
            unreached=step.unreached,
        )


def _not_finite(step: Step) -> str:
    """Return a description of the values of a step that are not finite; empty if all are finite."""
    if math.isfinite(step.loss):
        return step.not_finite
    return step.not_finite.replace("the loss", "The loss", 1) or f"The loss is {step.loss}"
