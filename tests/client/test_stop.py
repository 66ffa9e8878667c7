"""`elasticdl stop` on a cluster: its request to the job's master, its wait, and its errors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticdl_client.choices import JobType
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.jobs import commands
from elasticdl_client.kubernetes import names
from tests.client.api_server import ApiServer, own_cluster

SPEC = JobSpec(job_type=JobType.TRAIN, job_name="job", model_def="m.model", checkpoint_dir="/c")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster with a running job."""
    with own_cluster(tmp_path, monkeypatch) as server:
        server.spec = SPEC
        server.status = JobStatus("job", JobPhase.RUNNING, started_at=1.0, updated_at=2.0, records_done=10)
        server.add_pod("master", [])
        server.add_pod("worker-0", [])
        yield server


def obey(server: ApiServer, phase: str) -> None:
    """Once a job is told to stop, its pods are deleted but that of the master, which ends."""
    patch = server.patch

    def patched(path: str, sent: dict[str, Any]) -> tuple[int, bytes]:
        answer = patch(path, sent)
        del server.pods["elasticdl-job-worker-0"]
        server.pods["elasticdl-job-master"]["status"]["phase"] = phase
        return answer

    server.patch = patched  # type: ignore[method-assign]


def test_a_job_is_asked_to_stop_and_its_end_is_waited_for(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run("stop", ["job", "--no_wait"]) == 0
    assert server.annotations == {names.STOP_ANNOTATION: "true"}
    assert capsys.readouterr().out.startswith('job "job" is stopping: ')
    assert commands.run("status", ["job"]) == 0
    assert "It is stopping" in capsys.readouterr().out
    with pytest.raises(JobError, match="still stops after 0 s"):
        commands.run("stop", ["job", "--timeout=0"])
    obey(server, "Failed")
    assert commands.run("stop", ["job"]) == 0
    assert capsys.readouterr().out == ('job "job" stopped: `elasticdl resume job --namespace=team` continues it\n')
    assert commands.run("stop", ["job", "-o", "json"]) == 0  # it is stopped already
    assert json.loads(capsys.readouterr().out)["stopped"] is True
    assert commands.run("explain", ["job"]) == 0
    assert "Its pods were ended by `elasticdl stop`." in " ".join(capsys.readouterr().out.split())


def test_a_job_that_ends_before_it_could_stop_has_not_stopped(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    obey(server, "Succeeded")
    server.status = dataclasses.replace(server.status, phase=JobPhase.RUNNING)
    patch = server.patch

    def ends(path: str, sent: dict[str, Any]) -> tuple[int, bytes]:
        server.status = dataclasses.replace(server.status, phase=JobPhase.SUCCEEDED, exit_code=0)
        return patch(path, sent)

    server.patch = ends  # type: ignore[method-assign]
    assert commands.run("stop", ["job"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "has ended (Succeeded) before it could stop" in said.err
    with pytest.raises(JobError, match="it cannot be stopped"):
        commands.run("stop", ["job"])


def test_what_would_lose_the_model_is_refused(server: ApiServer) -> None:
    server.spec = dataclasses.replace(SPEC, checkpoint_dir="")
    with pytest.raises(JobError, match="keeps no checkpoints: the training on its 10 records would be lost"):
        commands.run("stop", ["job"])
    assert server.annotations == {}
    server.status = dataclasses.replace(server.status, records_done=0)
    assert commands.run("stop", ["job", "--no_wait"]) == 0


def test_a_job_that_is_resumed_is_not_asked_to_stop_any_more(server: ApiServer) -> None:
    obey(server, "Failed")
    server.master_pod = {
        "kind": "Pod",
        "metadata": {"name": "elasticdl-job-master"},
        "spec": {"containers": [{"name": "main"}]},
    }
    assert commands.run("stop", ["job"]) == 0
    del server.patch, server.pods["elasticdl-job-master"]  # its node is gone, too
    assert commands.run("resume", ["job"]) == 0
    assert server.annotations == {}
    assert server.made == 1
