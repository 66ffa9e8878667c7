"""How many workers a running job may have, and `elasticdl scale` on the files of local jobs."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elasticdl_client import worker_range
from elasticdl_client.choices import DistributionStrategy, JobType
from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase, JobStatus, ScalingStatus
from elasticdl_client.jobs import commands
from elasticdl_client.jobs.kubernetes_jobs import KubernetesJobs
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError, connect
from elasticdl_client.worker_range import WorkerRange
from tests.client.api_server import NAMESPACE, ApiServer, own_cluster

SERVERS = JobSpec(job_type=JobType.TRAIN, job_name="j", num_workers=2)
GROUPS = dataclasses.replace(
    SERVERS, distribution_strategy=DistributionStrategy.ALL_REDUCE, num_ps_pods=0, min_workers=2
)
SCRIPTS = dataclasses.replace(SERVERS, job_command="python train.py", num_ps_pods=0)
LOCAL = dataclasses.replace(SERVERS, distribution_strategy=DistributionStrategy.LOCAL)
ESTIMATOR = dataclasses.replace(SCRIPTS, need_tf_config=True, num_ps_pods=1)

Run = Callable[..., str]


@pytest.mark.parametrize(
    ("spec", "text", "number"),
    [(SERVERS, "4", 4), (SERVERS, " 0\n", 0), (SERVERS, "100000", 100_000), (GROUPS, "2", 2), (SCRIPTS, "1", 1)],
)
def test_a_job_can_have_these_numbers(spec: JobSpec, text: str, number: int) -> None:
    assert worker_range.parse_request(text, spec) == WorkerRange(number, number)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        *(
            (SERVERS, text)
            for text in ("", "many", "-1", "2.5", "1_000", "٣", "100001", "0" * 45 + "200000", "9" * 5000)
        ),
        *((GROUPS, text) for text in ("0", "1")),
        (SCRIPTS, "0"),
        (LOCAL, "1"),
        (ESTIMATOR, "2"),
    ],
    ids=lambda value: value[:8] if isinstance(value, str) else value.job_type.value,
)
def test_a_job_cannot_have_these_numbers(spec: JobSpec, text: str) -> None:
    with pytest.raises(FlagError) as caught:
        worker_range.parse_request(text, spec)
    assert caught.value.hint
    assert len(caught.value.what) < 200
    status = JobStatus("j", started_at=1.0, workers_wanted=7)
    assert worker_range.wanted(text, spec, status) == 7


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a job that was started with two workers and was scaled to three."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-cluster"))
    made = tmp_path / ".elasticdl" / "jobs" / "j"
    made.mkdir(parents=True)
    (made / "spec.json").write_text(SERVERS.to_json())
    (made / "lock").touch()
    status = JobStatus("j", JobPhase.RUNNING, started_at=1.0, workers_wanted=3)
    (made / "status.json").write_text(status.to_json())
    return made


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """A process runs the job."""
    fd = os.open(directory / "lock", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> str:
        assert commands.run("scale", ["j", *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_the_command_writes_the_number_down_and_says_what_has_changed(directory: Path, run: Run) -> None:
    with held(directory):
        assert run("--num_workers=5") == 'job "j" scaled: workers 3 → 5\n'
        assert (directory / "num_workers").read_text() == "5"
        assert run("--num_workers=5") == 'job "j" not changed: workers 5\n'
        assert run("--num_workers=0", "-o", "name") == "job/j\n"
        told = json.loads(run("--num_workers=4", "-o", "json"))
        assert told == {
            "name": "j",
            "runtime": "local",
            "namespace": "",
            "num_workers": 4,
            "max_workers": 0,
            "num_workers_before": 0,
        }
    assert {path.name for path in directory.iterdir()} == {"lock", "num_workers", "spec.json", "status.json"}


def test_a_range_is_written_down_as_it_is_and_keeps_the_present_number(directory: Path, run: Run) -> None:
    with held(directory):
        assert run("--num_workers=2:16") == 'job "j" scaled: workers 3 → 3, from now on by gain within 2:16\n'
        assert (directory / "num_workers").read_text() == "2:16"
        told = json.loads(run("--num_workers=5:8", "-o", "json"))
        assert (told["num_workers"], told["max_workers"], told["num_workers_before"]) == (5, 8, 3)
        status = JobStatus(
            "j", JobPhase.RUNNING, started_at=1.0, workers_wanted=6, scaling=ScalingStatus("5:8", "settled")
        )
        (directory / "status.json").write_text(status.to_json())
        assert run("--num_workers=6") == 'job "j" scaled: workers 6, which stay\n'
        assert (directory / "num_workers").read_text() == "6"


def test_a_precondition_that_does_not_hold_changes_nothing(directory: Path, run: Run) -> None:
    with pytest.raises(JobError, match="has 3 workers, not 2"):
        run("--num_workers=5", "--current_num_workers=2")
    assert not (directory / "num_workers").exists()
    run("--num_workers=5", "--current_num_workers=3")
    assert (directory / "num_workers").read_text() == "5"


def test_a_stopped_job_keeps_the_number_until_it_is_resumed(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run("scale", ["j", "--num_workers=1"]) == 0
    assert "elasticdl resume j" in capsys.readouterr().err
    assert (directory / "num_workers").read_text() == "1"


def test_a_job_that_has_ended_and_one_that_is_not_there_cannot_be_scaled(directory: Path, run: Run) -> None:
    with pytest.raises(JobError, match="not found"):
        commands.run("scale", ["other", "--num_workers=2"])
    status = JobStatus("j", JobPhase.SUCCEEDED, started_at=1.0, workers_wanted=3, exit_code=0)
    (directory / "status.json").write_text(status.to_json())
    with pytest.raises(JobError, match="has ended"):
        run("--num_workers=2")
    assert not (directory / "num_workers").exists()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster with a running job of two workers."""
    with own_cluster(tmp_path, monkeypatch) as server:
        server.spec = dataclasses.replace(SERVERS, job_name="job")
        server.add_pod("master", [])
        yield server


def test_on_a_cluster_the_number_is_an_annotation_and_the_newest_counts(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, said in ((4, "workers 2 → 4"), (1, "workers 4 → 1")):
        assert commands.run("scale", ["job", f"--num_workers={number}"]) == 0
        assert capsys.readouterr().out == f'job "job" scaled: {said}\n'
        assert server.annotations == {names.NUM_WORKERS_ANNOTATION: str(number)}
    assert commands.run("scale", ["job", "--num_workers=auto"]) == 0
    assert server.annotations == {names.NUM_WORKERS_ANNOTATION: "1:100000"}
    with pytest.raises(JobError):
        commands.run("scale", ["job", "--num_workers=3", "--current_num_workers=4"])
    server.annotations[names.NUM_WORKERS_ANNOTATION] = "many"  # the master has refused it
    server.status = JobStatus("job", JobPhase.RUNNING, started_at=1.0, workers_wanted=0)
    commands.run("scale", ["job", "--num_workers=3", "--current_num_workers=0"])
    assert server.annotations == {names.NUM_WORKERS_ANNOTATION: "3"}


def test_of_two_scalings_at_once_one_is_refused(server: ApiServer) -> None:
    store = KubernetesJobs(connect(), NAMESPACE)
    job = store.find("job")
    assert job is not None
    patch = server.patch

    def late(path: str, sent: dict[str, Any]) -> tuple[int, bytes]:
        server.version += 1
        return patch(path, sent)

    server.patch = late  # type: ignore[method-assign]
    with pytest.raises(ClusterError) as caught:
        store.scale(job, WorkerRange(4, 4))
    assert caught.value.status == 409
    assert server.annotations == {}


def test_a_number_that_the_job_cannot_have_is_a_mistake_of_the_command_line(directory: Path, run: Run) -> None:
    (directory / "spec.json").write_text(GROUPS.to_json())
    with pytest.raises(FlagError):
        run("--num_workers=1")
    assert not (directory / "num_workers").exists()
