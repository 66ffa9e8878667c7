"""Writes the job's status for the client: atomically, at most once a second, and at the end.

It owns the file; what the status says comes from the core.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path

from elasticdl.master.core.status import Status
from elasticdl_client.job_status import EpochCoverage, JobPhase, JobStatus

INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


class StatusFile:
    """``<job_dir>/status.json``."""

    def __init__(self, job_dir: Path) -> None:
        self._path = job_dir / "status.json"
        self._temporary = job_dir / "status.json.new"
        self._written_at = float("-inf")
        self._complained = False

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._written_at >= INTERVAL_S

    def write(self, status: JobStatus) -> None:
        """Writes it now.  A status that cannot be written is said once in the log; the job goes on."""
        self._written_at = time.monotonic()
        status = dataclasses.replace(status, updated_at=time.time())
        try:
            self._temporary.write_text(status.to_json() + "\n")
            self._temporary.replace(self._path)
        except OSError as error:
            self._temporary.unlink(missing_ok=True)
            if not self._complained:
                logger.warning("The status %s cannot be written: %s", self._path, error.strerror)
            self._complained = True
        else:
            self._complained = False

    def read(self) -> JobStatus | None:
        """What was written last; None if nothing readable was."""
        try:
            return JobStatus.from_json(self._path.read_text())
        except (OSError, ValueError, TypeError, KeyError):
            return None


def to_job_status(job_name: str, started_at: float, status: Status) -> JobStatus:
    """The core's view in the shape that the client reads."""
    values = {field.name: getattr(status, field.name) for field in dataclasses.fields(status)}
    values["phase"] = JobPhase(status.phase)
    values["metrics"] = dict(status.metrics)
    values["coverage"] = tuple(EpochCoverage(**dataclasses.asdict(one)) for one in status.coverage)
    return JobStatus(job_name=job_name, started_at=started_at, **values)
