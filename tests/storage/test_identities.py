"""Storage by the identity of a pod: its tokens are found and renewed, and errors name those that are missing."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elasticdl.rpc.addresses import free_ports
from elasticdl.storage import versions
from elasticdl.storage.fsspec_storage import FsspecStorage, RetryPolicy, storage_of, storage_of_scheme
from elasticdl.storage.paths import RemotePath
from elasticdl_client.errors import StorageError, StorageUnreachable
from tests.chaos.jobs import NUMPY_DIGITS
from tests.chaos.scenarios import coverage_of
from tests.storage import emulators
from tests.storage.identities import ROLE, AwsIdentity, AzureIdentity, GoogleIdentity, projected_token, self_signed
from tests.storage.machines import machine

QUICK = RetryPolicy(request_s=20.0, first_wait_s=0.01, longest_wait_s=0.1, total_s=20.0)
_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")


@pytest.fixture
def aws(s3_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[AwsIdentity]:
    """A machine without keys, and the endpoint of S3 and STS."""
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with AwsIdentity(s3_port) as aws, projected_token(tmp_path / "token", aws.tokens):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{aws.port}")
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        storage_of_scheme.cache_clear()
        yield aws
        storage_of_scheme.cache_clear()


def by_role(aws: AwsIdentity, tmp_path: Path) -> dict[str, str]:
    """The variables that the webhook of EKS adds to a pod, for a role of IAM."""
    return {"AWS_ROLE_ARN": ROLE, "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token")}


def by_agent(aws: AwsIdentity, tmp_path: Path) -> dict[str, str]:
    """Those of EKS Pod Identity."""
    return {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://127.0.0.1:{aws.port}/credentials",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token"),
    }


@pytest.fixture(params=[by_role, by_agent], ids=["role", "agent"])
def pod(
    aws: AwsIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AwsIdentity:
    """The environment of a pod with an identity."""
    for name, value in request.param(aws, tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    aws.ahead_s = 1.0  # each request needs new credentials
    return aws


def test_credentials_are_renewed_however_often_that_fails_at_first(pod: AwsIdentity, tmp_path: Path) -> None:
    storage, file = FsspecStorage("s3", QUICK), f"s3://bucket/{tmp_path.name}/a"
    storage.publish(file, b"0123")
    assert storage.read(file, 1, 3) == b"12"
    assert len(pod.keys) >= 2
    pod.answer_of = fails(4)  # botocore asks the agent three times
    assert storage.read(file, 1, 3) == b"12"
    assert pod.refused == [pod.refused[0]] * 4


def test_a_token_that_is_refused_or_missing_is_no_missing_file(pod: AwsIdentity, tmp_path: Path) -> None:
    storage, file = FsspecStorage("s3", QUICK), f"s3://bucket/{tmp_path.name}/a"
    storage.publish(file, b"0123")
    pod.tokens.lifetime_s = -1.0
    with pytest.raises(StorageError, match="no permission") as caught:
        storage.exists(file)
    assert "--worker_service_account" in caught.value.hint
    assert len(pod.refused) <= 3  # once by STS; botocore asks the agent again


def test_the_file_of_a_token_that_is_missing_is_no_missing_file(
    aws: AwsIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for identity in (by_role, by_agent):
        with monkeypatch.context() as patch:
            for name, value in identity(aws, tmp_path).items():
                patch.setenv(name, value.replace("/token", "/none"))
            with pytest.raises(StorageError, match=r"no permission.*none'"):
                FsspecStorage("s3", QUICK).exists("s3://bucket/a")


def test_an_agent_that_cannot_be_reached_is_asked_again(pod: AwsIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    for name in ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_ENDPOINT_URL_STS"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}/credentials")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "token")
    monkeypatch.delenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", raising=False)
    with pytest.raises(StorageUnreachable, match="could not be reached"):
        FsspecStorage("s3", RetryPolicy(20.0, 0.01, 0.1, 1.0)).exists("s3://bucket/a")


def test_reads_end_although_no_credentials_come(
    aws: AwsIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore lets one thread ask after the other, five times each, and 60 s each time."""
    for name, value in by_role(aws, tmp_path).items():
        monkeypatch.setenv(name, value)
    storage = FsspecStorage("s3", RetryPolicy(0.5, 0.01, 0.1, 1.0))
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor() as threads:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{silent.getsockname()[1]}")
        reads = [threads.submit(storage.read, "s3://bucket/a", 0, 1) for _ in range(3)]
        started = time.monotonic()
        for read in reads:
            with pytest.raises(StorageUnreachable):
                read.result(20.0)
    assert time.monotonic() - started < 20.0


def test_a_machine_without_credentials_is_refused_at_once(aws: AwsIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="no permission: Unable to locate credentials"):
        FsspecStorage("s3", QUICK).exists("s3://bucket/a")
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(StorageError, match=r"profile .*missing"):
        FsspecStorage("s3", QUICK).exists("s3://bucket/a")
    assert aws.requests == []


@pytest.mark.timeout(300)
def test_a_job_outlives_the_credentials_that_it_began_with(
    aws: AwsIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in by_role(aws, tmp_path).items():
        monkeypatch.setenv(name, value)
    url = f"s3://bucket/{tmp_path.name}"
    data = NUMPY_DIGITS.make_data(tmp_path)
    for file in sorted((data / "train").iterdir()):
        storage_of(url).publish(f"{url}/train/{file.name}", file)
    job = NUMPY_DIGITS.local_job(
        machine(tmp_path, "one", "numpy"), data, job_name="numpy", checkpoint_steps=20, num_epochs=4
    )
    job.flags |= {"job_dir": f"{url}/job", "training_data": f"{url}/train", "output": f"{url}/model"}
    job.flags["validation_data"] = ""
    job.environment = {"HOME": str(tmp_path / "one")}
    job.pace_s = 0.01
    job.start()
    checkpoints = RemotePath(f"{url}/job/checkpoints")
    job.wait_for_version(20)
    job.wait_until("a checkpoint", lambda: bool(versions.complete(checkpoints)), look_s=0.5)
    given = len(aws.keys)
    job.wait_until("these credentials to end", lambda: aws.keys.num_expired >= given)
    job.hurry()
    assert job.wait() == 0, job.story()
    assert [(one.records, one.committed, one.repeated, one.lost) for one in coverage_of(job)] == [
        (NUMPY_DIGITS.num_train, NUMPY_DIGITS.num_train, 0, 0)
    ] * 4, job.story()
    assert RemotePath(f"{url}/model/_SUCCESS").exists()
    assert json.loads(RemotePath(f"{url}/job/status.json").read_bytes())["exit_code"] == 0
    assert aws.refused == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("flag", ["job_dir", "training_data"])
def test_a_job_without_an_identity_ends_with_the_reason(aws: AwsIdentity, tmp_path: Path, flag: str) -> None:
    data = NUMPY_DIGITS.make_data(tmp_path)
    job = NUMPY_DIGITS.local_job(tmp_path / "job", data, job_name="numpy", num_epochs=1)
    job.flags |= {flag: "s3://bucket/none", "validation_data": ""}
    job.environment = {"HOME": str(tmp_path)}
    job.start()
    assert job.wait() != 0
    assert "no permission: Unable to locate credentials" in "\n".join(job.output), job.story()
    assert "Traceback" not in "\n".join(job.output)


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[GoogleIdentity]:
    """A pod of GKE with an identity."""
    with emulators.google() as variables:
        port = int(variables["STORAGE_EMULATOR_HOST"].rpartition(":")[2])
        with GoogleIdentity(port) as google:
            here = f"127.0.0.1:{google.port}"
            of_pod = {"STORAGE_EMULATOR_HOST": f"http://{here}", "GCE_METADATA_HOST": here, "GCE_METADATA_IP": here}
            for name, value in {**variables, **of_pod, "HOME": str(tmp_path)}.items():
                monkeypatch.setenv(name, value)
            for name in ("GOOGLE_APPLICATION_CREDENTIALS", "FSSPEC_GS_TOKEN"):  # the emulator's names no credentials
                monkeypatch.delenv(name, raising=False)
            storage_of_scheme.cache_clear()
            yield google
            storage_of_scheme.cache_clear()


STEPS = """
import sys
from elasticdl.storage.fsspec_storage import FsspecStorage, RetryPolicy
from elasticdl_client.errors import StorageError
url, total_s = sys.argv[1], float(sys.argv[2])
storage = FsspecStorage(url.partition(":")[0], RetryPolicy(60.0, 0.05, 0.5, total_s))
try:
    storage.publish(url, b"0123")
    print(storage.read(url, 1, 3))
except StorageError as error:
    print(type(error).__name__, error.what)
"""


def steps(url: str, total_s: float = 60.0) -> str:
    """The output of a process that writes and reads a file: clients read their environment when they are imported."""
    argv = [sys.executable, "-c", STEPS, url, str(total_s)]
    return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120).stdout.strip()


def fails(number: int, after: int = 0) -> Callable[[], int]:
    """Answers that are 503 that often, after some good ones."""
    asked = itertools.count()
    return lambda: 503 if after <= next(asked) < after + number else 200


@pytest.mark.timeout(120)
def test_tokens_of_google_are_renewed_and_asked_for_again(google: GoogleIdentity) -> None:
    google.ahead_s = 1.0
    google.answer_of = fails(6)  # google-auth asks five times, 15 s long
    assert steps("gs://bucket/a") == "b'12'"
    assert len(google.tokens) >= 2
    google.answer_of = lambda: 403
    assert steps("gs://bucket/a").startswith("StorageError gs://bucket/a: no permission")


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[AzureIdentity]:
    """A pod of AKS with an identity."""
    certificate, key = self_signed(tmp_path)
    for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, str(certificate))
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ANON"):
        monkeypatch.delenv(name, raising=False)
    with emulators.azure_of_tokens(certificate, key) as variables, contextlib.ExitStack() as stack:
        azure = AzureIdentity(certificate, key)
        stack.callback(azure.close)
        stack.enter_context(projected_token(tmp_path / "token", azure.tokens))
        of_webhook = {
            "AZURE_CLIENT_ID": "00000000-0000-0000-0000-000000000001",
            "AZURE_TENANT_ID": "00000000-0000-0000-0000-000000000002",
            "AZURE_FEDERATED_TOKEN_FILE": str(tmp_path / "token"),
            "AZURE_AUTHORITY_HOST": f"https://127.0.0.1:{azure.port}/",
        }
        for name, value in {**variables, **of_webhook}.items():
            monkeypatch.setenv(name, value)
        storage_of_scheme.cache_clear()
        yield azure
        storage_of_scheme.cache_clear()


@pytest.mark.timeout(120)
def test_tokens_of_azure_are_renewed_and_asked_for_again(azure: AzureIdentity) -> None:
    azure.ahead_s = 0.0  # a token that is good for a second is used again within it
    azure.answer_of = fails(6, after=1)  # azure-identity asks four times
    assert steps("az://bucket/a") == "b'12'"
    assert len(azure.given) >= 2
    azure.answer_of = lambda: 401
    refused = steps("az://bucket/a")
    assert refused.startswith("StorageError az://bucket/a: no permission"), refused
    assert "AADSTS700024" in refused
