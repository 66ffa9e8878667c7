"""Jobs that are deleted some time after their end: what the master deletes, when, and what keeps it from that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticdl.master.kubernetes.expiry import Expiry
from elasticdl_client.job_spec import JobSpec
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
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    first, *others = job_manifests(spec(tmp_path, ttl_after_finished=1), TOKEN)
    found = ObjectServer([first, *(owned(one, "j", UID) for one in others)])
    monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig(tmp_path / "kubeconfig")))
    yield found
    found.close()


def expire(ended_at: float, ttl_s: float, stop: threading.Event | None = None) -> bool:
    """Waits for the end of a job whose pod is told to end as soon as it is deleted."""
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


def test_a_master_that_is_told_to_end_leaves_the_wait_to_its_next_life(server: ObjectServer) -> None:
    stop = threading.Event()
    stop.set()
    assert expire(time.time(), 3600, stop)
    assert server.deletions == []


@pytest.mark.parametrize("lives", [1, 2])
def test_a_master_deletes_its_job_after_the_end(lives: int, server: ObjectServer, tmp_path: Path) -> None:
    """The job fails at once: there is no model. A life that comes after the end goes on with the wait."""
    (tmp_path / "token").write_text(TOKEN)
    environment = {
        **os.environ,
        "ELASTICDL_NAMESPACE": "team",
        "ELASTICDL_JOB_NAME": "j",
        "ELASTICDL_TOKEN_FILE": str(tmp_path / "token"),
        "MASTER_PORT": "0",
    }
    log = (tmp_path / "log").open("w")
    for life in range(lives):
        if life < lives - 1:
            server.failures = [500] * 1000  # it does not get to the deletion
        else:
            server.failures = []
        master = subprocess.Popen(
            [sys.executable, "-m", "elasticdl.master"], cwd=REPOSITORY, env=environment, stdout=log, stderr=log
        )
        try:
            if life < lives - 1:
                wait_until(lambda: "it is tried again" in (tmp_path / "log").read_text(), "the first life's try")
            else:
                assert server.has_deleted.wait(60), (tmp_path / "log").read_text()
            master.send_signal(signal.SIGTERM)
            assert master.wait(30) == 1, (tmp_path / "log").read_text()
        finally:
            master.kill()
            master.wait()
    log.close()
    assert [deleted for deleted, _ in server.deletions] == [f"configmaps/{JOB}"]
    assert server.objects == {}
