"""Faults of `elasticdl chaos` as data: victim, fault, time.  `run_life` injects them, in order of progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elasticdl.protocol import Role
from elasticdl_client.chaos.faults import Victim
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
        job.kill(running(job, self.role)[-1])
        return 1


@dataclass(frozen=True, slots=True)
class KillInCheckpoint:
    """SIGKILL of a running PS once a checkpoint has been begun, after `at_version`, that has no manifest yet."""

    at_version: int
    index: int = 0

    def strike(self, job: LocalJob) -> int:
        (victim,) = running(job, Role.PS, self.index)
        checkpoints, pause, deadline = job.job_dir / "checkpoints", threading.Event(), time.monotonic() + _CHECKPOINT_S
        while not _is_being_written(checkpoints):
            if not job.running() or time.monotonic() > deadline:
                raise JobTimeout(f"waited for a checkpoint under way\n{job.story()}")
            pause.wait(_LOOK_S)
        job.kill(victim)
        return 1


@dataclass(frozen=True, slots=True)
class Freeze:
    """SIGSTOP of the oldest running worker for some time, then SIGCONT: a zombie wakes up.

    Attributes:
        for_s: longer than the time-out that is to be exceeded.
        loses_lease: it ends as soon as the worker has lost a lease.  One that waits for a task has none to lose: it
            continues, and is stopped again.
    """

    at_version: int
    for_s: float
    loses_lease: bool = True

    def strike(self, job: LocalJob) -> int:
        for _ in range(_MAX_FREEZES):
            if self._freeze(job, running(job, Role.WORKER)[0]):
                return 0
        raise JobTimeout(f"a worker with a lease could not be frozen\n{job.story()}")

    def _freeze(self, job: LocalJob, victim: Victim) -> bool:
        pause, deadline = threading.Event(), time.monotonic() + self.for_s
        job.stop(victim)
        if victim not in job.victims(Role.WORKER):
            return False
        try:
            while not (is_lost := self.loses_lease and _has_lost_a_lease(job, victim)) and time.monotonic() < deadline:
                pause.wait(_CHECK_S)
        finally:
            job.resume(victim)
        return is_lost or not self.loses_lease


def run_life(job: LocalJob, life: Sequence[Fault]) -> int:
    """Makes the faults happen, then lets the job hurry; returns the number of kills."""
    kills = 0
    for fault in sorted(life, key=lambda fault: fault.at_version):
        job.wait_for_version(fault.at_version)
        kills += fault.strike(job)
    job.hurry()
    return kills


def running(job: LocalJob, role: Role, index: int | None = None) -> list[Victim]:
    """Running pods of a role, or the one of a number; waits until there is one."""
    found: list[Victim] = []

    def is_there() -> bool:
        found[:] = [victim for victim in job.victims(role) if index in (None, victim.index)]
        return bool(found)

    job.wait_until(f"a running {role}", is_there)
    return found


def _has_lost_a_lease(job: LocalJob, worker: Victim) -> bool:
    events = read_journal(job.job_dir).history.events
    return any(event.kind is EventKind.LEASE_LOST and event.subject == worker.subject for event in events)


def _is_being_written(checkpoints: Path) -> bool:
    """Whether the newest checkpoint has been begun and has no manifest yet."""
    versions = checkpoints.glob("version-*")
    newest = max(versions, key=lambda path: int(path.name.removeprefix("version-")), default=None)
    return newest is not None and not (newest / "MANIFEST.json").exists()
