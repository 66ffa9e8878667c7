"""Checkpoints: when one is due, whether one is being written, and the newest complete one.

Without parameter servers workers write their own: then none is ever due here, and reports of workers are recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticdl.master.core.events import CheckpointFailed, CheckpointRequested, CheckpointSaved
from elasticdl.master.core.state import JobState
from elasticdl.master.core.values import Level
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.job_events import EventKind

CheckpointEvent = CheckpointSaved | CheckpointFailed | CheckpointRequested
_ADVICE = (
    "\n  → See that --checkpoint_dir has room and can be written by all pods. A job with another --checkpoint_dir "
    "begins with the newest whole checkpoint by --checkpoint_dir_for_init."
)
_RETRY_LAST_S = 5.0  # enough for a pause of the storage, or until the loss of a server is noticed


class Checkpoints:
    """Checkpoints of the job; versions are model versions.

    Attributes:
        newest: Directory of the newest complete checkpoint of the parameter servers.
        num_requests: Number of requests in this generation of the master; workers that hold the model write a
            checkpoint when it changes.
    """

    def __init__(self, state: JobState, clock: float) -> None:
        self._settings = settings = state.settings
        self._out = state.out
        self._is_on = bool(settings.checkpoint_dir) and settings.strategy is DistributionStrategy.PARAMETER_SERVER
        self._is_on = self._is_on and settings.has_training_data
        self.newest = ""
        self.num_requests = 0
        self._is_requested = False
        self._reported = (0, False)  # the newest of a worker: version, and whether it has failed
        self._saved_version = 0
        self._tried_version = 0
        self._num_failures = 0  # consecutive ones, of `_tried_version`
        self._is_awaited = False  # the job, or a PS, waits for the present one to be written before it ends
        self._reason, self._cause = "", 0  # of the newest failure
        self._tried_at = clock
        self.is_running = False

    def handle(self, event: CheckpointEvent) -> None:
        match event:
            case CheckpointSaved():
                self.is_running = False
                self.newest, self._saved_version = event.directory, event.version
                self._num_failures = 0
                self._report(event)
            case CheckpointFailed():
                self.is_running = False
                self._num_failures += 1
                self._reason = event.reason
                self._cause = self._report(event)
            case CheckpointRequested():  # as soon as one can be written
                self.num_requests += 1
                self._is_requested = self._is_on
                self._out.log("A checkpoint was asked for")

    def handle_of_worker(self, event: CheckpointSaved | CheckpointFailed) -> None:
        """Report a worker's checkpoint or its failure once, since heartbeats and members repeat it."""
        reported = (event.version, isinstance(event, CheckpointFailed))
        if reported != self._reported:
            self._reported = reported
            self._report(event)

    def _report(self, event: CheckpointSaved | CheckpointFailed) -> int:
        """Log the event; return its number."""
        subject = f"checkpoint-{event.version}"
        if isinstance(event, CheckpointFailed):
            text = f"The checkpoint of version {event.version} failed: {event.reason}."
            self._out.log(f"{text}{self._then()}", Level.ERROR)
            return self._out.events.add(EventKind.CHECKPOINT_FAILED, subject, event.reason)
        text = f"saved to {event.directory}"
        self._out.log(f"Checkpoint of version {event.version} {text}")
        return self._out.events.add(EventKind.CHECKPOINT_SAVED, subject, text, directory=event.directory)

    def begin_if_due(self, version: int, is_wanted: bool, clock: float) -> bool:
        """Return whether to write a checkpoint now; if so, it counts as being written.

        Args:
            is_wanted: It is due regardless of time and steps.
        """
        if not self._is_on or self.is_running or version < self._tried_version:
            return False
        if version == self._tried_version and not (is_wanted and self._may_retry(clock)):
            return False
        steps = self._settings.checkpoint_steps
        if steps > 0:
            due = version // steps > self._tried_version // steps
        else:
            due = clock - self._tried_at >= self._settings.checkpoint_interval
        if not due and not is_wanted and not self._is_requested:
            return False
        self._is_requested = False
        if version > self._tried_version:
            self._num_failures = 0
        self.is_running, self._tried_version, self._tried_at = True, version, clock
        self._is_awaited = is_wanted
        return True

    def _then(self) -> str:
        """Return a sentence about what follows after a failure."""
        if not self._is_awaited:
            return " The job continues and tries again later."
        limit = self._settings.max_task_failures
        return f" It is tried again, up to {limit} times in all." if self._num_failures < limit else ""

    def seconds(self, clock: float) -> float:
        """Return the seconds since the start of the checkpoint that is being written; 0 if none is."""
        return clock - self._tried_at if self.is_running else 0.0

    def is_settled(self, version: int) -> bool:
        """Return whether this version is saved, its saving has failed, or there is nothing to save."""
        return not self._is_on or (not self.is_running and self._tried_version >= version)

    def is_saved(self, version: int) -> bool:
        """Return whether this version is saved, or there is nothing to save."""
        return not self._is_on or (self.is_settled(version) and not self._num_failures)

    def lasting_failure(self) -> tuple[str, int] | None:
        """Return why no more attempts are made, with advice, and the number of its event; None if one will be made."""
        if self._num_failures < self._settings.max_task_failures:
            return None
        return f"The last checkpoint was not written: {self._reason}{_ADVICE}", self._cause

    def _may_retry(self, clock: float) -> bool:
        return 0 < self._num_failures < self._settings.max_task_failures and clock - self._tried_at >= _RETRY_LAST_S

    def source(self) -> tuple[str, bool]:
        """Return the directory that a starting PS restores, and whether to restore only the parameters."""
        if self.newest:
            return self.newest, False
        return self._settings.checkpoint_dir_for_init, bool(self._settings.checkpoint_dir_for_init)

    def snapshot(self) -> dict[str, Any]:
        return {"newest": self.newest, "saved_version": self._saved_version, "reported": list(self._reported)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.newest, self._saved_version = saved["newest"], saved["saved_version"]
        self._tried_version = self._saved_version
        version, has_failed = saved.get("reported", (0, False))
        self._reported = (version, has_failed)
