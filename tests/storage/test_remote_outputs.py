"""A job's outputs beside its model, in storage: TensorBoard's event files, and bad records."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elasticdl.frameworks.framework import FeedError, TaskRecords
from elasticdl.master import tensorboard
from elasticdl.master.core.job import Job
from elasticdl.master.core.settings import JobSettings
from elasticdl.protocol import Role
from elasticdl.storage.paths import RemotePath
from elasticdl.storage.tensorboard_copy import refresh
from elasticdl.worker.quarantine import Quarantine
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus
from elasticdl_preprocessing import get_min
from tests.analyze.test_analyze_jobs import NUM_ROWS, check, job, write_table
from tests.chaos.kills import running
from tests.master.actors import held_port
from tests.storage.faulty_proxy import Fault, FaultyProxy
from tests.storage.test_remote_jobs import HeldUpload
from tests.worker.test_quarantine import looked_through


def losses(directory: Path) -> list[tuple[int, float]]:
    found = EventAccumulator(str(directory)).Reload()
    return [(one.step, one.value) for one in found.Scalars("loss")]


def status(step: int) -> JobStatus:
    return dataclasses.replace(Job(JobSettings("j")).status(), model_version=step, loss=float(step))


def test_event_files_are_published_at_the_end_of_each_life_and_a_copy_of_them_grows(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    source, copy = RemotePath(f"s3://bucket/{tmp_path.name}/events"), tmp_path / "copy"
    for generation in (1, 2):
        log = tensorboard.TensorBoardLog(str(source), generation, 10 * (generation - 1))
        proxy.once_each(Fault.UNAVAILABLE, method="PUT")
        log.on_status(status(10 * generation))
        log.close()
        assert refresh(source, copy) == generation
        assert losses(copy) == [(10, 10.0), (20, 20.0)][:generation]


def test_a_file_is_published_as_it_grows_and_a_long_one_is_followed_by_another(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "_PUBLISH_S", 0.0)
    source, copy = RemotePath(f"s3://bucket/{tmp_path.name}/events"), tmp_path / "copy"
    files = tensorboard.PublishedEventFiles(source, 1)
    files.open()
    for step in (1, 2):
        files.write(step, {"loss": float(step)}, 0.0)
        assert refresh(source, copy) == 1
        assert losses(copy)[-1] == (step, float(step))
    monkeypatch.setattr(tensorboard, "_MAX_BYTES", 1)
    for step in (3, 4):
        files.write(step, {"loss": float(step)}, 0.0)
    files.close()
    assert refresh(source, copy) == 2
    assert losses(copy) == [(step, float(step)) for step in (1, 2, 3, 4)]


def test_bad_records_and_their_errors_are_published_as_one_file(proxy: FaultyProxy, tmp_path: Path) -> None:
    directory = RemotePath(f"s3://bucket/{tmp_path.name}/bad")
    task = TaskRecords(1, 0, [b"good", b"bad"], "/data/part-0", numbers=[40, 44])
    for _ in range(2):
        with pytest.raises(FeedError):
            looked_through(task, Quarantine(5, directory))
    [name] = directory.files()
    assert json.loads((directory / name).read_bytes())["record"] == 44


@pytest.mark.full  # a whole TensorBoard, as for a job of this machine
@pytest.mark.timeout(180)
def test_event_files_in_storage_are_shown_by_the_command(proxy: FaultyProxy, tmp_path: Path) -> None:
    url = f"s3://bucket/{tmp_path.name}/events"
    log = tensorboard.TensorBoardLog(url, 1, 0)
    log.on_status(status(10))
    log.close()
    job = tmp_path / "job"
    job.mkdir()
    (job / "lock").touch()
    flags = {"job_name": "digits", "model_def": "a.b", "training_data": "/d", "runtime": "local"}
    (job / "spec.json").write_text(JobSpec.from_flags("train", {**flags, "tensorboard_log_dir": url}).to_json())
    with held_port() as held:
        port = held.getsockname()[1]
        words = ["tensorboard", "digits", f"--job_dir={job}", f"--port={port}"]
        command = [sys.executable, "-m", "elasticdl_client.main", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if re.search(r"http://\S+/ \(Press CTRL\+C", line))
            address = line.split("http://")[1].split()[0]
            with urllib.request.urlopen(f"http://{address}data/plugin/scalars/tags", timeout=60) as answer:
                assert "loss" in json.load(answer)["."]
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
            process.wait()


def test_statistics_in_storage_are_found_by_the_layers(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = RemotePath(f"s3://bucket/{tmp_path.name}/statistics.json")
    place.storage.publish(place.url, json.dumps({"columns": {"größe": {"min": 1.5}}}, ensure_ascii=False).encode())
    monkeypatch.setenv("ELASTICDL_STATISTICS", place.url)
    assert get_min("größe", 0) == 1.5
    with pytest.raises(ValueError, match=r"s3://\S+/none\.json cannot be read"):
        get_min("größe", 0, f"s3://bucket/{tmp_path.name}/none.json")


@pytest.mark.timeout(180)
def test_an_analysis_in_storage_counts_each_row_once_though_a_worker_is_killed_in_an_upload(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    rows, url = write_table(tmp_path / "table.csv"), f"s3://bucket/{tmp_path.name}"
    RemotePath(url).storage.publish(f"{url}/table.csv", tmp_path / "table.csv")
    proxy.fault_of = HeldUpload("part-00005.sketch", 1).fault_of
    places = {"output": f"{url}/statistics.json", "missing_values": "?"}
    analysis = job(tmp_path, f"{url}/table.csv", num_workers=2, records_per_task=1000, **places).start()
    analysis.wait_until("an upload that is held", proxy.held.is_set)
    for worker in running(analysis, Role.WORKER):  # one of them holds it
        analysis.kill(worker)
    assert analysis.wait() == 0, analysis.story()
    assert f"analysis: records {NUM_ROWS}, analyzed {NUM_ROWS}, repeated 0, lost 0" in "\n".join(analysis.output)
    (tmp_path / "statistics.json").write_bytes(RemotePath(f"{url}/statistics.json").read_bytes())
    check(tmp_path, rows)
    left = [name for name in RemotePath(url).files() if not name.startswith(".elasticdl/")]  # the index of the table
    assert left == ["statistics.json", "table.csv"]
    deleted = Counter(one.path for one in proxy.requests if one.method == "DELETE" and "part-" in one.path)
    assert list(deleted.values()) == [1] * 12  # by one of the workers
