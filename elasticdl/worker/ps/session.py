"""A worker's calls to all parameter servers: each is repeated until every PS has answered it.

A PS may restart, be stopped, or be overloaded: the call is repeated, with the newest partition, as long as the lease is
valid.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from elasticdl.frameworks.framework import Batch, Floats, InitialRow, ModelReport, Parameters, Table, TrainsWithServers
from elasticdl.ps.client import (
    LeaseRefused,
    PsClient,
    PsUnavailable,
    PsUninitialized,
    Pull,
    Pulled,
    Push,
    initial_row,
)
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.tasks import HeldLease, LeaseLost, Values
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.worker")
_PARTITION_WAIT_S = 0.5
_SAY_AGAIN_S = 10.0

Answer = TypeVar("Answer")


class PsSession:
    """Calls the parameter servers for a worker.  Thread-safe.

    Attributes:
        report: Report of the framework on the model.
        clock: Activities of the worker.
    """

    def __init__(
        self,
        link: MasterLink,
        framework: TrainsWithServers,
        report: ModelReport,
        token: str,
        spec: JobSpec,
        timeout_s: float = 30.0,
    ) -> None:
        """
        Args:
            timeout_s: Deadline of one call, in seconds.
        """
        self.report = report
        self._link, self.clock = link, link.clock
        self._framework = framework
        self._token = token
        self._seed = spec.seed
        self._wire_dtype = spec.wire_dtype.value
        self._timeout_s = timeout_s
        self._encrypts = spec.encrypt
        self._client: PsClient | None = None
        self._connecting = threading.Lock()
        self._logged: tuple[str, float] = ("", 0.0)  # the logged reason for a wait, and when it was logged

    def exchange(self, held: HeldLease, push: Push | None, pull: Pull | None) -> Pulled:
        """See `PsClient.exchange`.

        Raises:
            LeaseLost: the lease was revoked.
            TooStale: the gradients must be computed again on newer values.
        """
        return self.on_ps(held, lambda ps: ps.exchange(push, pull))

    def on_ps(self, held: HeldLease, call: Callable[[PsClient], Answer]) -> Answer:
        """Repeat a call, which must be safe to repeat, until every PS has answered it.

        Raises:
            LeaseLost, TooStale: see `exchange`.
        """
        while not held.revoked:
            ps = self._connected(held)
            try:
                return call(ps)
            except PsUninitialized:
                self._initialize(ps)
            except PsUnavailable as error:
                self._wait(ps, error)
            except LeaseRefused as error:
                raise LeaseLost from error
        raise LeaseLost

    def values(self, held: HeldLease, parameters: Parameters | None = None) -> Values:
        """Return the values on the servers; embedding rows are read on demand.

        Args:
            parameters: Known dense values; None: read them now.

        Raises:
            LeaseLost: the lease was revoked.
        """
        if parameters is None:
            parameters = self.exchange(held, None, Pull(dense=True, ids={}, read_only=True)).parameters
            assert parameters is not None

        def rows(batch: Batch) -> Mapping[str, Floats]:
            if not batch.ids:
                return {}
            return self.exchange(held, None, Pull(dense=False, ids=batch.ids, read_only=True)).rows

        return Values(parameters, rows)

    def initial_row(self, table: Table) -> InitialRow:
        """Return how the parameter servers initialise a row of a table."""
        return initial_row(table, self._seed)

    def close(self) -> None:
        with self._connecting:
            if self._client is not None:
                self._client.close()

    def _initialize(self, ps: PsClient) -> None:
        try:
            ps.initialize(self._framework.initial(), self.report.tables, self.report.optimizer, self._seed)
        except PsUnavailable as error:
            self._wait(ps, error)

    def _wait(self, ps: PsClient, error: PsUnavailable) -> None:
        if error.partition is not None:
            self._link.learn_partition(error.partition)
            return
        reason, logged_at = self._logged
        now = time.monotonic()
        if reason != str(error) or now - logged_at > _SAY_AGAIN_S:
            self._logged = str(error), now
            _log.info("Waiting for PS %d: %s", error.ps_id, error)
        self._link.partition(newer_than=ps.partition.version, timeout_s=_PARTITION_WAIT_S)

    def _connected(self, held: HeldLease) -> PsClient:
        """Return a client for the newest partition."""
        partition = self._link.partition(timeout_s=_PARTITION_WAIT_S)
        while partition.version == 0 and not held.revoked:
            partition = self._link.partition(timeout_s=_PARTITION_WAIT_S)
        if partition.version == 0:
            raise LeaseLost
        with self._connecting:
            known = self._client
            if known is None or known.partition.version < partition.version:
                self._client = PsClient(
                    partition, self.report, self._token, self._timeout_s, self._wire_dtype, self._encrypts
                )
                if known is not None:
                    known.close()
            assert self._client is not None
            return self._client
