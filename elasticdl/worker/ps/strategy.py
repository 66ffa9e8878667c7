"""ParameterServerStrategy: gradients go to the parameter servers under the minibatch's name, values come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from elasticdl.frameworks.framework import Batch, Floats, Ids, Table, TableRows
from elasticdl.ps.client import Pull
from elasticdl.worker.input.batches import TaskBatches
from elasticdl.worker.leases import HeldLease
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.ps.session import PsSession
from elasticdl.worker.strategy import Commit, Values

_EXPORT_BYTES = 16 << 20  # of one chunk of an exported table


class Training(Protocol):
    """How the minibatches of a task get into the model: pipelined, or in rounds."""

    def train_task(self, held: HeldLease, batches: TaskBatches, commit: Commit) -> None:
        """See `Strategy.train_task`."""
        ...

    def close(self) -> None:
        """The job is over, or this worker leaves."""
        ...


class ParameterServerStrategy:
    """See `Strategy`."""

    def __init__(self, link: MasterLink, session: PsSession, training: Training) -> None:
        self._link = link
        self._session = session
        self._training = training

    def begin(self, held: HeldLease) -> None:
        standing = self._session.on_ps(held, lambda ps: ps.standing(held.id, held.lease.epoch, held.lease.task))
        self._link.leases.commit(held.id, standing)

    def train_task(self, held: HeldLease, batches: TaskBatches, commit: Commit) -> None:
        self._training.train_task(held, batches, commit)

    def values(self, held: HeldLease) -> Values:
        dense = self._session.exchange(held, None, Pull(dense=True, ids={}, read_only=True))
        assert dense.parameters is not None

        def rows(batch: Batch) -> Mapping[str, Floats]:
            if not batch.ids:
                return {}
            return self._session.exchange(held, None, Pull(dense=False, ids=batch.ids, read_only=True)).rows

        return Values(dense.parameters, rows)

    def tables(self, held: HeldLease) -> list[TableRows]:
        found = []
        for table in self._session.report.tables:
            ids: Ids | range = range(table.input_dim)
            if not table.input_dim:
                ids = self._session.on_ps(held, lambda ps, name=table.name: ps.known_ids(name))  # type: ignore[misc]
            initial = self._session.initial_row(table)
            found.append(TableRows(table.name, table.dim, len(ids), self._chunks(held, table, ids), initial))
        return found

    def close(self) -> None:
        self._training.close()
        self._session.close()

    def _chunks(self, held: HeldLease, table: Table, ids: Ids | range) -> Iterator[tuple[Ids, Floats]]:
        step = max(1, _EXPORT_BYTES // (4 * table.dim))
        for start in range(0, len(ids), step):
            part = np.array(ids[start : start + step], np.int64)
            pull = Pull(dense=False, ids={table.name: part}, read_only=True)
            yield part, self._session.exchange(held, None, pull).rows[table.name]
