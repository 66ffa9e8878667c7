"""Event files, read with TensorBoard's own reader: their content, over restarts of the master and full disks."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elasticdl.master.core.job import Job
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.tensorboard import TensorBoardLog, mean_staleness, watcher
from elasticdl.storage.paths import RemotePath
from elasticdl_client.errors import JobError
from elasticdl_client.job_status import JobStatus
from tests.master.actors import wait_until


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(directory)).Reload()
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def status(**changes: object) -> JobStatus:
    return dataclasses.replace(Job(JobSettings("j")).status(), **changes)  # type: ignore[arg-type]


def test_a_job_is_written_as_it_continues_and_nothing_is_written_twice(tmp_path: Path) -> None:
    log = TensorBoardLog(str(tmp_path), 1, 0)
    log.on_status(status(workers_alive=2))
    for step, loss in ((10, 2.0), (10, 2.0), (20, 1.0)):
        log.on_status(status(model_version=step, loss=loss, workers_alive=2, learning_rate=0.5, records_per_second=7.0))
    log.on_evaluation(20, {"accuracy": 0.75})
    log.close()
    found = scalars(tmp_path)
    assert found["loss"] == [(10, 2.0), (20, 1.0)]
    assert found["learning_rate"] == [(10, 0.5), (20, 0.5)]
    assert found["records_per_second"] == [(0, 0.0), (10, 7.0), (20, 7.0)]
    assert found["workers"] == [(0, 2.0)]
    assert found["evaluation/accuracy"] == [(20, 0.75)]


def test_the_start_of_a_job_does_not_wait_for_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: RemotePath) -> None:
        raise AssertionError("it is asked in the thread of the job")

    monkeypatch.setattr(RemotePath, "iterdir", fail)
    TensorBoardLog("s3://bucket/events", 1, 0).close()


def test_where_the_time_has_gone_is_written_with_each_step(tmp_path: Path) -> None:
    log = TensorBoardLog(str(tmp_path), 1, 0)
    log.on_status(status(model_version=10, worker_seconds={"useful": 6.0, "starting": 2.0}))
    log.close()
    found = scalars(tmp_path)
    assert found["goodput"] == [(10, 0.75)]
    assert (found["time/useful"], found["time/starting"]) == ([(10, 6.0)], [(10, 2.0)])


def test_a_new_life_of_the_master_writes_a_file_of_its_own_and_takes_over_at_its_step(tmp_path: Path) -> None:
    first = TensorBoardLog(str(tmp_path), 1, 0)
    for step in (10, 20, 30):
        first.on_status(status(model_version=step, loss=float(step)))
    first.close()
    (file,) = tmp_path.iterdir()
    with file.open("r+b") as torn:  # the master was killed while it wrote
        torn.truncate(file.stat().st_size - 5)
    second = TensorBoardLog(str(tmp_path), 2, 20)
    second.on_status(status(model_version=25, loss=1.0))
    second.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert scalars(tmp_path)["loss"] == [(10, 10.0), (20, 20.0), (25, 1.0)]


def test_a_new_life_of_the_master_begins_while_nothing_can_be_written(tmp_path: Path) -> None:
    logs, away = tmp_path / "logs", tmp_path / "away"
    first = TensorBoardLog(str(logs), 1, 0)
    for step in (10, 20, 30):
        first.on_status(status(model_version=step, loss=float(step)))
    first.close()
    logs.rename(away)
    logs.touch()
    second = TensorBoardLog(str(logs), 2, 20)
    second.on_status(status(model_version=24, loss=2.0))
    wait_until(lambda: second._files._retry_at, "the failure")
    logs.unlink()
    away.rename(logs)
    second._files._retry_at = 0.0
    second.on_status(status(model_version=25, loss=1.0))
    second.close()
    assert scalars(logs)["loss"] == [(10, 10.0), (20, 20.0), (25, 1.0)]


def test_a_clock_that_is_behind_does_not_change_the_order_of_lives(tmp_path: Path) -> None:
    first = TensorBoardLog(str(tmp_path), 1, 0)
    for step in (10, 20, 30):
        first.on_status(status(model_version=step, loss=float(step)))
    first.close()
    (file,) = tmp_path.iterdir()
    begun, rest = file.name.removeprefix("events.out.tfevents.").split(".", 1)
    file.rename(tmp_path / f"events.out.tfevents.{int(begun) + 3600}.{rest}")
    second = TensorBoardLog(str(tmp_path), 2, 20)
    second.on_status(status(model_version=25, loss=1.0))
    second.close()
    assert scalars(tmp_path)["loss"] == [(10, 10.0), (20, 20.0), (25, 1.0)]


def test_staleness_is_the_mean_of_what_came_since_the_last_time(tmp_path: Path) -> None:
    assert mean_staleness((), (2, 1, 1)) == 0.75
    assert mean_staleness((2, 1, 1), (2, 1, 1)) is None
    assert mean_staleness((2, 1), (2, 1, 0, 2, 2)) == (2 * 3.5 + 2 * 6.5) / 4
    log = TensorBoardLog(str(tmp_path), 2, 0)
    log.on_status(status(model_version=7, staleness=(9,)))  # of the generation before
    log.on_status(status(model_version=8, staleness=(9, 4)))
    log.on_status(status(model_version=9, staleness=(9, 4, 2)))
    log.close()
    assert scalars(tmp_path)["staleness"] == [(8, 1.0), (9, 2.0)]


def test_a_directory_that_cannot_be_written_is_refused_and_no_directory_is_no_watcher(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="cannot be written: Not a directory"):
        watcher(str(tmp_path / "file" / "logs"), 1, 0)
    nobody = watcher("", 1, 0)
    nobody.on_evaluation(1, {})
    nobody.on_status(status())
    nobody.close()


def test_a_disk_that_is_full_for_a_while_stops_no_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = TensorBoardLog(str(tmp_path / "logs"), 1, 0)

    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            """Nothing to close."""

    log._files._file = Full()
    log.on_status(status(model_version=1, loss=1.0))
    log.on_status(status(model_version=2, loss=1.0))
    log.close()
    assert [record.message for record in caplog.records] == [
        "TensorBoard's events are left out for 30 s: [Errno 28] No space left on device"
    ]


IMPORTED = """
import sys
from elasticdl.master.tensorboard import watcher
log = watcher(sys.argv[1], 1, 0)
log.on_evaluation(1, {"a": 1.0})
log.close()
print([name for name in ("tensorflow", "torch", "keras", "boto3", "tensorboard.summary") if name in sys.modules])
"""


def test_the_master_imports_neither_a_framework_nor_the_writers_of_tensorboard_for_it(tmp_path: Path) -> None:
    printed = subprocess.run([sys.executable, "-c", IMPORTED, tmp_path], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"
