"""The code of --code that is too large for ConfigMaps: published by the client, fetched and compared by each pod."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from elasticdl.rpc.unpack_code import unpack
from elasticdl.storage.fsspec_storage import storage_of
from elasticdl.storage.paths import path_of
from elasticdl_client.errors import JobError, StorageError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import code, submit
from tests.storage.faulty_proxy import Fault, FaultyProxy


@pytest.fixture
def spec(tmp_path: Path, proxy: FaultyProxy) -> JobSpec:
    """A job whose code belongs into storage."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "weights.bin").write_bytes(os.urandom(code.MAX_BYTES + 1))
    (project / "train.py").write_text("print('this is the code')\n")
    flags = {"job_name": "job", "image_name": "i", "job_command": "python train.py", "training_data": "/d"}
    storage = f"s3://bucket/{tmp_path.name}/code"
    return JobSpec.from_flags("train", {**flags, "code": str(project), "code_storage": storage})


@pytest.fixture
def archive(spec: JobSpec) -> code.Archive:
    return code.pack(spec)


def test_a_pod_runs_the_code_that_was_published_after_it_came_through_faults(
    archive: code.Archive, proxy: FaultyProxy, tmp_path: Path
) -> None:
    assert archive.reference.url in code.publish(archive)
    proxy.once_each(Fault.UNAVAILABLE, Fault.CUT_OFF, Fault.TOO_SHORT)
    zoo = tmp_path / "zoo"
    words = [archive.reference.digest, archive.reference.source, str(zoo), str(tmp_path / "cache")]
    command = [sys.executable, "-m", "elasticdl.rpc.unpack_code", *words, sys.executable, str(zoo / "train.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.endswith("this is the code\n")
    assert (zoo / "weights.bin").stat().st_size == code.MAX_BYTES + 1


def test_a_job_that_is_written_down_has_its_code_in_storage_and_one_that_is_shown_has_not(
    spec: JobSpec, archive: code.Archive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    url = archive.reference.url
    submit.run(dataclasses.replace(spec, dry_run=True))
    assert not storage_of(url).exists(url)
    submit.run(dataclasses.replace(spec, yaml=str(tmp_path / "job.yaml")))
    assert storage_of(url).read(url, 0, len(archive.data)) == archive.data
    objects = list(yaml.safe_load_all((tmp_path / "job.yaml").read_text()))
    [master] = [one for one in objects if one["kind"] == "Pod"]
    assert url in master["spec"]["containers"][0]["command"]


def test_code_that_is_there_already_is_not_sent_again(archive: code.Archive, proxy: FaultyProxy) -> None:
    code.publish(archive)
    proxy.requests.clear()
    assert archive.reference.url in code.publish(archive)
    assert {request.method for request in proxy.requests} == {"HEAD"}


def test_code_that_was_replaced_or_removed_in_storage_is_not_run(archive: code.Archive, tmp_path: Path) -> None:
    code.publish(archive)
    url, digest = archive.reference.url, archive.reference.digest
    storage_of(url).publish(url, archive.data[:-1] + b"x")
    with pytest.raises(JobError, match=f"{url} is not the code that was submitted"):
        unpack(path_of(url), tmp_path / "zoo", digest)
    storage_of(url).delete(url)
    with pytest.raises(JobError, match=f"gone from {url}"):
        unpack(path_of(url), tmp_path / "zoo", digest)
    assert not (tmp_path / "zoo").exists()


def test_storage_that_refuses_the_code_is_named_by_the_client(
    archive: code.Archive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StorageError, match=r"--code_storage: the code cannot be published: .*no permission"):
        code.publish(archive)
