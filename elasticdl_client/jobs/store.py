"""The port of the job commands: jobs of one runtime, found and acted upon.  Adapters: local_jobs, kubernetes_jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from elasticdl_client.chaos.faults import FaultInjector
from elasticdl_client.job_journal import JobJournal
from elasticdl_client.jobs.job import JobInfo
from elasticdl_client.worker_range import WorkerRange


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
        previous: of each pod's life before the present one.
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
