"""A pod that plays the master towards the client: writes status files and ends as its argument says."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

from elasticdl_client.job_events import EventHistory, EventKind, JobEvent, to_journal
from elasticdl_client.job_status import EpochCoverage, JobPhase, JobStatus


def write(job_dir: Path, status: JobStatus) -> None:
    draft = job_dir / "status.tmp"
    draft.write_text(status.to_json())
    draft.rename(job_dir / "status.json")


def save(job_dir: Path, version: int = 50) -> None:
    """Writes down that there is a checkpoint."""
    saved = JobEvent(1, 1.0, EventKind.CHECKPOINT_SAVED, f"checkpoint-{version}")
    journal = {"snapshot": {"core": {"events": to_journal(EventHistory((saved,)))}}}
    draft = job_dir / "journal.tmp"
    draft.write_text(json.dumps(journal))
    draft.rename(job_dir / "journal.json")


def take_requests(job_dir: Path, scenario: str, status: JobStatus) -> None:
    """For a checkpoint, from now on."""

    def take(_number: int, _frame: object) -> None:
        if scenario == "saved":
            write(job_dir, dataclasses.replace(status, updated_at=time.time()))
            return
        if scenario == "behind":
            save(job_dir, 40)
            (job_dir / "go").read_text()
        if scenario != "deaf":
            save(job_dir)

    signal.signal(signal.SIGUSR1, take)


def main() -> None:
    """Plays one scenario: succeed, fail, crash, die_once, wait, or one that differs from wait.

    deaf: it writes no checkpoint.  late: its first life takes no request until something is written to the pipe `go`.
    saved: its newest checkpoint has everything, and it writes its status alone.
    behind: at a request it ends an earlier checkpoint first, and then waits for that pipe.
    """
    scenario = sys.argv[1]
    job_dir = Path(os.environ["ELASTICDL_JOB_DIR"])
    first_life = not (job_dir / "lived").exists()
    (job_dir / "lived").touch()
    running = JobStatus("job", JobPhase.RUNNING, epoch=1, num_epochs=1, records_done=50, records_total=100)
    running = dataclasses.replace(
        running, model_version=50, workers_wanted=2, workers_alive=2, generation=1 if first_life else 2
    )
    if scenario == "crash":
        raise SystemExit("this master never works")
    print("port", os.environ["MASTER_PORT"], "pod", os.environ["ELASTICDL_POD_NAME"], flush=True)
    is_late = scenario == "late" and first_life
    if is_late or scenario == "behind":
        os.mkfifo(job_dir / "go")
    waits = scenario in ("wait", "deaf", "late", "behind", "saved")
    if waits:
        (job_dir / "pid").write_text(str(os.getpid()))
    if scenario == "saved":
        save(job_dir)
    if waits and not is_late:
        take_requests(job_dir, scenario, running)
    write(job_dir, running)  # a reader of the client's output finds the line and the pid
    if is_late:
        (job_dir / "go").read_text()
        take_requests(job_dir, scenario, running)
    while waits:
        signal.pause()
    if scenario == "die_once" and first_life:
        os.kill(os.getpid(), signal.SIGKILL)
    done = dataclasses.replace(
        running, records_done=100, coverage=(EpochCoverage(1, 100, 100),), metrics={"accuracy": 0.97}, metrics_step=10
    )
    if scenario == "fail":
        write(job_dir, dataclasses.replace(running, phase=JobPhase.FAILED, exit_code=1, message="feed raised: broken"))
        sys.exit(1)
    write(job_dir, dataclasses.replace(done, phase=JobPhase.SUCCEEDED, exit_code=0))


if __name__ == "__main__":
    main()
