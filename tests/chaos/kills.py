"""Faults as data: who, what, when.  `run_life` makes them happen to a job, in order of progress."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from elasticdl.cluster.cluster import Role
from tests.chaos.job import LocalJob


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL of the youngest running pod of a role once `at_version` minibatches are committed."""

    role: Role
    at_version: int

    def strike(self, job: LocalJob) -> int:
        job.wait_until(f"a running {self.role}", lambda: bool(job.pods(self.role)))
        victim = job.pods(self.role)[-1]
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
        job.wait_until(
            f"the end of {victim.name}",
            lambda: all((pod.uid, pod.restarts) != (victim.uid, victim.restarts) for pod in job.pods(self.role)),
        )
        return 1


@dataclass(frozen=True, slots=True)
class Freeze:
    """SIGSTOP of the oldest running worker for longer than its lease, then SIGCONT: a zombie wakes up."""

    at_version: int
    for_s: float

    def strike(self, job: LocalJob) -> int:
        job.wait_until("a running worker", lambda: bool(job.pods(Role.WORKER)))
        victim = job.pods(Role.WORKER)[0]
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGSTOP)
            threading.Event().wait(self.for_s)
            os.kill(victim.pid, signal.SIGCONT)
        return 0


def run_life(job: LocalJob, life: Sequence[Kill | Freeze]) -> int:
    """Returns the number of kills."""
    kills = 0
    for fault in sorted(life, key=lambda fault: fault.at_version):
        job.wait_for_version(fault.at_version)
        kills += fault.strike(job)
    return kills
