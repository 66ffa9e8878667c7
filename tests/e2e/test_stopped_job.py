"""A real job that is stopped and resumed: no model with anything in it is trained from its beginning."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elasticdl_client.job_dir import read_journal
from elasticdl_client.job_events import EventKind
from tests.chaos.job import REPOSITORY, LocalJob
from tests.chaos.jobs import NUMPY_DIGITS


def resume(job: LocalJob) -> str:
    """Continue a job to its end; return the output."""
    job.hurry()
    return client("resume", job)


def client(command: str, job: LocalJob) -> str:
    done = job_command(command, job)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def job_command(command: str, job: LocalJob) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PACE_FILE": str(job.job_dir.with_name(f"{job.job_dir.name}.pace"))}
    return subprocess.run(
        [sys.executable, "-m", "elasticdl_client.main", command, "numpy", f"--job_dir={job.job_dir}"],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_what_is_trained_before_a_stop_is_not_trained_again_nor_said_again(tmp_path: Path) -> None:
    data = NUMPY_DIGITS.make_data(tmp_path)
    job = NUMPY_DIGITS.local_job(tmp_path / "job", data, job_name="numpy", num_epochs=8, validation_data="")
    job.pace_s = 0.004  # seconds for a record: seven epochs more take longer than any stop
    job.start()
    job.wait_until("an epoch", lambda: any("epoch 1: records" in line for line in job.output))
    before = job.status()
    assert before is not None
    stopped = client("stop", job)
    assert stopped == 'job "numpy" stopped: `elasticdl resume numpy --runtime=local` continues it\n'
    assert job.wait(120) == 128 + signal.SIGINT, job.story()
    assert "`elasticdl resume numpy --runtime=local` continues it." in job.output
    [saved] = [line for line in job.output if line.startswith("A checkpoint of ")]
    assert int(saved.split()[3].replace(",", "")) >= before.model_version
    shutil.copytree(data, tmp_path / "copy", copy_function=shutil.copyfile)  # of other times and inodes
    shutil.rmtree(data)
    (tmp_path / "copy").rename(data)
    said = resume(job)
    ready = [event for event in read_journal(job.job_dir).history.events if event.kind is EventKind.PS_READY]
    assert ready[-1].details["restored_from"], said
    assert "ps-0 ready, restored from " in said, said
    assert "epoch 8: records 1437, committed 1437, repeated 0, lost 0" in said, said
    assert said.count("epoch 1: records") == 1, said  # in the report at the end
    assert " lost: " not in said, said  # workers ended by the stop are not lost
    ended = job.status()
    assert ended is not None
    assert (ended.lost_pods, ended.pods_lost) == ((), {})
    assert (ended.event_counts["JobResumed"], ended.event_counts["PodStopped"]) == (1, 3)
    assert "MasterRestarted" not in ended.event_counts
    submitted_at = (job.job_dir / "spec.json").stat().st_mtime
    assert ended.elapsed_seconds == pytest.approx(ended.updated_at - submitted_at, abs=0.5)
    assert sum(ended.worker_seconds.values()) == pytest.approx(2 * ended.elapsed_seconds, rel=0.01)
    assert sum(ended.ps_seconds.values()) == pytest.approx(ended.elapsed_seconds, rel=0.01)
    assert ended.worker_seconds["stopped"] > 0


def test_a_file_that_is_replaced_between_a_stop_and_a_resume_is_refused(tmp_path: Path) -> None:
    data = NUMPY_DIGITS.make_data(tmp_path)
    (data / "train/SHA256SUMS").unlink()
    (file,) = (data / "train").glob("data-*")
    job = NUMPY_DIGITS.local_job(tmp_path / "job", data, job_name="numpy", num_epochs=8, validation_data="")
    job.pace_s = 0.02
    job.start()
    job.wait_for_version(2)
    client("stop", job)
    job.wait(120)
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused = job_command("resume", job)
    assert refused.returncode == 1, refused.stdout
    said = f"{file} has changed since the job began: it has {len(content)} bytes as before"
    assert said in refused.stdout + refused.stderr
