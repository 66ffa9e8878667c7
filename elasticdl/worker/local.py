"""Local strategy: no PS; this worker's model, optimizer and ledger are one checkpoint.

After its death the successor loads the newest checkpoint and tells the master what that one holds; the rest is handed
out again.
"""

from __future__ import annotations

import logging
import threading
import time

from elasticdl.frameworks.framework import Framework, NotFiniteStep, TableRows
from elasticdl.protocol import Activity, derive_seed
from elasticdl.ps.applied import MinibatchName
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.activity import ActivityClock
from elasticdl.worker.checkpoint import StateCheckpoints, read_from
from elasticdl.worker.ledger import Ledger
from elasticdl.worker.tasks import Commit, HeldLease, NotFinite, TaskBatches, Values
from elasticdl_client.errors import CheckpointError, LastCheckpointError

_log = logging.getLogger("elasticdl.worker")
_CHECKPOINT_PERIOD_S = 60.0
STATE_FILE = "local.npz"


class LocalStrategy:
    """One worker trains with the user's own optimizer."""

    def __init__(
        self,
        framework: Framework,
        checkpoints: StateCheckpoints,
        checkpoint_steps: int,
        seed: int,
        clock: ActivityClock,
    ) -> None:
        """
        Args:
            checkpoint_steps: minibatches between two; 0: one a minute.
        """
        self._framework = framework
        self._seed = seed
        self._checkpoints = checkpoints
        self._checkpoint_steps = checkpoint_steps
        self._clock = clock
        self._compiled = False
        self._lock = threading.Lock()  # the heartbeat reads the ledger when the master has a new generation
        self._ledger = Ledger()
        self._saved_at = (0, time.monotonic())
        self._has_failed = False  # the newest checkpoint
        self._is_spoiled = False  # the model has taken a step that is not finite

    def restore(self) -> None:
        """Loads this job's newest whole checkpoint, if there is one."""
        found = read_from(self._checkpoints.place, self._clock, self._checkpoints.newest)
        if found is None:
            return
        self._framework.load_state(found.arrays)
        self._ledger = found.ledger
        self._saved_at = (self._ledger.steps, time.monotonic())
        _log.info("Restored the model at step %d from %s", self._ledger.steps, found.directory)

    def ledger(self) -> pb.AppliedSet:
        """Which minibatches the model holds."""
        with self._lock:
            return self._ledger.applied.to_message()

    def begin(self, held: HeldLease) -> None:
        with self._lock:
            known = self._ledger.applied.of_task(held.lease.epoch, held.lease.task)
            held.committed.update(range(known.watermark), known.extras)

    def train_task(self, held: HeldLease, batches: TaskBatches, commit: Commit) -> None:
        lease = held.lease
        for batch in batches:
            held.minibatch = batch.n
            seed = derive_seed(self._seed, lease.epoch, lease.task, batch.n)
            with self._clock.during(Activity.COMPUTE if self._compiled else Activity.COMPILE):
                rate = self._framework.learning_rate(lease.epoch, self._ledger.steps)
                try:
                    loss = self._framework.train(batch, seed, rate)
                except NotFiniteStep as error:
                    self._is_spoiled = True
                    raise NotFinite(batch.n, str(error)) from error
            self._compiled = True
            with self._lock:
                self._ledger.add(MinibatchName(lease.epoch, lease.task, batch.n), batch.size)
                self._ledger.steps += 1
                self._ledger.num_records += batch.size
            commit(batch.n, loss)
            self._checkpoint_if_due()

    def values(self, held: HeldLease) -> Values:
        return Values()

    def tables(self, held: HeldLease) -> list[TableRows]:
        return []

    def save_last(self) -> None:
        if self._is_behind:
            try:
                self._save()
            except CheckpointError as error:
                raise LastCheckpointError(error.what) from error

    def close(self) -> None:
        if self._is_behind:
            self._checkpoint()

    @property
    def _is_behind(self) -> bool:
        """Whether the newest checkpoint lacks minibatches, or could not be written."""
        is_newer = self._has_failed or self._ledger.steps > self._saved_at[0]
        return self._checkpoints.is_wanted and is_newer and not self._is_spoiled

    def _checkpoint_if_due(self) -> None:
        if not self._checkpoints.is_wanted or self._is_spoiled:
            return
        steps, moment = self._saved_at
        if self._checkpoint_steps:
            due = self._ledger.steps - steps >= self._checkpoint_steps
        else:
            due = time.monotonic() - moment >= _CHECKPOINT_PERIOD_S
        if self._checkpoints.take_request() or due:
            self._checkpoint()

    def _checkpoint(self) -> None:
        try:
            self._save()
        except CheckpointError as error:
            _log.error("Checkpoint at step %d failed: %s; training continues", self._ledger.steps, error.what)

    def _save(self) -> None:
        self._saved_at, self._has_failed = (self._ledger.steps, time.monotonic()), True
        with self._clock.during(Activity.CHECKPOINT):
            self._checkpoints.save(self._ledger.steps, self._framework.state(), self._ledger)
        self._has_failed = False
