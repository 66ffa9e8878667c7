"""Machines of a test: homes of their own, and their loss with all processes of a job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from elasticdl.protocol import Role
from elasticdl_client.job_dir import holders
from tests.chaos.job import LocalJob


def machine(tmp_path: Path, name: str, job_name: str) -> Path:
    """The directory that a job has on a machine with a home of its own."""
    directory = tmp_path / name / ".elasticdl" / "jobs" / job_name
    directory.parent.mkdir(parents=True)
    return directory


def lose(job: LocalJob) -> None:
    """Kill all processes of a job at once, as the loss of its machine does."""
    processes = [pod.pid for role in Role for pod in job.pods(role) if pod.pid]
    for process in [*holders(job.job_dir), *processes]:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    job.wait()
