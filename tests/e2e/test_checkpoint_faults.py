"""Checkpoints that cannot be written, that are damaged, and that other numbers of servers read."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from elasticdl_client.explain.diagnosis import Trouble
from tests.chaos.job import LocalJob
from tests.chaos.jobs import FRAPPE, NUMPY_DIGITS
from tests.chaos.scenarios import assert_exact
from tests.explain.explained import the_trouble
from tests.master.small_disk import BREAKS, small_disk

LONG = replace(NUMPY_DIGITS, num_epochs=10, pace_s=0.003)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return NUMPY_DIGITS.make_data(tmp_path_factory.mktemp("data"))


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def versions(checkpoints: Path) -> list[Path]:
    """Whole checkpoints, the oldest first."""
    found = [path.parent for path in checkpoints.glob("version-*/MANIFEST.json")]
    return sorted(found, key=lambda path: int(path.name.removeprefix("version-")))


@contextlib.contextmanager
def frozen_workers(running: LocalJob) -> Iterator[None]:
    """No minibatch is computed inside, so no checkpoint is begun."""
    pids = [pod.pid for pod in running.pods(Role.WORKER)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.timeout(240)
@BREAKS
def test_checkpoints_come_back_when_the_volume_does(
    tmp_path: Path, digits: Path, broken: str, mended: str, message: str
) -> None:
    with small_disk(tmp_path / "disk", size_kib=64) as disk:
        place = disk / "checkpoints"
        place.mkdir()
        (disk / "other").write_bytes(bytes(60 << 10))  # no room for a manifest beside a part
        running = LONG.local_job(tmp_path / "job", digits, checkpoint_dir=place, checkpoint_steps=14)
        running.start()
        try:
            running.wait_for_version(1)
            remount(disk, broken)
            running.wait_until("the failed checkpoint", lambda: message in running.master_log())
            status = running.status()
            assert status is not None
            running.wait_for_version(status.model_version + 17)  # the job continues
            remount(disk, mended)
            before = versions(place)[-1:]
            running.wait_until("another checkpoint", lambda: versions(place)[-1:] != before)
            running.hurry()
            assert running.wait() == 0, running.story()
        finally:
            running.end()
        assert str(place) in running.master_log()
    assert_exact(running, LONG)
    is_full = message == "No space left on device"
    diagnosis = the_trouble(tmp_path / "job", Trouble.DISK_FULL if is_full else Trouble.CHECKPOINT_NOT_WRITTEN)
    assert message in str(diagnosis.evidence["message"])
    assert not diagnosis.is_fatal
    assert not diagnosis.cost.is_open


@pytest.mark.timeout(240)
def test_a_restarted_server_passes_over_a_damaged_checkpoint_and_says_so(tmp_path: Path, digits: Path) -> None:
    steps = LONG.num_steps // 3  # the third checkpoint is far away while the second one is damaged
    running = LONG.local_job(tmp_path / "job", digits, checkpoint_steps=steps).start()
    place = tmp_path / "job" / "checkpoints"
    try:
        running.wait_until("two checkpoints", lambda: len(versions(place)) >= 2)
        with frozen_workers(running):
            newest = versions(place)[-1]
            (part,) = newest.glob("*.ckpt")
            content = bytearray(part.read_bytes())
            content[len(content) // 2] ^= 0xFF
            part.write_bytes(content)
            (server,) = running.pods(Role.PS)
            os.kill(server.pid, signal.SIGKILL)
            running.wait_until("the second PS", lambda: "PS 0 is ready (incarnation 2" in running.master_log())
        running.hurry()
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    assert_exact(running, LONG)
    assert f"{newest.name}/{part.name}" in running.master_log(), running.story()
    assert "damaged" in running.master_log()
    diagnosis = the_trouble(tmp_path / "job", Trouble.CHECKPOINT_DAMAGED)
    assert newest.name in str(diagnosis.evidence["message"])
    assert not diagnosis.is_fatal
    assert "passed over" in diagnosis.done


@pytest.mark.timeout(240)
def test_a_checkpoint_of_two_servers_is_read_by_three(tmp_path: Path) -> None:
    if not FRAPPE.available():
        pytest.skip(f"the data of {FRAPPE.dataset} is not here")
    data = FRAPPE.make_data(tmp_path)
    alone = replace(FRAPPE, num_workers=1)
    validation = data / "validation" / "data-00000"
    trained = alone.local_job(tmp_path / "trained", data, validation_data=validation, max_step=60).start()
    assert trained.wait() == 0, trained.story()
    still = alone.local_job(
        tmp_path / "still",
        data,
        validation_data=validation,
        model_zoo=".",
        model_def=f"model_zoo.{FRAPPE.model_def}",
        optimizer="tests.e2e.plain_sgd.still",
        max_step=1,
        num_ps_pods=3,
        checkpoint_dir_for_init=versions(tmp_path / "trained" / "checkpoints")[-1],
    ).start()
    assert still.wait() == 0, still.story()
    assert still.metrics() == pytest.approx(trained.metrics(), abs=1e-6)


@pytest.mark.timeout(240)
def test_a_damaged_checkpoint_to_start_from_fails_the_job_and_names_the_file(tmp_path: Path, digits: Path) -> None:
    trained = NUMPY_DIGITS.local_job(tmp_path / "trained", digits, max_step=50).start()
    assert trained.wait() == 0, trained.story()
    saved = versions(tmp_path / "trained" / "checkpoints")[-1]
    (part,) = saved.glob("*.ckpt")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 0xFF
    part.write_bytes(content)
    running = NUMPY_DIGITS.local_job(tmp_path / "job", digits, checkpoint_dir_for_init=saved).start()
    assert running.wait(120) == 1, running.story()
    said = "\n".join(running.output)
    assert str(part) in said, running.story()
    assert "damaged" in said
    assert "Traceback" not in said
