"""A job on a cluster that has nothing but object storage: code, data, checkpoints and model, and answers that fail."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from elasticdl_client.kubernetes import code
from elasticdl_client.kubernetes.names import JOB_LABEL
from tests.client.test_requirements import write_wheel
from tests.e2e_kubernetes import host
from tests.e2e_kubernetes.conftest import OpenSpace
from tests.e2e_kubernetes.job import KubernetesJob, elasticdl
from tests.e2e_kubernetes.kubectl import REPOSITORY, kubectl
from tests.e2e_kubernetes.space import Space
from tests.storage.faulty_proxy import Fault, FaultyProxy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

OF_PIP = "PIP_NO_INDEX=1,PIP_FIND_LINKS=/model_zoo"
KEY, SECRET = "the-key-of-the-test", "only-the-environment-knows-this"
ZOO = REPOSITORY / "tests" / "e2e_kubernetes" / "zoo"


@contextmanager
def storage(address: str) -> Iterator[tuple[FaultyProxy, Any]]:
    """An S3 server with the bucket `bucket` behind a proxy at the node's address, and a client of its own."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys)
        client.create_bucket(Bucket="bucket")
        with FaultyProxy(port, address=address) as proxy:
            yield proxy, client
    finally:
        server.stop()


def project(directory: Path) -> Path:
    """The zoo as code that is too large for ConfigMaps, and that needs a package which the image lacks."""
    shutil.copytree(ZOO, directory)
    (directory / "weights.bin").write_bytes(os.urandom(code.MAX_BYTES + 1))
    write_wheel(directory, "site_words", "1.0")
    (directory / "requirements.txt").write_text("site_words\n")
    model = directory / "paced" / "numpy_digits.py"
    printing = "import importlib.metadata\n\nprint('site_words', importlib.metadata.version('site_words'))\n"
    model.write_text(f"{model.read_text()}\n\n{printing}")
    return directory


def resumed(job: KubernetesJob, space: Space) -> KubernetesJob:
    """The job, continued in another namespace; the test's environment has a part of its variables."""
    again = KubernetesJob(space.namespace, job.name, job.flags, job.directory, space.recorder, job.num_records)
    stored = f"--job_dir={job.flags['job_dir']}"
    refused = elasticdl("resume", stored, f"--namespace={space.namespace}")
    assert refused.returncode == 2, refused.stdout
    assert "PIP_NO_INDEX of --envs, PIP_FIND_LINKS of --envs" in refused.stderr
    done = elasticdl("resume", stored, f"--namespace={space.namespace}", f"--envs={OF_PIP}")
    again.output += (done.stdout + done.stderr).splitlines()
    assert done.returncode == 0, done.stderr
    return again


def test_a_job_with_code_data_and_checkpoints_in_storage_loses_nothing(
    open_space: OpenSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, address = open_space("storage"), host.node_address()
    with storage(address) as (proxy, s3):
        for path in sorted((space.data / "digits").glob("*/*")):
            s3.upload_file(str(path), "bucket", f"digits/{path.parent.name}/{path.name}")
        variables = {
            "AWS_ENDPOINT_URL": f"http://{address}:{proxy.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        for name, value in variables.items():  # the client publishes the code
            monkeypatch.setenv(name, value)
        for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
            monkeypatch.delenv(name, raising=False)
        variables_of_pods = ",".join(f"{name}={value}" for name, value in variables.items())
        job = space.job(
            "stored",
            code=project(space.directory / "code"),
            job_dir="s3://bucket/stored",
            checkpoint_dir="",
            training_data="s3://bucket/digits/train",
            validation_data="s3://bucket/digits/validation",
            output="s3://bucket/stored/model",
            envs=f"{variables_of_pods},{OF_PIP}",
            num_epochs=6,
        )
        job.submit()
        job.wait_for_progress(24)  # with a checkpoint
        faults = proxy.once_each(Fault.UNAVAILABLE, Fault.CUT_OFF, Fault.TOO_SHORT)
        host.kill(job.the_pod(job.server(0)).uid, signal.SIGKILL)
        job.wait_for_progress(8)
        host.kill(job.the_pod(job.worker(0)).uid, signal.SIGKILL)
        host.kill(job.the_pod(job.master).uid, signal.SIGKILL)
        successors = job.worker(0).removesuffix("0") + "[2-9]"  # the master may have planned one that it did not make
        job.wait_until("the code in the successor", lambda: "site_words 1.0" in job.log(successors))
        restored = job.log(job.server(0).removesuffix("0") + "*")
        assert faults == []  # the server that restored its state, or a worker's successor, has met each
        everything = "pods,configmaps,secrets,services,networkpolicies"
        kubectl("-n", space.namespace, "delete", everything, "-l", f"{JOB_LABEL}={job.name}", "--grace-period=1")
        other = open_space("storage-again")
        again = resumed(job, other)
        again.assert_ends_exactly()
        names = [one["Key"] for one in s3.list_objects_v2(Bucket="bucket")["Contents"]]
    assert {"stored/model/_SUCCESS", "stored/model/weights.npy"} <= set(names)
    assert any(name.startswith("stored/checkpoints/version-") and name.endswith("MANIFEST.json") for name in names)
    assert {"stored/spec.json", "stored/status.json"} <= set(names)
    assert len([name for name in names if name.startswith("stored/code/")]) == 1
    assert not [name for name in os.listdir(job.directory) if name not in ("pace", "work")]
    assert "s3://bucket/stored/checkpoints/version-" in restored, job.story()
    assert "s3://bucket/stored/checkpoints/version-" in again.log(job.server(0)), again.story()
    for one in (space, other):
        objects = kubectl("-n", one.namespace, "get", "pods,configmaps,events", "-o", "yaml")
        assert SECRET not in objects + one.recorder.ends_of_logs() + "\n".join(job.output + again.output)
