"""``python -m tests.chaos``: the kill tests at length, one closing line a job."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.chaos.jobs import JOBS, RealJob
from tests.chaos.kills import run_life
from tests.chaos.scenarios import LEASE_TIMEOUT_S, coverage_of, life_of


def torment(job: RealJob, worker_kills: int, directory: Path) -> bool:
    """Runs one job through its life; prints its closing line; whether it ended right."""
    data = job.make_data(directory)
    print(
        f"{job.name}: {job.num_records} records, about {job.num_steps} steps, {worker_kills} workers to kill",
        flush=True,
    )
    running = job.local_job(
        directory / f"job-{job.name}", data, checkpoint_steps=40, lease_timeout=LEASE_TIMEOUT_S
    ).start()
    try:
        kills = run_life(running, life_of(job, worker_kills))
        exit_code = running.wait(600)
    finally:
        running.end()
    epochs = coverage_of(running)
    metric, least = job.quality
    value = running.metrics()[metric]
    records, committed, repeated, lost = (
        sum(getattr(epoch, name) for epoch in epochs) for name in ("records", "committed", "repeated", "lost")
    )
    print(
        f"{job.name}: kills {kills}, records {records}, committed {committed}, repeated {repeated}, lost {lost}"
        f" ({metric} {value:.4f}, exit code {exit_code})",
        flush=True,
    )
    exact = records == committed == job.num_records and repeated == 0 and lost == 0
    if exit_code != 0 or not exact or value < least:
        print(running.story(), file=sys.stderr)
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--jobs", nargs="*", choices=[job.name for job in JOBS], default=[job.name for job in JOBS])
    parser.add_argument("--worker_kills", type=int, default=12)
    options = parser.parse_args()
    ok = True
    with tempfile.TemporaryDirectory(prefix="elasticdl-chaos-") as directory:
        for job in JOBS:
            if job.name in options.jobs:
                if not job.available():
                    print(f"{job.name}: skipped, its data is not here")
                    continue
                ok &= torment(job.lengthened(), options.worker_kills, Path(directory))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
