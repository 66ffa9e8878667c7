"""Local strategy: no PS; this worker's model, optimizer and ledger are one checkpoint.

After its death the successor loads the newest checkpoint and tells the master what that one holds; the rest is handed
out again.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import threading
import time
import zlib
from pathlib import Path

import numpy as np

from elasticdl.frameworks.framework import Framework, TableRows
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.activity import Activity, ActivityClock
from elasticdl.worker.batches import TaskBatches
from elasticdl.worker.leases import HeldLease
from elasticdl.worker.seeds import derive_seed
from elasticdl.worker.strategy import Commit, Values
from elasticdl_client.errors import CheckpointError

_log = logging.getLogger("elasticdl.worker")
_CHECKPOINT_PERIOD_S = 60.0
_STATE_FILE = "local.npz"
_MANIFEST = "MANIFEST.json"


class LocalStrategy:
    """One worker trains with the user's own optimizer."""

    def __init__(
        self,
        framework: Framework,
        job_name: str,
        seed: int,
        checkpoint_dir: str,
        checkpoint_steps: int,
        keep_checkpoint_max: int,
        clock: ActivityClock,
    ) -> None:
        self._framework = framework
        self._job_name = job_name
        self._seed = seed
        self._directory = Path(checkpoint_dir) if checkpoint_dir else None
        self._checkpoint_steps = checkpoint_steps
        self._keep = keep_checkpoint_max
        self._clock = clock
        self._compiled = False
        self._lock = threading.Lock()  # the heartbeat reads the ledger when the master has a new life
        self._applied: dict[tuple[int, int], set[int]] = {}
        self._num_applies = 0
        self._saved_at = (0, time.monotonic())

    def restore(self) -> None:
        """Loads this job's newest whole checkpoint, if there is one."""
        for directory in self._versions():
            try:
                self._load(directory)
            except CheckpointError as error:
                _log.warning("%s", error)
            else:
                _log.info("Restored the model at step %d from %s", self._num_applies, directory)
                return

    def ledger(self) -> pb.AppliedSet:
        """Which minibatches the model holds."""
        with self._lock:
            tasks = [
                pb.AppliedTask(epoch=epoch, task=task, watermark=0, extras=sorted(done))
                for (epoch, task), done in sorted(self._applied.items())
            ]
            return pb.AppliedSet(tasks=tasks, num_applies=self._num_applies)

    def begin(self, held: HeldLease) -> None:
        with self._lock:
            held.committed.update(self._applied.get((held.lease.epoch, held.lease.task), ()))

    def train_task(self, held: HeldLease, batches: TaskBatches, commit: Commit) -> None:
        lease = held.lease
        for batch in batches:
            held.minibatch = batch.n
            seed = derive_seed(self._seed, lease.epoch, lease.task, batch.n)
            with self._clock.during(Activity.COMPUTE if self._compiled else Activity.COMPILE):
                rate = self._framework.learning_rate(lease.epoch, self._num_applies)
                loss = self._framework.train(batch, seed, rate)
            self._compiled = True
            with self._lock:
                self._applied.setdefault((lease.epoch, lease.task), set()).add(batch.n)
                self._num_applies += 1
            commit(batch.n, loss)
            self._checkpoint_if_due()

    def values(self, held: HeldLease) -> Values:
        return Values(None, lambda batch: {})

    def tables(self, held: HeldLease) -> list[TableRows]:
        return []

    def close(self) -> None:
        if self._directory is not None and self._num_applies > self._saved_at[0]:
            self._checkpoint()

    def _checkpoint_if_due(self) -> None:
        if self._directory is None:
            return
        steps, moment = self._saved_at
        if self._checkpoint_steps:
            due = self._num_applies - steps >= self._checkpoint_steps
        else:
            due = time.monotonic() - moment >= _CHECKPOINT_PERIOD_S
        if due:
            self._checkpoint()

    def _checkpoint(self) -> None:
        self._saved_at = (self._num_applies, time.monotonic())
        with self._clock.during(Activity.CHECKPOINT):
            try:
                self._save()
            except OSError as error:
                _log.error("Checkpoint at step %d failed: %s; training goes on", self._num_applies, error)

    def _save(self) -> None:
        assert self._directory is not None
        final = self._directory / f"version-{self._num_applies}"
        temporary = self._directory / f".version-{self._num_applies}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        buffer = io.BytesIO()
        np.savez(buffer, **self._framework.state())  # type: ignore[arg-type]
        state = buffer.getvalue()
        manifest = {
            "job_name": self._job_name,
            "strategy": "Local",
            "steps": self._num_applies,
            "size_bytes": len(state),
            "crc32": zlib.crc32(state),
            "applied": [[epoch, task, sorted(done)] for (epoch, task), done in sorted(self._applied.items())],
        }
        try:
            _write_durably(temporary / _STATE_FILE, state)
            _write_durably(temporary / _MANIFEST, json.dumps(manifest).encode())
            shutil.rmtree(final, ignore_errors=True)
            os.rename(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in self._versions()[self._keep :] if self._keep else ():
            shutil.rmtree(old, ignore_errors=True)

    def _versions(self) -> list[Path]:
        """Checkpoint directories, newest first."""
        if self._directory is None or not self._directory.is_dir():
            return []
        found = [path for path in self._directory.glob("version-*") if path.name[8:].isdigit()]
        return sorted(found, key=lambda path: -int(path.name[8:]))

    def _load(self, directory: Path) -> None:
        try:
            manifest = json.loads((directory / _MANIFEST).read_text())
            state = (directory / _STATE_FILE).read_bytes()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the checkpoint in {directory} cannot be read: {error}") from error
        if manifest.get("job_name") != self._job_name or manifest.get("strategy") != "Local":
            raise CheckpointError(f"the checkpoint in {directory} is not of job {self._job_name}")
        if len(state) != manifest["size_bytes"] or zlib.crc32(state) != manifest["crc32"]:
            raise CheckpointError(f"{directory / _STATE_FILE} is damaged: size or checksum differs from its manifest")
        with np.load(io.BytesIO(state), allow_pickle=False) as arrays:
            self._framework.load_state(dict(arrays))
        self._applied = {(epoch, task): set(done) for epoch, task, done in manifest["applied"]}
        self._num_applies = manifest["steps"]
        self._saved_at = (self._num_applies, time.monotonic())


def _write_durably(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
