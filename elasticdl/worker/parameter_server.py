"""ParameterServerStrategy: gradients go to the parameter servers under the minibatch's name, values come back.

While minibatch k computes, one call per PS carries the push of k-1 and the pull for k+1, so a worker misses one update
of its own.  The pipeline is drained at the end of each task: what a worker computes depends on its tasks alone, never
on timing.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from elasticdl.frameworks.framework import Batch, Floats, Framework, Ids, ModelReport, Step, Table, TableRows
from elasticdl.ps.client import LeaseRefused, PsClient, PsUnavailable, PsUninitialized, Pull, Pulled, Push
from elasticdl.worker.activity import Activity, ActivityClock
from elasticdl.worker.batches import LeaseLost, TaskBatches
from elasticdl.worker.leases import HeldLease
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.seeds import derive_seed
from elasticdl.worker.strategy import Commit, Values

_log = logging.getLogger("elasticdl.worker")
_PARTITION_WAIT_S = 0.5
_EXPORT_BYTES = 16 << 20  # of one chunk of an exported table

Answer = TypeVar("Answer")


class NonFiniteLoss(ArithmeticError):
    """A minibatch whose gradient would spoil the model: it is not pushed, and its task fails."""


@dataclass(frozen=True, slots=True)
class _Computed:
    """A minibatch whose push is still to come."""

    minibatch: int
    loss: float
    push: Push


class ParameterServerStrategy:
    """Asynchronous training on parameter servers."""

    def __init__(
        self, link: MasterLink, framework: Framework, report: ModelReport, token: str, seed: int, clock: ActivityClock
    ) -> None:
        self._link = link
        self._framework = framework
        self._report = report
        self._token = token
        self._seed = seed
        self._clock = clock
        self._client: PsClient | None = None
        self._connecting = threading.Lock()
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._compiled = False

    def begin(self, held: HeldLease) -> None:
        standing = self._on_ps(held, lambda ps: ps.standing(held.id, held.lease.epoch, held.lease.task))
        self._link.leases.commit(held.id, standing)

    def train_task(self, held: HeldLease, batches: TaskBatches, commit: Commit) -> None:
        batch = next(batches, None)
        if batch is None:
            return
        with self._clock.during(Activity.PS):
            pulled = self._exchange(held, None, self._pull(batch))
        waiting: _Computed | None = None
        while batch is not None:
            following = next(batches, None)
            push = waiting.push if waiting is not None else None
            pull = self._pull(following) if following is not None else None
            call = self._calls.submit(self._exchange, held, push, pull) if push or pull else None
            try:
                computed = self._compute(held, batch, pulled)
            finally:
                if call is not None:
                    with self._clock.during(Activity.PS):
                        pulled = call.result()
            if waiting is not None:
                commit(waiting.minibatch, waiting.loss)
            waiting, batch = computed, None if batches.is_cut_short else following
        assert waiting is not None
        with self._clock.during(Activity.PS):
            self._exchange(held, waiting.push, None)
        commit(waiting.minibatch, waiting.loss)

    def values(self, held: HeldLease) -> Values:
        dense = self._exchange(held, None, Pull(dense=True, ids={}, read_only=True))
        assert dense.parameters is not None

        def rows(batch: Batch) -> Mapping[str, Floats]:
            if not batch.ids:
                return {}
            return self._exchange(held, None, Pull(dense=False, ids=batch.ids, read_only=True)).rows

        return Values(dense.parameters, rows)

    def tables(self, held: HeldLease) -> Iterator[TableRows]:
        for table in self._report.tables:
            if table.input_dim:
                yield TableRows(table.name, table.input_dim, self._chunks(held, table, range(table.input_dim)))
            else:
                ids = self._on_ps(held, lambda ps, name=table.name: ps.known_ids(name))  # type: ignore[misc]
                yield TableRows(table.name, len(ids), self._chunks(held, table, ids))

    def _chunks(self, held: HeldLease, table: Table, ids: Ids | range) -> Iterator[tuple[Ids, Floats]]:
        step = max(1, _EXPORT_BYTES // (4 * table.dim))
        for start in range(0, len(ids), step):
            part = np.array(ids[start : start + step], np.int64)
            pull = Pull(dense=False, ids={table.name: part}, read_only=True)
            yield part, self._exchange(held, None, pull).rows[table.name]

    def close(self) -> None:
        self._calls.shutdown()

    def _pull(self, batch: Batch) -> Pull:
        return Pull(dense=True, ids=batch.ids, read_only=False)

    def _compute(self, held: HeldLease, batch: Batch, pulled: Pulled) -> _Computed:
        lease = held.lease
        held.minibatch = batch.n
        seed = derive_seed(self._seed, lease.epoch, lease.task, batch.n)
        assert pulled.parameters is not None
        with self._clock.during(Activity.COMPUTE if self._compiled else Activity.COMPILE):
            step = self._framework.gradients(batch, pulled.parameters, pulled.rows, seed)
        self._compiled = True
        if not math.isfinite(step.loss):
            raise NonFiniteLoss(f"the loss is {step.loss}; lower the learning rate, or look at these records")
        return _Computed(batch.n, step.loss, self._push(held, batch, step, pulled))

    @staticmethod
    def _push(held: HeldLease, batch: Batch, step: Step, pulled: Pulled) -> Push:
        return Push(
            lease=held.id,
            epoch=held.lease.epoch,
            task=held.lease.task,
            minibatch=batch.n,
            gradient=step.gradient,
            change=step.change,
            row_gradients={name: (batch.ids[name], rows) for name, rows in step.row_gradients.items()},
            pulled_versions=pulled.versions,
        )

    def _exchange(self, held: HeldLease, push: Push | None, pull: Pull | None) -> Pulled:
        return self._on_ps(held, lambda ps: ps.exchange(push, pull))

    def _on_ps(self, held: HeldLease, call: Callable[[PsClient], Answer]) -> Answer:
        """Repeats a call until every PS has answered it, through restarts of PS, while the lease is ours."""
        while not held.revoked:
            ps = self._connected(held)
            try:
                return call(ps)
            except PsUninitialized:
                ps.initialize(self._framework.initial(), self._report.tables, self._report.optimizer, self._seed)
            except PsUnavailable as error:
                _log.info("Waiting for PS %d: %s", error.ps_id, error)
                self._link.partition(newer_than=ps.partition.version, timeout_s=_PARTITION_WAIT_S)
            except LeaseRefused as error:
                raise LeaseLost from error
        raise LeaseLost

    def _connected(self, held: HeldLease) -> PsClient:
        """A client of the newest partition."""
        partition = self._link.partition(timeout_s=_PARTITION_WAIT_S)
        while partition.version == 0 and not held.revoked:
            partition = self._link.partition(timeout_s=_PARTITION_WAIT_S)
        with self._connecting:
            known = self._client
            if known is None or known.partition.version < partition.version:
                self._client = PsClient(partition, self._report, self._token)
                if known is not None:
                    known.close()
            assert self._client is not None
            return self._client
