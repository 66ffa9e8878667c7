"""The port of the job commands: jobs of one runtime, found and acted upon, and the values that it carries.

Adapters: local_jobs, kubernetes_jobs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from elasticdl_client.choices import Runtime
from elasticdl_client.job_series import JobJournal
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.worker_range import WorkerRange

if TYPE_CHECKING:
    from elasticdl_client.chaos.faults import FaultInjector


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
        has_begun: there is something of it that `elasticdl resume` could continue.
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
    has_begun: bool = True

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
    def continuation(self) -> str:
        """How a stopped job continues, as a part of a sentence."""
        if not self.has_begun:
            return "the command that started it starts it again"
        return f"`{self.command('resume')}` continues it"

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


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a pod has printed, without its end.

    Attributes:
        time: when, by RFC 3339, if that was asked for and is known; else empty.
    """

    pod: str
    text: str
    time: str = ""


@dataclass(frozen=True, slots=True)
class LogRequest:
    """Which lines are wanted.

    Attributes:
        role: master, worker-0, ps-1, …; worker, ps: of all pods of that role; empty: of all pods.
        follow: also those to come, to the job's end.
        tail: the number of last lines; -1: all.
        since_s: of the lines so far, only those of the last seconds; 0: all.
        previous: of each pod's run before the present one.
        timestamps: with the time of each line.
    """

    role: str
    follow: bool
    tail: int
    since_s: float = 0.0
    previous: bool = False
    timestamps: bool = False

    @property
    def is_of_many(self) -> bool:
        """Lines of several pods may come."""
        return self.role in ("", "ps", "worker")

    def takes(self, role: str) -> bool:
        """Whether the lines of a pod, such as worker-0, are wanted."""
        return self.role in ("", role) or (self.is_of_many and role.startswith(f"{self.role}-"))


class JobStore(Protocol):
    """Eleven verbs.  All raise `ElasticDLError` when the runtime cannot be reached or refuses."""

    def list(self) -> list[JobInfo]:
        """Every job, ended ones too, the oldest first."""
        ...

    def find(self, name: str) -> JobInfo | None:
        """A job by its name."""
        ...

    def logs(self, job: JobInfo, request: LogRequest) -> Iterator[LogLine]:
        """Yield the output of the job's pods."""
        ...

    def journal(self, job: JobInfo) -> JobJournal:
        """Return the events of the job and its numbers since its start, as far as its master has written them.

        Raises:
            JobError: it cannot be read.
        """
        ...

    def may(self, job: JobInfo, verb: str) -> bool:
        """Whether this user has the rights to `delete`, to `resume`, to `scale` or to `stop` the job."""
        ...

    def delete(self, job: JobInfo, wait_s: float | None) -> None:
        """Ends the job and removes all that there is of it; waits so long for that, or not at all."""
        ...

    def scale(self, job: JobInfo, num_workers: WorkerRange, current: int | None = None) -> int:
        """Write down how many workers the job is to have; its master follows at once, or when there is one again.

        Args:
            num_workers: as `scaling.parse` takes it for this job.
            current: nothing is done unless this number is wanted now; None: any.

        Returns:
            How many were wanted before.

        Raises:
            JobError: another number is wanted now, or the job's specification is gone.
        """
        ...

    def faults(self, job: JobInfo) -> FaultInjector:
        """Return the injector of faults into the job.

        Raises:
            JobError: its runtime is not installed here.
        """
        ...

    def tensorboard(self, job: JobInfo, port: int) -> int:
        """Shows the job's event files on a port of this machine (0: a free one), until Ctrl-C; the exit code."""
        ...

    def stop(self, job: JobInfo, wait_s: float | None) -> bool:
        """Ends all pods of a running job after a checkpoint where one can be written; `resume` continues it.

        Args:
            wait_s: for the end; None: does not wait.

        Returns:
            Whether nothing of it runs any more.

        Raises:
            JobError: its training would be lost, since it keeps no checkpoints.
        """
        ...

    def resume(self, job: JobInfo) -> int:
        """Starts a master for a job that lacks one; the exit code for the shell."""
        ...
