"""Real local jobs that the machine or another version of the program troubles, and what `explain` says about it."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from elasticdl.rpc import frames
from elasticdl_client.explain.diagnosis import Trouble
from elasticdl_client.job_events import EventKind
from tests.chaos.job import REPOSITORY
from tests.chaos.jobs import NUMPY_DIGITS
from tests.explain.explained import explained, the_trouble
from tests.hangs.control_group import memory_limit
from tests.hangs.job_events import events_of
from tests.master.small_disk import small_disk

SHORT = replace(NUMPY_DIGITS, num_epochs=2, num_workers=1, pace_s=0)
LONG = replace(NUMPY_DIGITS, num_epochs=1000)
ENTER = ("sh", "-c", 'echo $$ > "$0" && exec "$@"')


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return NUMPY_DIGITS.make_data(tmp_path_factory.mktemp("data"))


def test_a_worker_that_takes_all_memory_is_distinguished_from_one_that_was_killed(tmp_path: Path, digits: Path) -> None:
    job = SHORT.local_job(tmp_path / "job", digits, validation_data="", model_def="paced.troubled.custom_model")
    job.environment |= {"TROUBLE": "memory", "MARK": str(tmp_path / "mark")}
    with memory_limit(1 << 30) as procs:
        job.launcher = (*ENTER, str(procs))
        assert job.start().wait(120) == 0, job.story()
    diagnosis = the_trouble(tmp_path / "job", Trouble.OUT_OF_MEMORY)
    assert diagnosis.subjects == ("worker-0",)
    assert (diagnosis.evidence["reason"], diagnosis.evidence["exit_code"]) == ("OOMKilled", 128 + signal.SIGKILL)
    assert "worker-1" in diagnosis.done
    assert not diagnosis.cost.is_open


def test_a_server_that_came_back_with_another_version_is_reported_by_both_versions(
    tmp_path: Path, digits: Path
) -> None:
    tree = tmp_path / "tree"
    frames_file = own_tree(tree)
    job = LONG.local_job(tmp_path / "job", digits, validation_data="")
    job.environment |= {"PYTHONPATH": f"{tree}{os.pathsep}{REPOSITORY}", "PYTHONSAFEPATH": "1"}
    job.start()
    try:
        job.wait_for_version(2)
        source = frames_file.read_text()
        newer = frames.WIRE_VERSION + 1
        frames_file.write_text(re.sub(r"^WIRE_VERSION = \d+", f"WIRE_VERSION = {newer}", source, flags=re.MULTILINE))
        os.kill(job.pods(Role.PS)[0].pid, signal.SIGKILL)
        assert job.wait(120) == 1, job.story()
    finally:
        job.end()
    diagnosis = the_trouble(tmp_path / "job", Trouble.VERSIONS_DIFFER)
    assert diagnosis.is_fatal
    said = str(diagnosis.evidence["message"])
    assert f"version {frames.WIRE_VERSION} " in said
    assert f"version {newer}" in said


def test_a_journal_that_a_full_disk_keeps_from_being_written_is_reported_afterwards(
    tmp_path: Path, digits: Path
) -> None:
    with small_disk(tmp_path / "disk", size_kib=4096) as disk:
        checkpoints = tmp_path / "checkpoints"
        job = LONG.local_job(disk / "job", digits, validation_data="", checkpoint_dir=checkpoints).start()
        try:
            job.wait_for_version(2)
            fill(disk / "other")
            journal = job.job_dir / "journal.json"
            job.wait_until("an old journal", lambda: time.time() - journal.stat().st_mtime > 5)
            (disk / "other").unlink()
            job.wait_until("the outage in the events", lambda: bool(events_of(job, EventKind.JOURNAL_DELAYED)))
            diagnosis = the_trouble(job.job_dir, Trouble.JOURNAL_NOT_WRITTEN)
        finally:
            job.end()
    assert float(diagnosis.evidence["seconds"]) > 1
    assert os.strerror(errno.ENOSPC) in str(diagnosis.evidence["message"])


def fill(path: Path) -> None:
    """Leave no room on a small disk."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(512))


def test_ctrl_c_is_reported_as_such(tmp_path: Path, digits: Path) -> None:
    job = LONG.local_job(tmp_path / "job", digits, validation_data="").start()
    job.wait_for_version(2)
    assert job.process is not None
    job.process.send_signal(signal.SIGINT)
    assert job.wait(120) == 128 + signal.SIGINT, job.story()
    diagnosis = the_trouble(tmp_path / "job", Trouble.STOPPED)
    assert diagnosis.is_fatal
    assert (diagnosis.subject, diagnosis.evidence["phase"]) == ("job", "Stopped")
    assert not any(one.cost.is_open for one in explained(tmp_path / "job").diagnoses)


def own_tree(tree: Path) -> Path:
    """A copy of the runtime by links, but for the file of the wire's version, whose path is returned."""
    package = tree / "elasticdl"
    (package / "rpc").mkdir(parents=True)
    original = Path(frames.__file__)
    for folder in (REPOSITORY / "elasticdl", REPOSITORY / "elasticdl/rpc"):
        for path in folder.iterdir():
            if path.name not in ("rpc", "__pycache__") and path != original:
                (tree / folder.relative_to(REPOSITORY) / path.name).symlink_to(path)
    own = package / "rpc" / original.name
    own.write_text(original.read_text())
    return own
