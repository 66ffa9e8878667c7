"""Data on the Hugging Face Hub: the reading verbs, every kind of file, whole jobs, and what is refused."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyarrow import csv

pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")

from huggingface_hub import constants

from elasticdl.data.factory import create_reader
from elasticdl.protocol import Shard
from elasticdl.storage.fsspec_storage import FsspecStorage, RetryPolicy, storage_of_scheme
from elasticdl.storage.remote_file import RemoteFile
from elasticdl_client.errors import FlagError, StorageError, StorageFileMissing
from elasticdl_client.job_spec import JobSpec
from tests.chaos.job import LocalJob
from tests.chaos.jobs import NUMPY_DIGITS
from tests.chaos.scenarios import coverage_of
from tests.data import typed_sources as typed
from tests.e2e.test_data_sources import TORCH, assert_exact_and_good, write_parquet
from tests.e2e.test_data_sources import job as table_job
from tests.storage.faulty_proxy import Fault, FaultyProxy
from tests.storage.hub import LARGE_BYTES, TOKEN, Hub

QUICK = RetryPolicy(request_s=3.0, first_wait_s=0.01, longest_wait_s=0.1, total_s=5.0)
SMALL, LARGE = bytes(range(256)) * 40, bytes(range(251)) * 200
DATA = "datasets/owner/rows"
URL = f"hf://{DATA}"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.fixture
def proxy(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyProxy]:
    """The endpoint, in front of the Hub."""
    with FaultyProxy(hub.port) as proxy:
        endpoint = f"http://127.0.0.1:{proxy.port}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)  # read when it was imported
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        storage_of_scheme.cache_clear()
        yield proxy
        storage_of_scheme.cache_clear()


@pytest.fixture
def storage(proxy: FaultyProxy) -> FsspecStorage:
    return FsspecStorage("hf", QUICK)


def test_a_name_that_the_network_does_not_find_now_is_asked_for_again(
    storage: FsspecStorage, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put(DATA, "a.csv", SMALL)
    find, num_asked = socket.getaddrinfo, itertools.count()

    def find_later(*arguments: Any, **named: Any) -> Any:
        if next(num_asked) < 3:  # huggingface_hub may ask first, for something else
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return find(*arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", find_later)
    assert storage.stat(f"{URL}/a.csv").size_bytes == len(SMALL)


def test_files_and_directories_are_listed_page_by_page_and_read_by_range(storage: FsspecStorage, hub: Hub) -> None:
    names = ["a.csv", "b c.csv", "d/e.csv", "d/f/g.csv", "large.bin", "z.csv"]
    for name in names:
        hub.put(DATA, name, LARGE if name == "large.bin" else SMALL + name.encode())
    assert len(LARGE) > LARGE_BYTES
    listed = storage.list(URL)
    assert [(one.url.removeprefix(f"{URL}/"), one.size_bytes, one.is_directory) for one in listed] == [
        ("a.csv", len(SMALL) + 5, False),
        ("b c.csv", len(SMALL) + 7, False),
        ("d", 0, True),
        ("large.bin", len(LARGE), False),
        ("z.csv", len(SMALL) + 5, False),
    ]
    assert [storage.stat(one.url) for one in listed] == listed
    assert [one.url for one in storage.list(f"{URL}/d")] == [f"{URL}/d/e.csv", f"{URL}/d/f"]
    assert storage.list(f"{URL}/none") == []
    assert storage.stat(URL).is_directory
    for status in listed:
        if not status.is_directory:
            whole = hub.repositories[DATA]["main"][status.url.removeprefix(f"{URL}/")]
            hub.requests.clear()
            assert storage.read(status.url, 10, 5000, status.etag) == whole[10:5000]
            leads_on = len(whole) > LARGE_BYTES
            assert [method for method, _, _ in hub.requests] == ["GET"] * (1 + leads_on)
            assert RemoteFile(status.url, storage).pread(10**9, 0) == whole
    with pytest.raises(StorageFileMissing, match="does not exist"):
        storage.stat(f"{URL}/none")
    with pytest.raises(StorageFileMissing, match="does not exist"):
        storage.read(f"{URL}/none", 0, 1)


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_a_file_that_is_replaced_has_another_etag_which_ends_a_read_of_the_old_one(
    storage: FsspecStorage, hub: Hub, content: bytes
) -> None:
    hub.put(DATA, "a", content)
    first = storage.stat(f"{URL}/a")
    hub.put(DATA, "a", content[::-1])
    assert storage.stat(f"{URL}/a").etag != first.etag
    with pytest.raises(StorageError, match="changed while the job reads it"):
        storage.read(first.url, 0, 10, first.etag)


def test_a_revision_is_read_as_it_was(storage: FsspecStorage, hub: Hub) -> None:
    hub.put(DATA, "a", b"new")
    hub.put(DATA, "a", b"old", revision="v1.0")
    hub.put(DATA, "0.parquet", b"converted", revision="refs/convert/parquet")
    hub.put("models/owner/model", "w", b"weights")
    for url, content in (
        (f"{URL}@v1.0/a", b"old"),
        (f"{URL}/a", b"new"),
        (f"{URL}@refs/convert/parquet/0.parquet", b"converted"),
        (f"{URL}@refs%2Fconvert%2Fparquet/0.parquet", b"converted"),
        ("hf://owner/model/w", b"weights"),
    ):
        (status,) = storage.list(url.rpartition("/")[0])
        assert (status.url, storage.read(status.url, 0, status.size_bytes, status.etag)) == (url, content)
    with pytest.raises(StorageFileMissing):
        storage.stat(f"{URL}@none/a")


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.CUT_OFF, Fault.TOO_SHORT, Fault.STALLED])
def test_a_request_that_is_refused_or_answered_in_part_is_sent_again(
    proxy: FaultyProxy, hub: Hub, fault: Fault
) -> None:
    storage = FsspecStorage("hf", RetryPolicy(0.5, 0.01, 0.1, 30.0))
    hub.put(DATA, "a", SMALL)
    proxy.once_each(fault, fault)
    assert storage.read(f"{URL}/a", 10, 5000) == SMALL[10:5000]
    refused = [3]

    def first(request: object) -> Fault | None:
        refused[0] -= 1
        return Fault.UNAVAILABLE if refused[0] >= 0 else None

    for verb in (storage.stat, storage.list):
        refused[0] = 3
        proxy.fault_of = first
        assert verb(URL if verb == storage.list else f"{URL}/a")
        assert refused[0] < 0


def test_a_private_repository_needs_the_token_of_the_environment(
    storage: FsspecStorage, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put(DATA, "a", SMALL)
    hub.private.add(DATA)
    with pytest.raises(StorageError, match="no permission") as caught:
        storage.stat(f"{URL}/a")
    assert "--envs" in caught.value.hint
    with pytest.raises(StorageError, match="no permission"):
        storage.stat("hf://datasets/owner/none/a")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert storage.read(f"{URL}/a", 0, 10) == SMALL[:10]


@pytest.mark.parametrize("url", ["hf://owner", "hf://datasets/owner", "hf://buckets/owner/name/a"])
def test_a_url_without_a_repository_is_refused(storage: FsspecStorage, url: str) -> None:
    with pytest.raises(StorageError, match="names no repository of the Hub"):
        storage.stat(url)


def test_nothing_is_written_to_the_hub(storage: FsspecStorage) -> None:
    flags = {"job_name": "p", "runtime": "local", "model_def": "m.model", "training_data": f"{URL}/train"}
    assert JobSpec.from_flags("train", flags)
    for name in ("output", "checkpoint_dir", "job_dir", "bad_records_dir", "tensorboard_log_dir"):
        with pytest.raises(FlagError, match=r"takes commits.*not files"):
            JobSpec.from_flags("train", {**flags, name: "hf://owner/model"})
    with pytest.raises(StorageError, match="cannot be written"):
        storage.publish(f"{URL}/a", b"a")


def published(hub: Hub, directory: Path, below: str = "") -> str:
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        hub.put(DATA, f"{below}{path.name}", path.read_bytes())
    return f"{URL}/{below}".rstrip("/")


def test_readers_give_the_records_of_a_directory_and_keep_an_index_for_each_content(
    proxy: FaultyProxy, hub: Hub, tmp_path: Path
) -> None:
    for write, name in ((typed.write_parquet, "a.parquet"), (typed.write_jsonl, "a.jsonl")):
        directory = tmp_path / name
        directory.mkdir()
        for count in (310, 120):  # replaced
            write(directory / name, typed.rows(count))
            url = published(hub, directory, f"{name}/")
            reader, local = create_reader(url), create_reader(str(directory))
            (shard,) = reader.shards()
            assert (shard.end, local.shards()[0].end) == (count, count)
            wanted = list(local.read(Shard(local.shards()[0].name, 7, 100)))
            assert list(reader.read(Shard(shard.name, 7, 100))) == wanted
            hub.requests.clear()
            again = create_reader(url)
            again.shards()
            assert list(again.read(Shard(shard.name, 7, 100))) == wanted
            read = sum(1 for method, _, asked in hub.requests if method == "GET" and asked)
            assert read <= 4  # the index takes no pass over the file
    assert [path.suffix for path in (tmp_path / "cache" / "elasticdl" / "index").iterdir()].count(".npz") >= 2


@pytest.mark.timeout(300)
def test_a_whole_job_reads_its_data_from_the_hub_while_requests_fail(
    proxy: FaultyProxy, hub: Hub, tmp_path: Path
) -> None:
    data = NUMPY_DIGITS.make_data(tmp_path)
    number = [0]

    def fault_of(request: object) -> Fault | None:
        number[0] += 1
        return Fault.UNAVAILABLE if number[0] % 7 == 3 else None

    proxy.fault_of = fault_of
    job = NUMPY_DIGITS.local_job(tmp_path / "job", data, job_name="numpy", num_epochs=2)
    job.flags |= {"training_data": published(hub, data / "train", "train/"), "validation_data": ""}
    assert isinstance(job, LocalJob)
    job.start()
    job.hurry()
    assert job.wait() == 0, job.story()
    assert [(one.records, one.committed, one.repeated, one.lost) for one in coverage_of(job)] == [
        (NUMPY_DIGITS.num_train, NUMPY_DIGITS.num_train, 0, 0)
    ] * 2, job.story()


def write_csv(directory: Path) -> str:
    """The rows of `write_parquet`, with a header in each file."""
    for path in Path(write_parquet(directory)).parent.glob("*.parquet"):
        csv.write_csv(pq.read_table(path), path.with_suffix(".csv"))
        path.unlink()
    return str(directory / "*.csv")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("write", [write_csv, pytest.param(write_parquet, marks=pytest.mark.full)])
def test_a_whole_job_trains_on_a_table_of_the_hub(
    proxy: FaultyProxy, hub: Hub, tmp_path: Path, write: Callable[[Path], str]
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "data").mkdir()
    pattern = Path(write(tmp_path / "data")).name
    url = published(hub, tmp_path / "data", "tables/")
    hub.private.add(DATA)
    flags = {"distribution_strategy": "AllReduceStrategy", "num_workers": 1}
    job = table_job(tmp_path, TORCH, f"{url}/{pattern}", **flags)
    job.environment = {"HF_TOKEN": TOKEN}
    assert_exact_and_good(job.start())
    assert TOKEN not in "".join(path.read_text(errors="replace") for path in job.job_dir.rglob("*.log"))
