"""`elasticdl tensorboard JOB`: here as a process, of a cluster the pod that it makes and how bytes are carried."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from elasticdl.master.tensorboard import TensorBoardLog
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.jobs.tensorboard import pod_of, pump
from elasticdl_client.kubernetes.objects import job_manifests
from tests.master.actors import held_port

FLAGS = {"job_name": "digits", "model_def": "a.b", "training_data": "/data/x", "image_name": "i"}


def local_job(directory: Path, **flags: object) -> Path:
    directory.mkdir()
    (directory / "lock").touch()
    spec = JobSpec.from_flags("train", {**FLAGS, "runtime": "local", **flags})
    (directory / "spec.json").write_text(spec.to_json())
    return directory


def command(directory: Path, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "elasticdl_client.main",
        "tensorboard",
        "digits",
        f"--job_dir={directory}",
        *arguments,
    ]


@pytest.mark.timeout(180)
def test_a_local_job_is_shown_until_ctrl_c(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    log = TensorBoardLog(str(logs), 1, 0)
    log.on_evaluation(5, {"accuracy": 0.5})
    log.close()
    job = local_job(tmp_path / "job", tensorboard_log_dir=logs)
    held = held_port()
    port = held.getsockname()[1]
    process = subprocess.Popen(
        command(job, f"--port={port}"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if found := re.search(r"(http://\S+/) \(Press CTRL\+C", line):
                break
        else:
            raise AssertionError(seen)
        assert f"The event files of job digits are in {logs}" in seen
        with urllib.request.urlopen(f"{found.group(1)}data/environment", timeout=60) as answer:
            assert json.load(answer)["data_location"] == str(logs)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(60) in (0, -signal.SIGINT)
    finally:
        process.kill()
        process.wait()
        held.close()


def test_a_job_without_event_files_is_refused_with_what_to_do(tmp_path: Path) -> None:
    job = local_job(tmp_path / "job")
    ended = subprocess.run(command(job), capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "Job digits writes no event files" in ended.stderr
    assert "--tensorboard_log_dir=DIRECTORY" in ended.stderr


def cluster_spec(**flags: object) -> JobSpec:
    return JobSpec.from_flags("train", {**FLAGS, **flags})


def config_map(spec: JobSpec) -> dict[str, str]:
    found = job_manifests(spec, "token")
    return next(one["data"] for one in found if "master-pod.json" in (one.get("data") or {}))


def test_the_pod_has_the_jobs_image_and_volumes_and_none_of_the_masters_rights() -> None:
    volume = "claim_name=data,mount_path=/data"
    spec = cluster_spec(volume=volume, tensorboard_log_dir="/data/logs", master_pod_priority="high")
    pod = pod_of(config_map(spec), spec, "uid-1")
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "i"
    assert container["command"][:5] == ["python", "-P", "-m", "tensorboard.main", "--logdir=/data/logs"]
    assert "/data" in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert "serviceAccountName" not in pod["spec"]
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["metadata"]["labels"] == {"app": "elasticdl-digits-tensorboard"}
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "uid-1"


def test_the_pod_has_the_masters_identity_where_it_reads_storage() -> None:
    spec = cluster_spec(
        tensorboard_log_dir="s3://bucket/logs",
        service_account="training",
        master_pod_template='{"metadata": {"labels": {"azure.workload.identity/use": "true", '
        '"kueue.x-k8s.io/queue-name": "team"}}}',
    )
    pod = pod_of(config_map(spec), spec, "uid-1")
    assert pod["spec"]["serviceAccountName"] == "training"
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["metadata"]["labels"] == {"app": "elasticdl-digits-tensorboard", "azure.workload.identity/use": "true"}


def test_a_directory_on_no_volume_is_refused() -> None:
    spec = cluster_spec(tensorboard_log_dir="/tmp/logs")
    with pytest.raises(JobError, match="is on no mount of its --volume"):
        pod_of(config_map(spec), spec, "uid-1")


def test_bytes_are_carried_both_ways_until_one_side_ends() -> None:
    (browser, left), (right, server) = socket.socketpair(), socket.socketpair()
    thread = threading.Thread(target=pump, args=(left, right))
    thread.start()
    browser.sendall(b"GET /")
    assert server.recv(5) == b"GET /"
    server.sendall(b"200 OK")
    assert browser.recv(6) == b"200 OK"
    server.close()
    thread.join(10)
    assert not thread.is_alive()
    for one in (browser, left, right):
        one.close()
