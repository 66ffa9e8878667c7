"""`JobStore`: the port through which the job commands find and change the jobs of one runtime, with its value types.

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
    """The phase of a job: the master's, or `STOPPED` if no master runs a job that has not ended."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job and its state when it was read.

    Attributes:
        phase: Phase of the whole job.
        status: The master's last status, with the pods as they were found; before the first one only the name is set.
        note: Details of the phase, and what to do; may be empty.
        namespace: Empty for a local job.
        context: Context of the kubeconfig, if the user has chosen one; empty: the current one.
        directory: Directory of a local job; empty on Kubernetes.
        created_at: Seconds since the Unix epoch; 0 if unknown.
        spec: As submitted, without its secrets; None if it was deleted or cannot be read.
        has_begun: The job has state from which `elasticdl resume` can continue.
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
        """Where the job is, for messages: a text that follows its name."""
        return f"in namespace {self.namespace}" if self.runtime is Runtime.KUBERNETES else "on this machine"

    @property
    def logs(self) -> str:
        """Where its logs are: a directory, or the command that prints them."""
        return f"{self.directory}/logs" if self.directory else self.command("logs")

    def command(self, verb: str) -> str:
        """Return `elasticdl VERB JOB` with the options that identify this job."""
        where = f"--namespace={self.namespace}" if self.runtime is Runtime.KUBERNETES else "--runtime=local"
        context = f" --context={self.context}" if self.context else ""
        return f"elasticdl {verb} {self.name} {where}{context}"

    @property
    def continuation(self) -> str:
        """How a stopped job continues, as part of a sentence."""
        if not self.has_begun:
            return "the command that started it starts it again"
        return f"`{self.command('resume')}` continues it"

    @property
    def identity(self) -> dict[str, Any]:
        """The keys with which every object of ``--output=json`` about a job begins."""
        return {"name": self.name, "runtime": self.runtime.value, "namespace": self.namespace}

    def to_plain(self) -> dict[str, Any]:
        """Return the object of ``--output=json``; docs/jobs.md lists its keys."""
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
    """Return the phase of a job from its master's last status.

    Args:
        status: The last status.
        runs: Whether a master runs the job, or is about to.
    """
    if status.exit_code is not None:
        return Phase.FAILED if status.exit_code or status.phase is JobPhase.FAILED else Phase.SUCCEEDED
    if not runs:
        return Phase.STOPPED
    return Phase.PENDING if status.phase is JobPhase.PENDING else Phase.RUNNING


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a pod has printed, without its line break.

    Attributes:
        time: When it was printed, by RFC 3339; empty if it was not requested or is unknown.
    """

    pod: str
    text: str
    time: str = ""


@dataclass(frozen=True, slots=True)
class LogRequest:
    """The lines to read.

    Attributes:
        role: master, worker-0, ps-1, …; worker, ps: all pods of that role; empty: all pods.
        follow: Continue with new lines until the end of the job.
        tail: Number of last lines; -1: all.
        since_s: Of the existing lines, only those of the last seconds; 0: all.
        previous: Read the run before the current one of each pod.
        timestamps: Add the time of each line.
    """

    role: str
    follow: bool
    tail: int
    since_s: float = 0.0
    previous: bool = False
    timestamps: bool = False

    @property
    def is_of_many(self) -> bool:
        """Whether lines of several pods may be returned."""
        return self.role in ("", "ps", "worker")

    def takes(self, role: str) -> bool:
        """Return whether the lines of a pod, such as worker-0, are requested."""
        return self.role in ("", role) or (self.is_of_many and role.startswith(f"{self.role}-"))


class JobStore(Protocol):
    """A store of jobs.  All methods raise `ElasticDLError` when the runtime cannot be reached or refuses."""

    def list(self) -> list[JobInfo]:
        """Return every job, including ended ones, the oldest first."""
        ...

    def find(self, name: str) -> JobInfo | None:
        """Return a job by its name; None if there is none."""
        ...

    def logs(self, job: JobInfo, request: LogRequest) -> Iterator[LogLine]:
        """Yield the output of the job's pods."""
        ...

    def journal(self, job: JobInfo) -> JobJournal:
        """Return the job's events and its metrics over time, as far as its master has written them.

        Raises:
            JobError: The journal cannot be read.
        """
        ...

    def may(self, job: JobInfo, verb: str) -> bool:
        """Return whether this user has the rights to `delete`, `resume`, `scale` or `stop` the job."""
        ...

    def delete(self, job: JobInfo, wait_s: float | None) -> None:
        """End the job and remove all of its state; wait at most `wait_s` seconds for that, None: do not wait."""
        ...

    def scale(self, job: JobInfo, num_workers: WorkerRange, current: int | None = None) -> int:
        """Store how many workers the job shall have; its master follows at once, or a later master does.

        Args:
            num_workers: A number or a range that `worker_range.parse_request` accepts for this job.
            current: Do nothing unless this is the wanted number now; None: any number.

        Returns:
            The number that was wanted before.

        Raises:
            JobError: The wanted number is not `current`, or the job's specification does not exist.
        """
        ...

    def faults(self, job: JobInfo) -> FaultInjector:
        """Return the injector of faults into the job.

        Raises:
            JobError: The job's runtime is not installed here.
        """
        ...

    def tensorboard(self, job: JobInfo, port: int) -> int:
        """Show the job's event files on a local port (0: a free one) until Ctrl-C; return the exit code."""
        ...

    def stop(self, job: JobInfo, wait_s: float | None) -> bool:
        """End all pods of a running job, after a checkpoint if one can be written; `resume` continues the job.

        Args:
            wait_s: Seconds to wait for the end; None: do not wait.

        Returns:
            Whether no pod of the job runs any more.

        Raises:
            JobError: The training would be lost, since the job writes no checkpoints.
        """
        ...

    def resume(self, job: JobInfo) -> int:
        """Start a master for a job that has none; return the exit code for the shell."""
        ...
