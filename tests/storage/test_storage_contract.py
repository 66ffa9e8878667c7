"""The six verbs over a real server of S3, and one of HTTP, whose answers are refused, cut off or late."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import boto3
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.data.files import LocalFile
from elasticdl.storage.fsspec_storage import FsspecStorage, RetryPolicy, storage_of
from elasticdl.storage.port import FileStatus, Storage
from elasticdl.storage.remote_file import PART_BYTES, RemoteFile, equal_parts
from elasticdl_client.errors import StorageError, StorageFileMissing
from tests.storage.conftest import SECRET
from tests.storage.faulty_proxy import Fault, FaultyProxy, Request

QUICK = RetryPolicy(request_s=3.0, first_wait_s=0.01, longest_wait_s=0.1, total_s=60.0)
CONTENT = bytes(range(256)) * 40


@pytest.fixture
def storage(proxy: FaultyProxy) -> Storage:
    return FsspecStorage("s3", QUICK)


def url_of(tmp_path: Path, name: str) -> str:
    return f"s3://bucket/{tmp_path.name}/{name}"


def test_what_is_published_is_listed_read_by_range_replaced_and_deleted(storage: Storage, tmp_path: Path) -> None:
    directory, url = url_of(tmp_path, "d"), url_of(tmp_path, "d/a")
    assert storage.list(directory) == []
    assert not storage.exists(url)
    (tmp_path / "local").write_bytes(CONTENT)
    storage.publish(url, tmp_path / "local")
    storage.publish(url_of(tmp_path, "d/below/b"), b"b")
    first = storage.stat(url)
    assert (first.url, first.size_bytes, first.is_directory) == (url, len(CONTENT), False)
    assert storage.list(directory) == [first, FileStatus(url_of(tmp_path, "d/below"), 0, "", is_directory=True)]
    assert storage.stat(directory).is_directory
    assert storage.read(url, 100, 1000) == CONTENT[100:1000]
    assert storage.read(url, 5, 5) == b""
    storage.publish(url, CONTENT[::-1])
    assert storage.stat(url).etag != first.etag
    assert storage.read(url, 0, 10) == CONTENT[::-1][:10]
    storage.delete(url)
    storage.delete(url)
    assert not storage.exists(url)
    with pytest.raises(StorageFileMissing, match="does not exist"):
        storage.read(url, 0, 1)


def test_a_read_leaves_the_random_numbers_of_the_user_alone(storage: Storage, tmp_path: Path) -> None:
    """The next task is read while `feed` makes minibatches, whose randomness is seeded."""
    url = url_of(tmp_path, "a")
    storage.publish(url, CONTENT)
    random.seed(1)
    before = random.getstate()
    assert storage.read(url, 0, 10) == CONTENT[:10]
    assert random.getstate() == before


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.HELD])
def test_a_range_that_is_refused_or_comes_in_part_is_asked_for_again(
    storage: Storage, proxy: FaultyProxy, tmp_path: Path, fault: Fault
) -> None:
    url = url_of(tmp_path, "a")
    storage.publish(url, CONTENT)
    proxy.once_each(fault)
    assert storage.read(url, 10, 5000) == CONTENT[10:5000]
    assert [request.range for request in proxy.requests if request.method == "GET"] == ["bytes=10-4999"] * 2


def test_a_file_is_published_whole_although_its_first_requests_fail(
    storage: Storage, proxy: FaultyProxy, tmp_path: Path
) -> None:
    url = url_of(tmp_path, "a")
    proxy.once_each(Fault.UNAVAILABLE, Fault.UNAVAILABLE, method="PUT")
    storage.publish(url, CONTENT)
    assert storage.read(url, 0, len(CONTENT)) == CONTENT


def test_an_upload_takes_any_time_while_its_bytes_move(proxy: FaultyProxy, tmp_path: Path) -> None:
    storage = FsspecStorage("s3", RetryPolicy(request_s=6.0, first_wait_s=0.01, longest_wait_s=0.1, total_s=6.0))
    content = np.random.default_rng(1).bytes(34 << 20)
    (tmp_path / "large").write_bytes(content)
    (tmp_path / "small").write_bytes(content[: 31 << 20])
    proxy.upload_bytes_per_s = 4 << 20  # 8 s for the small one
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda name: storage.publish(url_of(tmp_path, name), tmp_path / name), ("large", "small")))
    proxy.upload_bytes_per_s = 0.0
    assert storage.read(url_of(tmp_path, "large"), 0, len(content)) == content
    assert storage.stat(url_of(tmp_path, "small")).size_bytes == 31 << 20
    assert [request.method for request in proxy.requests].count("PUT") == 3 + 1  # none was sent again


def test_a_slow_upload_that_is_refused_at_its_end_is_sent_again(proxy: FaultyProxy, tmp_path: Path) -> None:
    storage = FsspecStorage("s3", RetryPolicy(request_s=5.0, first_wait_s=0.01, longest_wait_s=0.1, total_s=1.5))
    (tmp_path / "a").write_bytes(bytes(16 << 20))
    proxy.upload_bytes_per_s = 6 << 20
    left = proxy.once_each(Fault.UNAVAILABLE, method="PUT")
    storage.publish(url_of(tmp_path, "a"), tmp_path / "a")
    assert not left
    assert [request.method for request in proxy.requests].count("PUT") == 2


def test_a_request_waits_no_longer_than_the_policys_time(proxy: FaultyProxy, tmp_path: Path) -> None:
    """It is sent again often where it is refused at once: without an end the next would wait for hours."""
    url = url_of(tmp_path, "a")
    storage = FsspecStorage("s3", RetryPolicy(request_s=0.5, first_wait_s=0.01, longest_wait_s=0.02, total_s=1.0))
    storage.publish(url, CONTENT)
    refused = itertools.count()
    proxy.fault_of = lambda request: Fault.UNAVAILABLE if next(refused) < 6 else Fault.HELD
    started = time.monotonic()
    with pytest.raises(StorageError, match="could not be reached"):
        storage.stat(url)
    assert time.monotonic() - started < 6.0


def test_a_part_that_fails_or_stalls_is_sent_again_alone(
    storage: Storage, proxy: FaultyProxy, tmp_path: Path, s3_port: int
) -> None:
    content = np.random.default_rng(1).bytes((34 << 20) + 1)
    (tmp_path / "large").write_bytes(content)
    left = proxy.once_each(Fault.UNAVAILABLE, Fault.HELD, method="PUT")
    storage.publish(url_of(tmp_path, "a"), tmp_path / "large")
    assert not left
    assert storage.read(url_of(tmp_path, "a"), 0, len(content)) == content
    assert [request.method for request in proxy.requests].count("PUT") == 3 + 2


def test_an_upload_that_does_not_move_is_given_up_and_leaves_no_parts(
    proxy: FaultyProxy, tmp_path: Path, s3_port: int
) -> None:
    storage = FsspecStorage("s3", RetryPolicy(request_s=0.5, first_wait_s=0.01, longest_wait_s=0.1, total_s=1.0))
    (tmp_path / "large").write_bytes(bytes(33 << 20))
    proxy.fault_of = lambda request: Fault.HELD if request.method == "PUT" else None
    with pytest.raises(StorageError, match="could not be reached"):
        storage.publish(url_of(tmp_path, "a"), tmp_path / "large")
    server = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3_port}")
    assert not server.list_multipart_uploads(Bucket="bucket").get("Uploads")


def test_an_upload_whose_last_answer_is_lost_is_complete(storage: Storage, proxy: FaultyProxy, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(33 << 20))
    completions = itertools.count()
    proxy.fault_of = lambda request: (
        Fault.LOST if request.method == "POST" and "uploadId" in request.path and not next(completions) else None
    )
    storage.publish(url_of(tmp_path, "a"), tmp_path / "large")
    assert next(completions) == 2
    assert storage.stat(url_of(tmp_path, "a")).size_bytes == 33 << 20


def test_storage_that_stays_away_is_an_error_after_the_policys_time(
    proxy: FaultyProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.fault_of = lambda request: Fault.UNAVAILABLE
    storage = FsspecStorage("s3", RetryPolicy(10.0, 0.2, 0.4, 3.0))
    with (
        caplog.at_level(logging.DEBUG, "elasticdl"),
        pytest.raises(StorageError, match="could not be reached") as caught,
    ):
        storage.read(url_of(tmp_path, "a"), 0, 1)
    assert "asking again" in caplog.text
    assert SECRET not in caplog.text + str(caught.value)


def test_an_endpoint_that_nothing_serves_is_named_as_not_reached(
    proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StorageError, match="could not be reached"):
        FsspecStorage("s3", RetryPolicy(10.0, 0.01, 0.02, 0.1)).stat(url_of(tmp_path, "a"))


def test_without_credentials_the_error_says_where_they_come_from(
    proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StorageError) as caught:
        FsspecStorage("s3", QUICK).publish(url_of(tmp_path, "a"), b"x")
    assert "--envs" in caught.value.hint
    assert not any(request.method == "PUT" for request in proxy.requests)


def test_a_url_with_a_credential_in_it_is_refused_without_showing_it() -> None:
    with pytest.raises(StorageError) as caught:
        storage_of("https://host/a.csv?X-Amz-Signature=abc123")
    assert "abc123" not in str(caught.value)


def test_a_large_file_is_read_in_parts_at_once_and_near_ranges_in_one_request(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    content = b"".join(i.to_bytes(4, "little") for i in range((2 * PART_BYTES + 1000) // 4))
    storage, url = FsspecStorage("s3", QUICK), url_of(tmp_path, "large")
    storage.publish(url, content)
    file = RemoteFile(url, storage)
    proxy.once_each(Fault.UNAVAILABLE, Fault.TOO_SHORT)
    proxy.requests.clear()
    assert file.pread(len(content) + 5, 0) == content
    assert len({request.range for request in proxy.requests}) == 2  # of equal size
    proxy.requests.clear()
    ranges = [(0, 10), (10, 0), (20, 10), (1000, 50), (2 * PART_BYTES, 5000)]
    assert file.pread_all(ranges) == [content[offset : offset + size] for offset, size in ranges]
    assert len(proxy.requests) == 2
    proxy.requests.clear()
    with file.scan() as stream:
        assert stream.read(100) + stream.read() == content
        stream.seek(-7, 2)
        assert stream.read() == content[-7:]
    assert len(proxy.requests) <= 5


@st.composite
def ascending_ranges(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Ranges, (offset, size), that touch, are near or far, and are far below, about or above the size of a part."""
    gap, size = st.sampled_from([0, 0, 0, 1, 5000, 1 << 20]), st.integers(0, 6000)
    large = st.integers(PART_BYTES // 2 - 1, PART_BYTES + 9)
    steps = draw(st.lists(st.tuples(gap, st.one_of(size, size, large)), min_size=1, max_size=8))
    ends = list(itertools.accumulate(gap + size for gap, size in steps))
    return [(end - size, size) for end, (_, size) in zip(ends, steps, strict=True)]


@given(ranges=ascending_ranges(), lacking=st.sampled_from([0, 1, 5000, PART_BYTES]))
@settings(max_examples=40)
def test_ranges_that_are_read_together_are_the_slices_of_the_file(ranges: list[tuple[int, int]], lacking: int) -> None:
    """Of a file whose end the last ranges reach, or lie beyond."""
    size_bytes = max(0, sum(ranges[-1]) - lacking)
    content = np.arange(size_bytes // 4 + 1, dtype=np.uint32).view(np.uint8)[:size_bytes]
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        found = LocalFile(file.name).pread_all(ranges)
    assert [view.tobytes() for view in found] == [content[o : o + size].tobytes() for o, size in ranges]


@given(start=st.integers(0, 10**9), size=st.integers(0, 12 * PART_BYTES))
def test_a_range_is_cut_into_equal_parts_without_a_short_one(start: int, size: int) -> None:
    parts = equal_parts(start, start + size)
    assert [(parts[0][0], parts[-1][1])] == [(start, start + size)]
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(parts))
    sizes = [end - begin for begin, end in parts]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= PART_BYTES * 3 / 2
    assert len(parts) == 1 or min(sizes) >= PART_BYTES * 3 // 4


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class Quiet(SimpleHTTPRequestHandler):
    """A server of whole files, without ranges."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_server_without_ranges_is_refused_and_a_missing_file_named(web: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(CONTENT)
    storage = FsspecStorage("http", QUICK)
    assert storage.stat(f"{web}/a.csv").size_bytes == len(CONTENT)
    with pytest.raises(StorageError, match="gives no ranges"):
        storage.read(f"{web}/a.csv", 10, 20)
    with pytest.raises(StorageFileMissing):
        storage.stat(f"{web}/b.csv")
    with pytest.raises(StorageError, match="no directories"):
        storage.list(web)
    with pytest.raises(StorageError, match="cannot be written"):
        storage.publish(f"{web}/a.csv", b"")


def test_a_server_without_ranges_is_refused_before_it_sends_the_file(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_bytes(CONTENT)
    monkeypatch.setattr(Quiet, "copyfile", lambda *_: None)  # its answers have no body
    storage = FsspecStorage("http", QUICK)
    for start, etag in ((0, ""), (10, ""), (10, storage.stat(f"{web}/a.csv").etag)):
        with pytest.raises(StorageError, match="gives no ranges"):
            storage.read(f"{web}/a.csv", start, 20, etag)


def test_an_http_server_that_is_away_for_a_while_is_asked_again(proxy: FaultyProxy, tmp_path: Path) -> None:
    s3 = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{proxy.target}")
    s3.put_object(Bucket="bucket", Key=f"{tmp_path.name}/a", Body=CONTENT, ACL="public-read")
    url = f"http://127.0.0.1:{proxy.port}/bucket/{tmp_path.name}/a"
    refused = [3]

    def fault_of(request: Request) -> Fault | None:
        refused[0] -= 1
        return Fault.UNAVAILABLE if refused[0] >= 0 else None

    proxy.fault_of = fault_of
    storage = FsspecStorage("http", QUICK)
    assert storage.stat(url).size_bytes == len(CONTENT)
    for fault in (Fault.CUT_OFF, Fault.TOO_SHORT):
        proxy.once_each(fault)
        assert storage.read(url, 7, 700) == CONTENT[7:700]
