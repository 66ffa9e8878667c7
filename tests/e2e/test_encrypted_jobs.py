"""Whole jobs with --encrypt, whose processes see none of each other's Unix sockets, as on machines of their own."""

from __future__ import annotations

import os
import subprocess
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl_client.job_status import JobPhase
from tests.chaos.job import LocalJob
from tests.chaos.jobs import NUMPY_DIGITS, RealJob

DIGITS = replace(NUMPY_DIGITS, pace_s=0)
_STEPS = 60
_APART = """
import socket

_connect = socket.socket.connect


def connect(self, address):
    if self.family == socket.AF_UNIX and address[:1] in ("\\0", b"\\0"):
        raise ConnectionRefusedError("of another machine")
    return _connect(self, address)


socket.socket.connect = connect
"""


_WITHOUT_HMAC = 'extern "C" {' + "".join(
    f"void EVP_{name}() {{}}"
    for name in (
        "CIPHER_CTX_new", "CIPHER_CTX_free", "aes_256_gcm", "sha256", "EncryptInit_ex", "EncryptUpdate",
        "EncryptFinal_ex", "DecryptInit_ex", "DecryptUpdate", "DecryptFinal_ex", "CIPHER_CTX_ctrl",
    )
) + "}"  # fmt: skip
_BUILT_IN = """
import hashlib, hmac, sys, types  # with algorithms of their own

sys.modules["_hashlib"] = types.ModuleType("_hashlib")  # linked into the interpreter, so that it names no file
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DIGITS.make_data(tmp_path_factory.mktemp("data"))


def ended(job: RealJob, job_dir: Path, data: Path, **flags: object) -> LocalJob:
    """A job that has ended well."""
    apart = job_dir.parent / "apart"
    apart.mkdir(exist_ok=True)
    (apart / "sitecustomize.py").write_text(textwrap.dedent(_APART))
    running = job.local_job(job_dir, data, max_step=_STEPS, seed=7, validation_data="", **flags)
    running.environment["PYTHONPATH"] = os.pathsep.join([str(apart), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    assert running.start().wait(180) == 0, running.story()
    logs = "".join(path.read_text() for path in (job_dir / "logs").iterdir())
    assert "over gRPC alone" not in logs, running.story()
    return running


def state(job_dir: Path) -> dict[str, bytes]:
    """The files of the last checkpoint."""
    [last] = (job_dir / "checkpoints").glob(f"version-{_STEPS}")
    return {path.name: path.read_bytes() for path in last.iterdir() if path.suffix in (".ckpt", ".npz")}


@pytest.mark.timeout(400)
def test_a_job_on_parameter_servers_ends_with_the_same_bits_encrypted(tmp_path: Path, digits: Path) -> None:
    for name, encrypt in (("clear", False), ("encrypted", True)):
        ended(DIGITS, tmp_path / name, digits, num_workers=1, num_ps_pods=2, encrypt=encrypt)
    assert state(tmp_path / "clear") == state(tmp_path / "encrypted") != {}
    assert (tmp_path / "encrypted" / "tls.key").exists(), "calls would show the token"
    assert not (tmp_path / "clear" / "tls.key").exists()


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_all_reduce_job_ends_with_the_same_bits_encrypted(tmp_path: Path, digits: Path, num_workers: int) -> None:
    flags = {"distribution_strategy": "AllReduceStrategy", "num_workers": num_workers, "min_workers": num_workers}
    for name, encrypt in (("clear", False), ("encrypted", True)):
        ended(DIGITS, tmp_path / name, digits, num_ps_pods=0, fixed_global_batch=64, encrypt=encrypt, **flags)
    assert state(tmp_path / "clear") == state(tmp_path / "encrypted") != {}


@pytest.mark.parametrize(
    ("source", "python"),
    [("", ""), (_WITHOUT_HMAC, _BUILT_IN)],
    ids=["none", "one that lacks a function"],
)
def test_a_job_without_a_libcrypto_ends_at_its_start_with_one_error(
    tmp_path: Path, digits: Path, source: str, python: str
) -> None:
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "sitecustomize.py").write_text(python)
    for name in ("libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.3.dylib"):
        compiler = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(libraries / name)]
        subprocess.run(compiler, input=source, text=True, check=True)
    job = DIGITS.local_job(tmp_path / "job", digits, num_workers=1, encrypt=True)
    path = os.pathsep.join([str(libraries), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    job.environment = {"LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": path}
    assert job.start().wait(60) == 1, job.story()
    status = job.status()
    assert status is not None
    assert (status.phase, status.pods) == (JobPhase.FAILED, ())
    what, hint = status.message.splitlines()
    assert what.startswith("the job has --encrypt, and nothing can be encrypted here: ")
    assert "openssl" in what.lower()
    assert "use an image whose Python has OpenSSL" in hint
    assert "Traceback" not in job.story()
