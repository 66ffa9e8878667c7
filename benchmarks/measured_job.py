"""A job of ours on the local runtime, as benchmarks run and measure it: real `elasticdl train` processes.

The steady rate is the slope of the committed records, as the master counts them in status.json once a second, between
a warm-up and the end of the measured time.  The job is endless and is stopped then.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticdl_client.job_status import JobStatus

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.1
START_S = 120.0


class BenchmarkError(SystemExit):
    """The measured event did not happen; holds the ends of the logs."""


@dataclass(frozen=True, slots=True)
class Point:
    """The master's counts at one moment (seconds since the epoch)."""

    at: float
    records: int


def command(job_dir: Path, flags: Mapping[str, object]) -> list[str]:
    """Return the command line of a job."""
    argv = [sys.executable, "-m", "elasticdl_client.main", "train", "--runtime=local", f"--job_dir={job_dir}"]
    return argv + [f"--{name}={value}" for name, value in flags.items()]


@contextlib.contextmanager
def running_job(job_dir: Path, flags: Mapping[str, object]) -> Iterator[subprocess.Popen[bytes]]:
    """The job while the block runs; then it is stopped as by Ctrl-C."""
    job_dir.parent.mkdir(parents=True, exist_ok=True)
    with (
        (job_dir.parent / f"{job_dir.name}.out").open("wb") as output,
        subprocess.Popen(command(job_dir, flags), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as job,
    ):
        try:
            yield job
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGINT)
                try:
                    job.wait(30)
                except subprocess.TimeoutExpired:
                    job.kill()


def read_status(job_dir: Path) -> JobStatus | None:
    """Return the last status that the master wrote."""
    try:
        return JobStatus.from_json((job_dir / "status.json").read_text())
    except (OSError, ValueError):
        return None


def story(job_dir: Path) -> str:
    """Return the last lines of the client and of the pods."""
    files = [job_dir.parent / f"{job_dir.name}.out", *sorted((job_dir / "logs").glob("*.log"))]
    return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files if file.exists())


def steady_rate(job_dir: Path, flags: Mapping[str, object], warm_up_s: float, seconds: float) -> float:
    """Return records per second of an endless job, after `warm_up_s` of committing records."""
    pause = threading.Event()
    with running_job(job_dir, {**flags, "num_epochs": 0}) as job:
        deadline = time.monotonic() + START_S
        points: list[Point] = []
        while not points or points[-1].at - points[0].at < warm_up_s + seconds:
            if job.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"the job commits no records\n{story(job_dir)}")
            status = read_status(job_dir)
            if status and status.records_done and (not points or status.updated_at > points[-1].at):
                points.append(Point(status.updated_at, status.records_done))
                deadline = time.monotonic() + START_S
            pause.wait(POLL_S)
    measured = [point for point in points if point.at - points[0].at >= warm_up_s]
    return (measured[-1].records - measured[0].records) / (measured[-1].at - measured[0].at)


class Contention:
    """How much of the machine others used while a block ran: 0.5 is half of all cores."""

    def __enter__(self) -> Contention:
        self._busy, self._own, self._began = _busy_s(), _own_s(), time.monotonic()
        self.others = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        elapsed = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        self.others = max(0.0, (_busy_s() - self._busy) - (_own_s() - self._own)) / elapsed


def _busy_s() -> float:
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _, _, irq, softirq = fields[:7]
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
