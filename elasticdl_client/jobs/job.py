"""Job: a command's view of a job, the same for both runtimes, and its JSON shape.

Values only; local_jobs.py and kubernetes_jobs.py find jobs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elasticdl_client.choices import Runtime
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase, JobStatus


class Phase(StrEnum):
    """Where a job is: the master's word for it, and `STOPPED` where no master runs a job that has not ended."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job as it was found.

    Attributes:
        phase: of the job as a whole.
        status: the master's last one, with the pods as they were found; never None, at least the name is in it.
        note: details of its phase, and what to do; may be empty.
        namespace: empty for a local job.
        context: of the kubeconfig, if it was chosen; empty: the current one.
        directory: of a local job; empty otherwise.
        created_at: seconds since the Unix epoch; 0 if unknown.
        spec: as submitted, without its secrets; None if it is not kept any more, or cannot be read.
    """

    name: str
    runtime: Runtime
    phase: Phase
    status: JobStatus
    note: str = ""
    namespace: str = ""
    context: str = ""
    directory: str = ""
    created_at: float = 0.0
    spec: JobSpec | None = None

    @property
    def has_ended(self) -> bool:
        return self.phase in (Phase.SUCCEEDED, Phase.FAILED)

    @property
    def where(self) -> str:
        """For messages: behind the name of the job."""
        return f"in namespace {self.namespace}" if self.runtime is Runtime.KUBERNETES else "on this machine"

    @property
    def logs(self) -> str:
        """Where its logs are: a directory, or the command that prints them."""
        return f"{self.directory}/logs" if self.directory else self.command("logs")

    def command(self, verb: str) -> str:
        """`elasticdl VERB JOB`, for this job and no other."""
        where = f"--namespace={self.namespace}" if self.runtime is Runtime.KUBERNETES else "--runtime=local"
        context = f" --context={self.context}" if self.context else ""
        return f"elasticdl {verb} {self.name} {where}{context}"

    @property
    def identity(self) -> dict[str, Any]:
        """Return the keys that every object of ``--output=json`` about a job begins with."""
        return {"name": self.name, "runtime": self.runtime.value, "namespace": self.namespace}

    def to_plain(self) -> dict[str, Any]:
        """The object of ``--output=json``; docs/jobs.md lists its keys."""
        status = dataclasses.asdict(self.status)
        for name in ("job_name", "phase"):
            del status[name]
        if self.has_ended or self.phase is Phase.STOPPED:
            status["eta_seconds"] = None
        return {
            **self.identity,
            "phase": self.phase.value,
            "note": self.note,
            "created_at": self.created_at,
            "directory": self.directory,
            "logs": self.logs,
            **status,
        }


def phase_of(status: JobStatus, *, runs: bool) -> Phase:
    """The phase of a job by its master's last status.

    Args:
        status: as it was written.
        runs: whether a master runs it, or soon will.
    """
    if status.exit_code is not None:
        return Phase.FAILED if status.exit_code or status.phase is JobPhase.FAILED else Phase.SUCCEEDED
    if not runs:
        return Phase.STOPPED
    return Phase.PENDING if status.phase is JobPhase.PENDING else Phase.RUNNING
