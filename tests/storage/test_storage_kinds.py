"""Each kind of storage keeps the contract of the port, of the journal and of checkpoints; whole jobs lie in each.

The servers are emulators, which `make test-versions LANES=storage-kinds-oldest` installs.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from elasticdl.master.journal import ResumedElsewhere, Superseded
from elasticdl.protocol import Role
from elasticdl.storage import versions
from elasticdl.storage.fsspec_storage import FsspecStorage, RetryPolicy, storage_of, storage_of_scheme
from elasticdl.storage.paths import RemotePath, on_this_machine, path_of, writing
from elasticdl.storage.remote_file import PART_BYTES, RemoteFile
from elasticdl.worker.checkpoint import CheckpointKind, StateCheckpoints
from elasticdl.worker.ledger import Ledger
from elasticdl_client.errors import JobError, StorageError, StorageFileMissing
from elasticdl_client.job_status import EXIT_SUPERSEDED, JobPhase, JobStatus
from elasticdl_client.storage_kinds import scheme_of
from tests.chaos.job import LocalJob
from tests.chaos.jobs import NUMPY_DIGITS
from tests.chaos.scenarios import coverage_of
from tests.master.actors import wait_until
from tests.master.journals import StorageJournals
from tests.storage import emulators
from tests.storage.machines import lose, machine

QUICK = RetryPolicy(request_s=10.0, first_wait_s=0.01, longest_wait_s=0.1, total_s=2.0)
CONTENT = bytes(range(256)) * 40
_RUNNING = JobStatus("digits", phase=JobPhase.RUNNING)
SERVERS: dict[str, Callable[[], contextlib.AbstractContextManager[dict[str, str]]]] = {
    "gs://bucket": emulators.google,
    "az://bucket": emulators.azure,
    "abfs://bucket@devstoreaccount1.dfs.core.windows.net": emulators.azure,
    "oss://bucket": emulators.alibaba,
    "hdfs:///bucket": emulators.hadoop,
}


@pytest.fixture(scope="module", params=SERVERS)
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a bucket; the environment names its server."""
    with SERVERS[request.param]() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        storage_of_scheme.cache_clear()
        yield request.param
    storage_of_scheme.cache_clear()


@pytest.fixture
def url(bucket: str, tmp_path: Path) -> str:
    return f"{bucket}/{tmp_path.name}"


def names(storage: FsspecStorage, directory: str) -> list[str]:
    return [status.url.rpartition("/")[2] for status in storage.list(directory)]


def test_the_six_verbs(url: str, tmp_path: Path) -> None:
    storage, file = FsspecStorage(scheme_of(url), QUICK), f"{url}/d/a"
    assert storage.list(f"{url}/d") == []
    assert not storage.exists(file)
    (tmp_path / "local").write_bytes(CONTENT)
    storage.publish(file, tmp_path / "local")
    storage.publish(f"{url}/d/below/b", b"b")
    storage.publish(f"{url}/d/empty", b"")
    first = storage.stat(file)
    assert (first.size_bytes, first.is_directory, bool(first.etag)) == (len(CONTENT), False, True)
    listed = {status.url.rpartition("/")[2]: status for status in storage.list(f"{url}/d")}
    assert {name: (one.size_bytes, one.is_directory) for name, one in listed.items()} == {
        "a": (len(CONTENT), False),
        "below": (0, True),
        "empty": (0, False),
    }
    assert listed["a"].etag == first.etag
    assert storage.read(listed["a"].url, 0, 10) == CONTENT[:10]  # the URL of a list names the file
    assert storage.stat(f"{url}/d").is_directory
    assert storage.exists(f"{url}/d")
    assert storage.read(file, 100, 1000) == CONTENT[100:1000]
    storage.publish(file, CONTENT[::-1])
    assert storage.stat(file).etag != first.etag
    assert storage.read(file, 0, 10) == CONTENT[::-1][:10]
    for name in ("a", "a", "empty", "below/b"):
        storage.delete(f"{url}/d/{name}")
    assert storage.list(f"{url}/d") == []
    assert not storage.exists(f"{url}/d")
    with pytest.raises(StorageFileMissing, match="does not exist"):
        storage.read(file, 0, 1)
    with pytest.raises(StorageFileMissing, match="does not exist"):
        storage.stat(file)
    missing = "hdfs://127.0.0.1:1" if url.startswith("hdfs:") else url.replace("bucket", "no-such-bucket", 1)
    with pytest.raises(StorageError):
        storage.publish(f"{missing}/a", b"a")


def test_a_large_file_is_published_whole_and_read_in_parts(url: str, tmp_path: Path) -> None:
    content = np.random.default_rng(1).bytes(3 * PART_BYTES + 7)
    (tmp_path / "large").write_bytes(content)
    storage = FsspecStorage(scheme_of(url), QUICK)
    storage.publish(f"{url}/large", tmp_path / "large")
    file = RemoteFile(f"{url}/large", storage)
    assert file.pread(len(content), 0) == content
    assert file.pread(100, len(content) - 3) == content[-3:]
    assert [bytes(view) for view in file.pread_all([(5, 10), (2 * PART_BYTES, 20)])] == [
        content[5:15],
        content[2 * PART_BYTES : 2 * PART_BYTES + 20],
    ]


@pytest.mark.parametrize(
    "content", [b"\r", b"a\r", b"a\n\r", b"a\r\n", b"--==0==\r\nb", b"a\n--==0==--\nb", b"a\r\n--==0==\r"]
)
def test_content_that_looks_like_the_end_of_a_request_is_kept(url: str, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "local.txt").write_bytes(content)
    storage = FsspecStorage(scheme_of(url), QUICK)
    storage.publish(f"{url}/bytes", content)
    storage.publish(f"{url}/local.txt", tmp_path / "local.txt")
    for status in storage.list(url):
        assert storage.read(status.url, 0, status.size_bytes) == content


_CLIENTS_COME_AND_GO = """
import sys
from elasticdl.storage.fsspec_storage import FsspecStorage
from elasticdl_client.storage_kinds import scheme_of
for _ in range(20):
    FsspecStorage(scheme_of(sys.argv[1])).publish(sys.argv[1], b"a")
"""


def test_clients_come_and_go(url: str) -> None:
    subprocess.run([sys.executable, "-c", _CLIENTS_COME_AND_GO, f"{url}/d/a"], check=True, timeout=100)


def test_an_upload_that_breaks_off_in_googles_emulator_is_no_file() -> None:
    with emulators.google() as variables:
        host, port = variables["STORAGE_EMULATOR_HOST"].removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /upload/storage/v1/b/bucket/o?uploadType=media&name=cut HTTP/1.1\r\n"
                b"Host: bucket\r\nContent-Type: text/plain\r\nContent-Length: 9\r\n\r\nhalf"
            )
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
        with urllib.request.urlopen(f"http://{host}:{port}/storage/v1/b/bucket/o") as answer:
            assert not json.load(answer).get("items")


def test_paths_below_a_directory(url: str) -> None:
    directory = path_of(f"{url}/d/")
    with writing(directory / "sub" / "a.bin") as file:
        file.write(b"0123456789")
    with writing(directory / "b.bin") as file:
        file.write(b"b")
    assert isinstance(directory, RemotePath)
    assert sorted(directory.files()) == ["b.bin", "sub/a.bin"]
    assert list((directory / "sub").iterdir()) == [directory / "sub" / "a.bin"]
    assert (directory / "sub" / "a.bin").read_bytes() == b"0123456789"
    with on_this_machine(directory) as local:
        assert (local / "sub" / "a.bin").read_bytes() == b"0123456789"
    with pytest.raises(FileNotFoundError):
        (directory / "none").read_bytes()


def test_a_journal_belongs_to_the_highest_claim_and_is_read_after_each_write(url: str, tmp_path: Path) -> None:
    here, there = (StorageJournals(url, tmp_path / place, place * 16) for place in "ab")
    first = here.open()
    assert first.load() is None
    for n in range(30):
        first.save({"n": n}, _RUNNING)
    assert len(here.names()) <= 12
    first.save_later({"n": 30}, _RUNNING)
    wait_until(lambda: len(here.names()) == 3, "old snapshots to be deleted")
    second = there.open()
    assert second.load() == {"n": 30}
    assert second.read_status() == _RUNNING
    with pytest.raises(ResumedElsewhere):
        first.save({"n": 31})
    first.close()
    with pytest.raises(ResumedElsewhere):
        here.open().load()
    second.save({"n": 32})
    third = StorageJournals(url, tmp_path / "c", "b" * 16).open()
    assert third.load() == {"n": 32}
    with pytest.raises(Superseded):
        second.save({"n": 33})
    second.close()
    storage = storage_of(url)
    for name in RemotePath(url).files():
        storage.delete(f"{url}/{name}")
    with pytest.raises(JobError, match="was removed"):
        third.save({"n": 34})
    third.close()
    assert RemotePath(url).files() == []


def test_a_checkpoint_is_complete_with_its_manifest_and_old_ones_go(url: str) -> None:
    kept = StateCheckpoints(url, CheckpointKind("job", "AllreduceStrategy", "model.npz", {}), keep=2)
    assert kept.newest() is None
    for number in (1, 9, 10):
        ledger = Ledger(steps=number)
        ledger.applied.fill(0, 0, 1, number)
        kept.save(number, {"w": np.arange(number)}, ledger)
    assert [path.name for path in versions.versions(path_of(url))] == ["version-9", "version-10"]
    storage_of(url).delete(f"{url}/version-10/MANIFEST.json")
    found = kept.newest()
    assert found is not None
    np.testing.assert_array_equal(found.arrays["w"], np.arange(9))
    versions.prune(path_of(url), 1)
    assert [path.name for path in versions.complete(path_of(url))] == ["version-9"]


def training(url: str, tmp_path: Path) -> LocalJob:
    """A job whose data, directory and model are in storage; it waits for `hurry` in its first epochs."""
    data = NUMPY_DIGITS.make_data(tmp_path)
    storage = storage_of(url)
    for file in sorted((data / "train").iterdir()):
        storage.publish(f"{url}/train/{file.name}", file)
    job = NUMPY_DIGITS.local_job(
        machine(tmp_path, "one", "numpy"), data, job_name="numpy", checkpoint_steps=5, num_epochs=4
    )
    job.flags |= {"job_dir": f"{url}/job", "training_data": f"{url}/train", "output": f"{url}/model"}
    job.flags["validation_data"] = ""
    job.environment = {"HOME": str(tmp_path / "one")}
    job.pace_s = 0.02  # longer than an emulator on a busy machine takes to show a checkpoint
    return job.start()


def resumed(url: str, tmp_path: Path) -> LocalJob:
    job = LocalJob(machine(tmp_path, "two", "numpy"), {"job_dir": f"{url}/job"}, "resume")
    job.environment = {"HOME": str(tmp_path / "two")}
    return job.start()


def assert_exact(job: LocalJob, url: str) -> None:
    assert [(one.records, one.committed, one.repeated, one.lost) for one in coverage_of(job)] == [
        (NUMPY_DIGITS.num_train, NUMPY_DIGITS.num_train, 0, 0)
    ] * 4, job.story()
    assert RemotePath(f"{url}/model/_SUCCESS").exists()
    assert versions.complete(RemotePath(f"{url}/job/checkpoints"))
    stored = json.loads(RemotePath(f"{url}/job/status.json").read_bytes())
    assert (stored["phase"], stored["exit_code"]) == ("Succeeded", 0)


@pytest.mark.timeout(300)
def test_a_whole_job_continues_on_another_machine(url: str, tmp_path: Path) -> None:
    first = training(url, tmp_path)
    checkpoints = RemotePath(f"{url}/job/checkpoints")
    first.wait_until("a checkpoint", lambda: bool(versions.complete(checkpoints)))
    lose(first)
    second = resumed(url, tmp_path)
    second.hurry()
    assert second.wait() == 0, second.story()
    assert_exact(second, url)


@pytest.mark.timeout(300)
def test_a_stopped_master_ends_once_its_job_was_resumed_elsewhere(url: str, tmp_path: Path) -> None:
    first = training(url, tmp_path)
    checkpoints = RemotePath(f"{url}/job/checkpoints")
    first.wait_until("a checkpoint", lambda: bool(versions.complete(checkpoints)))
    (master,) = first.victims(Role.MASTER)
    first.stop(master)
    second = resumed(url, tmp_path)
    second.wait_until("a status there", lambda: second.status() is not None)
    first.resume(master)
    assert first.wait() == EXIT_SUPERSEDED, first.story()
    second.hurry()
    assert second.wait() == 0, second.story()
    assert_exact(second, url)
