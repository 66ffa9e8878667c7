"""Faults as data: victim, fault, time.  `run_life` makes them happen to a job, in order of progress."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elasticdl.cluster.cluster import Pod
from elasticdl.protocol.values import Role
from elasticdl_client.job_dir import read_journal
from elasticdl_client.job_events import EventKind
from tests.chaos.job import JobTimeout, LocalJob

_LOOK_S = 0.001
_CHECK_S = 0.05
_CHECKPOINT_S = 60.0
_MAX_FREEZES = 5


class Fault(Protocol):
    """Something bad that happens once `at_version` minibatches are committed."""

    @property
    def at_version(self) -> int: ...

    def strike(self, job: LocalJob) -> int:
        """Returns how many pods it has killed."""
        ...


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL of the youngest running pod of a role once `at_version` minibatches are committed."""

    role: Role
    at_version: int

    def strike(self, job: LocalJob) -> int:
        job.wait_until(f"a running {self.role}", lambda: bool(job.pods(self.role)))
        _kill(job, job.pods(self.role)[-1])
        return 1


@dataclass(frozen=True, slots=True)
class KillInCheckpoint:
    """SIGKILL of a running PS once a checkpoint has been begun, after `at_version`, that has no manifest yet."""

    at_version: int
    index: int = 0

    def strike(self, job: LocalJob) -> int:
        job.wait_until("a running server", lambda: any(pod.index == self.index for pod in job.pods(Role.PS)))
        victim = next(pod for pod in job.pods(Role.PS) if pod.index == self.index)
        checkpoints, pause, deadline = job.job_dir / "checkpoints", threading.Event(), time.monotonic() + _CHECKPOINT_S
        while not _is_being_written(checkpoints):
            if not job.running() or time.monotonic() > deadline:
                raise JobTimeout(f"waited for a checkpoint under way\n{job.story()}")
            pause.wait(_LOOK_S)
        _kill(job, victim)
        return 1


@dataclass(frozen=True, slots=True)
class Freeze:
    """SIGSTOP of the oldest running worker for some time, then SIGCONT: a zombie wakes up.

    Attributes:
        for_s: longer than the time-out that is to be exceeded.
        loses_lease: it ends as soon as the worker has lost a lease.  One that waits for a task has none to lose: it
            goes on, and is stopped again.
    """

    at_version: int
    for_s: float
    loses_lease: bool = True

    def strike(self, job: LocalJob) -> int:
        for _ in range(_MAX_FREEZES):
            job.wait_until("a running worker", lambda: bool(job.pods(Role.WORKER)))
            if self._freeze(job, job.pods(Role.WORKER)[0]):
                return 0
        raise JobTimeout(f"a worker with a lease could not be frozen\n{job.story()}")

    def _freeze(self, job: LocalJob, victim: Pod) -> bool:
        pause, deadline = threading.Event(), time.monotonic() + self.for_s
        try:
            os.kill(victim.pid, signal.SIGSTOP)
        except ProcessLookupError:
            return False
        try:
            while not (is_lost := self.loses_lease and _has_lost_a_lease(job, victim)) and time.monotonic() < deadline:
                pause.wait(_CHECK_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGCONT)
        return is_lost or not self.loses_lease


def run_life(job: LocalJob, life: Sequence[Fault]) -> int:
    """Makes the faults happen, then lets the job hurry; returns the number of kills."""
    kills = 0
    for fault in sorted(life, key=lambda fault: fault.at_version):
        job.wait_for_version(fault.at_version)
        kills += fault.strike(job)
    job.hurry()
    return kills


def _kill(job: LocalJob, victim: Pod) -> None:
    """Returns when the pod's process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim.pid, signal.SIGKILL)
    job.wait_until(
        f"the end of {victim.name}",
        lambda: all((pod.uid, pod.restarts) != (victim.uid, victim.restarts) for pod in job.pods(victim.role)),
    )


def _has_lost_a_lease(job: LocalJob, worker: Pod) -> bool:
    events = read_journal(job.job_dir).history.events
    return any(event.kind is EventKind.LEASE_LOST and event.subject == f"worker-{worker.index}" for event in events)


def _is_being_written(checkpoints: Path) -> bool:
    """Whether the newest checkpoint has been begun and has no manifest yet."""
    versions = checkpoints.glob("version-*")
    newest = max(versions, key=lambda path: int(path.name.removeprefix("version-")), default=None)
    return newest is not None and not (newest / "MANIFEST.json").exists()
