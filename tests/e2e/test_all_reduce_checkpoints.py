"""Checkpoints of AllReduce jobs: another job's to begin with, damaged ones, and volumes that cannot be written."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from tests.chaos.job import LocalJob
from tests.chaos.jobs import DIGITS, NUMPY_DIGITS
from tests.chaos.scenarios import assert_exact
from tests.e2e.all_reduce_jobs import JOB, KERAS, NUMPY, TORCH, all_reduce_job, worker_logs
from tests.master.small_disk import BREAKS, small_disk

pytestmark = pytest.mark.timeout(240)

ALONE = replace(JOB, num_workers=1, num_epochs=2)
SHORT = replace(JOB, num_workers=2, num_epochs=1)
OTHER_MODEL = {
    KERAS: """
        def custom_model():
            image = keras.Input((64,))
            return keras.Model(image, keras.layers.Dense(10, name="another")(image))
        """,
    TORCH: """
        def custom_model():
            return nn.Linear(64, 10)
        """,
}


def versions(checkpoints: Path) -> list[Path]:
    """Whole checkpoints, the oldest first."""
    found = [path.parent for path in checkpoints.glob("version-*/MANIFEST.json")]
    return sorted(found, key=lambda path: int(path.name.removeprefix("version-")))


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def refused(running: LocalJob, code: int = 1) -> str:
    assert running.start().wait(120) == code, running.story()
    said = "\n".join(running.output)
    assert "Traceback" not in said, running.story()
    return said


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DIGITS.make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", params=[KERAS, TORCH])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """The job directory of a job that has left checkpoints behind."""
    directory = tmp_path_factory.mktemp(f"trained-{request.param}")
    running = all_reduce_job(request.param, directory, digits, "", ALONE, checkpoint_steps=20).start()
    assert running.wait() == 0, running.story()
    assert len(versions(running.job_dir / "checkpoints")) >= 2, running.story()
    (directory / "framework").write_text(request.param)
    (directory / "metrics").write_text(json.dumps(running.metrics()))
    return directory


def framework_of(trained: Path) -> str:
    return (trained / "framework").read_text()


def copied(trained: Path, tmp_path: Path) -> Path:
    """Its checkpoints, to be spoiled."""
    return Path(shutil.copytree(trained / "job" / "checkpoints", tmp_path / "old"))


def test_a_job_begins_with_the_checkpoint_of_another(tmp_path: Path, digits: Path, trained: Path) -> None:
    old = copied(trained, tmp_path)
    flags = {"checkpoint_dir_for_init": old, "max_step": 2, "evaluation_steps": 0}
    running = all_reduce_job(framework_of(trained), tmp_path, digits, "", SHORT, **flags).start()
    assert running.wait(120) == 0, running.story()
    assert f"from {versions(old)[-1]}" in worker_logs(running), running.story()
    assert str(versions(old)[-1]) in running.master_log(), running.story()
    reached = json.loads((trained / "metrics").read_text())["accuracy"]
    assert running.metrics()["accuracy"] >= min(reached - 0.1, 0.9)


@pytest.mark.parametrize("trained", [NUMPY], indirect=True)
def test_a_damaged_newest_is_passed_over_and_named(tmp_path: Path, digits: Path, trained: Path) -> None:
    old = copied(trained, tmp_path)
    *_, older, newest = versions(old)
    damage(newest / "model.npz")
    flags = {"checkpoint_dir_for_init": old, "max_step": 2}
    running = all_reduce_job(framework_of(trained), tmp_path, digits, "", SHORT, **flags).start()
    assert running.wait(120) == 0, running.story()
    assert f"{newest / 'model.npz'} is damaged" in worker_logs(running), running.story()
    assert f"from {older}" in worker_logs(running), running.story()


@pytest.mark.parametrize("trained", [NUMPY], indirect=True)
def test_a_damaged_one_that_is_named_fails_the_job(tmp_path: Path, digits: Path, trained: Path) -> None:
    newest = versions(copied(trained, tmp_path))[-1]
    damage(newest / "model.npz")
    flags = {"checkpoint_dir_for_init": newest}
    said = refused(all_reduce_job(framework_of(trained), tmp_path, digits, "", SHORT, **flags))
    assert "damaged" in said
    assert str(newest) in said
    assert "--checkpoint_dir_for_init" in said


def test_a_checkpoint_that_is_not_there_fails_the_job(tmp_path: Path, digits: Path) -> None:
    flags = {"checkpoint_dir_for_init": tmp_path / "nowhere"}
    said = refused(all_reduce_job(NUMPY, tmp_path, digits, "", SHORT, **flags), code=2)
    assert str(tmp_path / "nowhere") in said
    assert "--checkpoint_dir_for_init" in said


@pytest.mark.parametrize("trained", [TORCH, pytest.param(KERAS, marks=pytest.mark.full)], indirect=True)
def test_a_checkpoint_of_another_model_fails_the_job(tmp_path: Path, digits: Path, trained: Path) -> None:
    framework = framework_of(trained)
    newest = versions(copied(trained, tmp_path))[-1]
    flags = {"checkpoint_dir_for_init": newest}
    said = refused(all_reduce_job(framework, tmp_path, digits, OTHER_MODEL[framework], SHORT, **flags))
    assert str(newest) in said
    assert "another model" in said or "other model" in said, said


@BREAKS
def test_checkpoints_come_back_when_the_volume_does(
    tmp_path: Path, digits: Path, broken: str, mended: str, message: str
) -> None:
    job = replace(NUMPY_DIGITS, num_workers=2, num_ps_pods=0, num_epochs=10, pace_s=0.003)
    with small_disk(tmp_path / "disk", size_kib=64) as disk:
        place = disk / "checkpoints"
        place.mkdir()
        (disk / "other").write_bytes(bytes(60 << 10))  # no room for a manifest beside the model
        running = all_reduce_job(NUMPY, tmp_path, digits, "", job, checkpoint_dir=place, checkpoint_steps=14).start()
        try:
            running.wait_for_version(1)
            subprocess.run(["mount", "-o", f"remount,{broken}", str(disk)], check=True)
            running.wait_until("the failed checkpoint", lambda: message in worker_logs(running))
            status = running.status()
            assert status is not None
            running.wait_for_version(status.model_version + 17)  # the job continues
            subprocess.run(["mount", "-o", f"remount,{mended}", str(disk)], check=True)
            before = versions(place)[-1:]
            running.wait_until("another checkpoint", lambda: versions(place)[-1:] != before)
            running.hurry()
            assert running.wait() == 0, running.story()
        finally:
            running.end()
        assert re.search(rf"Checkpoint at step \d+ in {re.escape(str(place))} failed", worker_logs(running))
    assert_exact(running, job)


def test_workers_that_are_all_asked_to_end_leave_a_checkpoint_of_their_last_step(tmp_path: Path, digits: Path) -> None:
    job = replace(NUMPY_DIGITS, num_workers=2, num_ps_pods=0, num_epochs=10, pace_s=0.003)
    running = all_reduce_job(NUMPY, tmp_path, digits, "", job, checkpoint_steps=100_000).start()

    def is_trained_by_both() -> bool:
        status = running.status()
        return status is not None and len(status.world) == 2 and status.model_version >= 10

    running.wait_until("a group of two", is_trained_by_both)
    for pod in running.pods(Role.WORKER):
        os.kill(pod.pid, signal.SIGTERM)
    running.wait_until("a successor", lambda: "Restored the model" in worker_logs(running))
    running.hurry()
    assert running.wait() == 0, running.story()
    assert_exact(running, job)
    found = re.search(r"the last checkpoint is written, after step (\d+)", worker_logs(running))
    assert found is not None, running.story()
    assert f"Restored the model at step {found[1]} from" in worker_logs(running), running.story()


def test_a_job_of_which_all_checkpoints_are_damaged_fails_at_once(tmp_path: Path, digits: Path) -> None:
    job = replace(NUMPY_DIGITS, num_workers=2, num_ps_pods=0, num_epochs=10, pace_s=0.003)
    running = all_reduce_job(NUMPY, tmp_path, digits, "", job, checkpoint_steps=7).start()
    place = running.job_dir / "checkpoints"
    try:
        running.wait_until("two checkpoints", lambda: len(versions(place)) >= 2)
        victims = running.victims(Role.WORKER)
        for victim in victims:
            running.stop(victim)
        found = versions(place)
        for directory in found:
            damage(directory / "model.npz")
        for victim in victims:
            running.kill(victim)
        assert running.wait(120) == 1, running.story()
    finally:
        running.end()
    status = running.status()
    assert status is not None
    assert f"no checkpoint in {place} can be restored" in status.message
    for directory in found:
        assert f"{directory / 'model.npz'} is damaged" in status.message
    assert f"move {place} away" in status.message
    assert "digits-worker-4" not in running.master_log(), running.story()  # two died, and had a successor each
