"""`elasticdl top` and `elasticdl list --watch`: their display, on streams, and in a real terminal."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyte
import pytest

from elasticdl_client.choices import Runtime
from elasticdl_client.errors import FlagError
from elasticdl_client.job_status import DeviceStatus, JobPhase, JobStatus, PodStatus
from elasticdl_client.jobs import commands, watch, words
from elasticdl_client.jobs.store import JobInfo, Phase
from elasticdl_client.kubernetes.api import ClusterError
from tests.client.test_jobs_local import Run, home, run  # noqa: F401

NOW = 1_700_000_000.0
STATUS = JobStatus(
    "digits",
    JobPhase.RUNNING,
    records_done=450,
    records_total=1000,
    records_per_second=12.0,
    eta_seconds=46.0,
    workers_alive=1,
    workers_wanted=2,
    model_version=1234,
    loss=0.5,
    worker_seconds={"useful": 3.0, "starting": 1.0},
    pods=(
        PodStatus("elasticdl-digits-master", "master", "Running"),
        PodStatus("elasticdl-digits-worker-0", "worker", "Failed", "OOMKilled"),
        PodStatus("elasticdl-digits-worker-1", "worker", "Succeeded"),
    ),
)
RUNNING = JobInfo("digits", Runtime.KUBERNETES, Phase.RUNNING, STATUS, namespace="team", created_at=NOW - 60)
ENDED = JobInfo("old", Runtime.LOCAL, Phase.FAILED, dataclasses.replace(STATUS, job_name="old"), created_at=NOW - 10)


def test_the_screen_has_all_jobs_the_running_first_and_the_pods_of_those() -> None:
    lines = watch.screen([ENDED, RUNNING], NOW).splitlines()
    assert lines[0].endswith("jobs: 1 running, 1 failed")
    rows = [line.split() for line in lines[3:5]]
    assert rows[0] == ["digits", "team", "Running", "45%", "12/s", "46s", "75%", "1/2", "-", "1,234", "0.5", "60s"]
    assert rows[1][:6] == ["old", "local", "Failed", "45%", "-", "-"]
    pods = [line.split() for line in lines[7:]]
    assert pods == [["digits", "master", "Running", "0"], ["digits", "worker-0", "Failed", "0", "OOMKilled"]]


def test_pods_of_workers_on_devices_have_their_memory() -> None:
    status = dataclasses.replace(STATUS, devices=(DeviceStatus(0, "cuda:0", "H100", 3 << 29, 80 << 30),))
    lines = watch.screen([dataclasses.replace(RUNNING, status=status)], NOW).splitlines()
    assert [line.split() for line in lines[5:]] == [
        ["JOB", "POD", "PHASE", "RESTARTS", "GPU", "MEMORY", "MESSAGE"],
        ["digits", "master", "Running", "0", "-"],
        ["digits", "worker-0", "Failed", "0", "1.5", "of", "80.0", "GiB", "OOMKilled"],
    ]


class Ending(Exception):
    """The user has seen enough."""


def seen(*looks: Sequence[JobInfo] | ClusterError, monkeypatch: pytest.MonkeyPatch, form: str = "") -> None:
    """Watches until the looks are used up."""
    monkeypatch.setattr(watch, "LOOK_S", 0)
    left: Iterator[Sequence[JobInfo] | ClusterError] = iter(looks)

    def list_jobs() -> Sequence[JobInfo]:
        look = next(left, None)
        if look is None:
            raise Ending
        if isinstance(look, ClusterError):
            raise look
        return look

    with pytest.raises(Ending):
        watch.watch_list(list_jobs, lambda jobs: words.job_table(jobs, with_namespace=False, wide=True), form)


def test_a_watched_list_prints_a_row_for_each_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = dataclasses.replace(RUNNING, created_at=0.0)
    done = dataclasses.replace(job, phase=Phase.SUCCEEDED)
    seen([job], [job], ClusterError("away"), [done], [], monkeypatch=monkeypatch)
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert [row[:3] for row in rows if row[0] == "digits"] == [
        ["digits", "kubernetes", "Running"],
        ["digits", "kubernetes", "Succeeded"],
    ]


def test_a_job_that_grows_older_is_no_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    later = [dataclasses.replace(RUNNING, created_at=RUNNING.created_at - 3600 * hours) for hours in range(4)]
    seen(*([job] for job in later), monkeypatch=monkeypatch)
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("digits")]) == 1


def test_a_watched_list_of_objects_is_a_line_for_each_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen([RUNNING], [RUNNING], [ENDED, RUNNING], monkeypatch=monkeypatch, form="json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [[job["name"] for job in line] for line in lines] == [["digits"], ["old", "digits"]]


def test_a_snapshot_is_what_list_prints(job: Path, run: Run) -> None:  # noqa: F811
    assert json.loads(run("top", "-o", "json")) == json.loads(run("list", "-o", "json"))
    assert "JOB" in run("top")
    with pytest.raises(FlagError, match="does not go with --watch"):
        commands.run("list", ["-w", "-o", "yaml"])


@pytest.fixture
def job(home: Path) -> Path:  # noqa: F811
    """One that has failed."""
    directory = home / ".elasticdl" / "jobs" / "digits"
    directory.mkdir(parents=True)
    (directory / "spec.json").write_text('{"job_name": "digits"}')
    failed = dataclasses.replace(STATUS, phase=JobPhase.FAILED, exit_code=1)
    (directory / "status.json").write_text(failed.to_json())
    return directory


@pytest.mark.parametrize(("variable", "is_red"), [("SOME_COLOR", True), ("NO_COLOR", False)])
def test_a_terminal_is_redrawn_until_ctrl_c_with_colors_unless_they_are_not_wanted(
    job: Path, variable: str, is_red: bool
) -> None:
    controller, terminal = pty.openpty()
    environment = {**os.environ, variable: "1", "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "20"}
    arguments = [sys.executable, "-m", "elasticdl_client.main", "top", "--runtime=local"]
    process = subprocess.Popen(arguments, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    screen = pyte.Screen(120, 20)
    stream = pyte.ByteStream(screen)
    try:
        while not any("digits" in line for line in screen.display):
            stream.feed(os.read(controller, 65536))
        row = next(number for number, line in enumerate(screen.display) if "digits" in line)
        assert (screen.buffer[row][screen.display[row].index("Failed")].fg == "red") is is_red
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        os.close(controller)
