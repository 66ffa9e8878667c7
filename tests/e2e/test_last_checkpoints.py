"""The last checkpoint of a training cannot be written: the job has failed, says why, and can be resumed."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.explain.diagnosis import Trouble
from elasticdl_client.job_events import EventKind
from elasticdl_client.job_status import JobPhase
from tests.chaos.jobs import NUMPY_DIGITS
from tests.e2e.all_reduce_jobs import worker_logs
from tests.explain.explained import the_trouble
from tests.hangs.job_events import events_of
from tests.master.small_disk import small_disk

pytestmark = pytest.mark.timeout(240)
JOB = replace(NUMPY_DIGITS, num_epochs=4, pace_s=0.01)  # much longer than what happens before `hurry`
# None is removed: that would make room on the full disk for the next one.
CHECKPOINTS = {"checkpoint_steps": 7, "keep_checkpoint_max": 0}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return JOB.make_data(tmp_path_factory.mktemp("data"))


def fill(disk: Path) -> None:
    with (disk / "other").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def versions(checkpoints: Path) -> list[str]:
    return [path.parent.name for path in checkpoints.glob("version-*/MANIFEST.json")]


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        (DistributionStrategy.LOCAL, {"num_workers": 1, "num_ps_pods": 0}),
        (DistributionStrategy.ALL_REDUCE, {"num_workers": 2, "num_ps_pods": 0}),
        (DistributionStrategy.PARAMETER_SERVER, {"num_workers": 1, "num_ps_pods": 2}),
    ],
    ids=["local", "allreduce", "ps"],
)
def test_a_full_disk_at_the_last_checkpoint_fails_the_job_and_is_said(
    tmp_path: Path, digits: Path, strategy: DistributionStrategy, flags: dict[str, object]
) -> None:
    with small_disk(tmp_path / "disk", size_kib=4096) as disk:
        place = disk / "checkpoints"
        place.mkdir()
        running = JOB.local_job(
            tmp_path / "job",
            digits,
            distribution_strategy=strategy.value,
            checkpoint_dir=place,
            **CHECKPOINTS,
            **flags,
        ).start()
        try:
            running.wait_until("a checkpoint", lambda: bool(versions(place)))
            fill(disk)
            running.hurry()
            assert running.wait() == 1, running.story()
        finally:
            running.end()
        assert versions(place), running.story()
    status = running.status()
    assert status is not None
    assert status.phase is JobPhase.FAILED
    assert "The last checkpoint was not written: " in status.message
    assert "No space left on device" in status.message
    assert "Traceback" not in status.message + worker_logs(running)
    diagnosis = the_trouble(tmp_path / "job", Trouble.DISK_FULL)
    assert diagnosis.is_fatal


@pytest.mark.parametrize(
    ("strategy", "num_workers"), [(DistributionStrategy.LOCAL, 1), (DistributionStrategy.ALL_REDUCE, 2)]
)
def test_checkpoints_of_workers_that_a_full_disk_refuses_are_said_while_the_job_trains(
    tmp_path: Path, digits: Path, strategy: DistributionStrategy, num_workers: int
) -> None:
    flags = {"distribution_strategy": strategy.value, "num_workers": num_workers, "num_ps_pods": 0}
    with small_disk(tmp_path / "disk", size_kib=4096) as disk:
        place = disk / "checkpoints"
        place.mkdir()
        running = JOB.local_job(tmp_path / "job", digits, checkpoint_dir=place, **CHECKPOINTS, **flags).start()
        try:
            running.wait_until("a checkpoint", lambda: bool(versions(place)))
            running.wait_until("an event of a checkpoint", lambda: bool(events_of(running, EventKind.CHECKPOINT_SAVED)))
            fill(disk)
            running.wait_until("its failure", lambda: bool(events_of(running, EventKind.CHECKPOINT_FAILED)))
            failed = events_of(running, EventKind.CHECKPOINT_FAILED)[0]
            assert "No space left on device" in failed.message
            diagnosis = the_trouble(tmp_path / "job", Trouble.DISK_FULL)
            assert not diagnosis.is_fatal
            assert diagnosis.subjects[0].startswith("checkpoint-")
            assert "Make room in --checkpoint_dir" in diagnosis.advice
            (disk / "other").unlink()
            running.wait_until(
                "a later one", lambda: events_of(running, EventKind.CHECKPOINT_SAVED)[-1].number > failed.number
            )
            running.hurry()
            assert running.wait() == 0, running.story()
        finally:
            running.end()
        last = max(int(name.removeprefix("version-")) for name in versions(place))
    saved = events_of(running, EventKind.CHECKPOINT_SAVED)
    assert saved[-1].subject == f"checkpoint-{last}", "the last one is reported before the job ends"
    status = running.status()
    assert status is not None
    assert status.checkpoint_at == pytest.approx(saved[-1].at, abs=0.01)
    subjects = [event.subject for event in saved]
    assert len(subjects) == len(set(subjects)), subjects
