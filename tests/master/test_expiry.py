"""Jobs that are deleted some time after their end: the objects that the master deletes, when, and obstacles to that."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticdl.master.kubernetes.environment import Expiry
from elasticdl.master.kubernetes.journal import ConfigMapJournal
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import connect
from elasticdl_client.kubernetes.objects import job_manifests
from elasticdl_client.kubernetes.pods import owned
from tests.master.actors import REPOSITORY, wait_until
from tests.master.life import TOKEN
from tests.master.object_server import ObjectServer

JOB = names.job_object("j")
UID = f"uid-{JOB}"


def spec(tmp_path: Path, **flags: object) -> JobSpec:
    (tmp_path / "m.py").write_text("def custom_model(): ...\ndef feed(d, m, md): ...\ndef eval_metrics_fn(): ...\n")
    given = {"job_name": "j", "model_def": "m.custom_model", "model_zoo": tmp_path, "image_name": "i", "tls": "false"}
    given |= {"validation_data": "/data", "checkpoint_dir_for_init": "/nowhere", "namespace": "team"}
    return JobSpec.from_flags("evaluate", {**given, **flags})


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """One that holds a job, which is deleted a second after its end or the parameter's seconds."""
    ttl_s = getattr(request, "param", 1)
    first, *others = job_manifests(spec(tmp_path, ttl_after_finished=ttl_s), TOKEN)
    found = ObjectServer([first, *(owned(one, "j", UID) for one in others)])
    monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig(tmp_path / "kubeconfig")))
    yield found
    found.close()


def expire(ended_at: float, ttl_s: float, stop: threading.Event | None = None) -> bool:
    """Waits for the end of a job whose pod is asked to end as soon as it is deleted."""
    return Expiry(connect(), "team", "j", UID, "elasticdl").wait(ended_at, ttl_s, stop or threading.Event())


def told_to_end_after_deletion(server: ObjectServer) -> threading.Event:
    stop = threading.Event()

    def tell() -> None:
        server.has_deleted.wait(60)
        stop.set()

    threading.Thread(target=tell, daemon=True).start()
    return stop


def test_the_owner_is_deleted_last_and_all_that_it_owns_with_it(server: ObjectServer) -> None:
    assert expire(time.time() - 100, 100, told_to_end_after_deletion(server))
    ((deleted, options),) = server.deletions
    assert deleted == f"configmaps/{JOB}"
    assert options["propagationPolicy"] == "Foreground"
    assert options["preconditions"] == {"uid": UID}
    assert server.objects == {}


def test_the_time_counts_from_the_end_of_the_job(server: ObjectServer) -> None:
    begun = time.time()
    assert expire(begun - 100, 101, told_to_end_after_deletion(server))
    assert time.time() >= begun + 1


def test_an_api_server_that_is_away_is_asked_again(server: ObjectServer) -> None:
    server.failures = [503, 429]
    assert expire(0, 0, told_to_end_after_deletion(server))
    assert len(server.deletions) == 1


def test_a_master_that_may_not_delete_the_job_leaves_it(server: ObjectServer, caplog: pytest.LogCaptureFixture) -> None:
    server.failures = [403]
    assert not expire(0, 0)
    assert server.deletions == []
    assert "elasticdl rbac --print --namespace=team" in caplog.text


def test_a_master_that_is_asked_to_end_leaves_the_wait_to_its_next_generation(server: ObjectServer) -> None:
    stop = threading.Event()
    stop.set()
    assert expire(time.time(), 3600, stop)
    assert server.deletions == []


def live(tmp_path: Path, is_enough: Callable[[str], bool]) -> int:
    """One life of the master, asked to end when its log is enough; its exit code."""
    (tmp_path / "token").write_text(TOKEN)
    environment = {
        **os.environ,
        "ELASTICDL_NAMESPACE": "team",
        "ELASTICDL_JOB_NAME": "j",
        "ELASTICDL_TOKEN_FILE": str(tmp_path / "token"),
        "MASTER_PORT": "0",
    }
    log = tmp_path / "log"
    with log.open("w") as written:
        master = subprocess.Popen(
            [sys.executable, "-m", "elasticdl.master"], cwd=REPOSITORY, env=environment, stdout=written, stderr=written
        )
    try:
        wait_until(lambda: is_enough(log.read_text()), "the end of what is looked for in the master's log")
        master.send_signal(signal.SIGTERM)
        return master.wait(30)
    finally:
        master.kill()
        master.wait()


def seconds_left(tmp_path: Path, exit_code: int) -> int:
    """How long the next life of the master, which ends with that code, waits with the deletion."""
    said = re.compile(r"deleted in (\d+) s")
    assert live(tmp_path, lambda log: said.search(log) is not None) == exit_code
    found = said.search((tmp_path / "log").read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("server", [1000], indirect=True)
def test_a_restarted_master_counts_from_the_end_that_the_journal_tells(server: ObjectServer, tmp_path: Path) -> None:
    journal = ConfigMapJournal(connect(), "team", "j")
    journal.save({"ended": [0, "", time.time() - 400]})  # a status that could not be written does not matter
    journal.close()
    assert 400 < seconds_left(tmp_path, 0) <= 600


@pytest.mark.parametrize("server", [1000], indirect=True)
def test_a_restarted_master_counts_from_its_first_failure(server: ObjectServer, tmp_path: Path) -> None:
    assert 800 < seconds_left(tmp_path, 1) <= 1000
    state = server.objects["configmaps", names.state_object("j")]["data"]
    status = JobStatus.from_json(state[names.STATUS_KEY])
    state[names.STATUS_KEY] = dataclasses.replace(status, updated_at=status.updated_at - 400).to_json()
    for _ in range(2):
        assert 400 < seconds_left(tmp_path, 1) <= 600


@pytest.mark.parametrize("lives", [1, 2])
def test_a_master_deletes_its_job_after_the_end(lives: int, server: ObjectServer, tmp_path: Path) -> None:
    """The job fails at once: there is no model. A life that comes after the end continues the wait."""
    for life in range(lives):
        if life < lives - 1:
            server.failures = [500] * 1000  # it does not get to the deletion
            assert live(tmp_path, lambda log: "it is tried again" in log) == 1
        else:
            server.failures = []
            assert live(tmp_path, lambda log: server.has_deleted.is_set()) == 1
    assert [deleted for deleted, _ in server.deletions] == [f"configmaps/{JOB}"]
    assert server.objects == {}
