"""Local strategy: no parameter servers; this worker's model, optimizer and ledger are written to one checkpoint.

If the worker dies, its successor loads the newest checkpoint and reports to the master which minibatches are in it; the
rest is granted again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from elasticdl.activities import Activity, ActivityClock
from elasticdl.frameworks.framework import Framework, NotFiniteStep, TableRows
from elasticdl.protocol import WrittenCheckpoint, derive_seed
from elasticdl.ps.applied import MinibatchName
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.checkpoint import StateCheckpoints, read_from
from elasticdl.worker.ledger import Ledger
from elasticdl.worker.tasks import Commit, HeldLease, NotFinite, TaskBatches, Values
from elasticdl_client.errors import CheckpointError, JobError, LastCheckpointError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.worker")
_CHECKPOINT_PERIOD_S = 60.0
STATE_FILE = "local.npz"


class LocalStrategy:
    """Trains in one worker with the user's own optimizer.

    Attributes:
        restored_from: Directory of the checkpoint that the model began with; empty: initial values.
        restored_records: Records of an epoch of that checkpoint's data; 0 if not known.
    """

    def __init__(
        self,
        framework: Framework,
        checkpoints: StateCheckpoints,
        checkpoint_steps: int,
        seed: int,
        clock: ActivityClock,
        num_records: Callable[[], int] = lambda: 0,
    ) -> None:
        """
        Args:
            checkpoint_steps: Minibatches between two checkpoints; 0: one per minute.
            num_records: Returns the records of an epoch, known once there is a task; 0: not checked.
        """
        self._framework = framework
        self._seed = seed
        self._checkpoints = checkpoints
        self._checkpoint_steps = checkpoint_steps
        self._clock = clock
        self._num_records = num_records
        self._has_checked_records = False
        self._compiled = False
        self._lock = threading.Lock()  # the heartbeat thread reads the ledger for a new generation of the master
        self._ledger = Ledger()
        self.restored_from, self.restored_records = "", 0
        self._saved_at = (0, time.monotonic())
        self._has_failed = False  # the newest checkpoint could not be written
        self._is_spoiled = False  # the model has taken a step that is not finite

    @classmethod
    def of(
        cls, spec: JobSpec, framework: Framework, clock: ActivityClock, num_records: Callable[[], int]
    ) -> LocalStrategy:
        """Return the strategy of a job, with initial values."""
        checkpoints = StateCheckpoints.of_module(spec, STATE_FILE)
        return cls(framework, checkpoints, spec.checkpoint_steps, spec.seed, clock, num_records)

    def request_checkpoint(self) -> None:
        """Request a checkpoint after the current minibatch.  Thread-safe."""
        self._checkpoints.request()

    def newest_try(self) -> WrittenCheckpoint | None:
        """Return how the newest attempt to write a checkpoint has ended; None if there was none."""
        return self._checkpoints.newest_try

    def restore(self) -> None:
        """Load this job's newest undamaged checkpoint, if there is one."""
        found = read_from(self._checkpoints.place, self._clock, self._checkpoints.newest)
        if found is None:
            return
        self._framework.load_state(found.arrays)
        self._ledger = found.ledger
        self.restored_from, self.restored_records = str(found.directory), found.epoch_records
        self._saved_at = (self._ledger.steps, time.monotonic())
        _log.info("Restored the model at step %d from %s", self._ledger.steps, found.directory)

    def ledger(self) -> pb.AppliedSet:
        """Return which minibatches are in the model.  Thread-safe."""
        with self._lock:
            return self._ledger.applied.to_message()

    def begin(self, held: HeldLease) -> None:
        with self._lock:
            known = self._ledger.applied.of_task(held.lease.epoch, held.lease.task)
            held.committed.update(range(known.watermark), known.extras)

    def train_task(self, held: HeldLease, batches: TaskBatches, commit: Commit) -> None:
        self._check_records()
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

    def _check_records(self) -> None:
        """Check, before the first minibatch, that the restored ledger is for data with the same number of records.

        Raises:
            JobError: an earlier job of this name had another number.
        """
        if self._has_checked_records or not self._checkpoints.is_wanted:
            return
        try:
            self._checkpoints.depend_on(num_records=self._num_records())
        except CheckpointError as error:
            raise JobError(error.what, error.hint) from error
        self._has_checked_records = True

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
