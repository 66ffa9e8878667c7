"""The clients of OSS and HDFS beyond the contract that all kinds of storage keep."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticdl.storage.fsspec_storage import FsspecStorage, RetryPolicy
from elasticdl_client.errors import StorageError, StorageFileMissing
from tests.storage import emulators

QUICK = RetryPolicy(request_s=10.0, first_wait_s=0.01, longest_wait_s=0.1, total_s=2.0)


def storage_at(
    emulator: AbstractContextManager[Mapping[str, str]], scheme: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FsspecStorage]:
    with emulator as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield FsspecStorage(scheme, QUICK)


@pytest.fixture
def oss(monkeypatch: pytest.MonkeyPatch) -> Iterator[FsspecStorage]:
    yield from storage_at(emulators.alibaba(), "oss", monkeypatch)


@pytest.fixture
def hdfs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FsspecStorage]:
    yield from storage_at(emulators.hadoop(), "hdfs", monkeypatch)


def test_a_large_file_is_uploaded_to_oss_in_parts(oss: FsspecStorage, tmp_path: Path) -> None:
    content = np.random.default_rng(1).bytes((36 << 20) + 7)
    (tmp_path / "large").write_bytes(content)
    oss.publish("oss://bucket/large", tmp_path / "large")
    status = oss.stat("oss://bucket/large")
    assert status.etag.endswith("-3")
    assert oss.read(status.url, 0, len(content), status.etag) == content
    with pytest.raises(StorageError, match="changed while the job reads it"):
        oss.read(status.url, 0, 1, "another")


class PanicException(BaseException):
    """As that of PyO3, by which errors of Rust that nothing has caught come to Python."""


class PanickingClient:
    """Of hdfs-native; its first request finds no NameNode."""

    def __init__(self, root: str) -> None:
        self.num_asked = 0

    async def get_file_info(self, path: str) -> Any:
        self.num_asked += 1
        if self.num_asked == 1:
            raise PanicException("there is no reactor running")
        raise FileNotFoundError(path)


def test_a_name_node_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hdfs_native = pytest.importorskip("hdfs_native", reason="needs hdfs-native")
    with pytest.raises(StorageError, match="could not be reached"):
        FsspecStorage("hdfs", QUICK).stat("hdfs://127.0.0.1:1/d")
    monkeypatch.setattr(hdfs_native, "AsyncClient", PanickingClient)
    with pytest.raises(StorageFileMissing):
        FsspecStorage("hdfs", QUICK).stat("hdfs://name-node/d")


@pytest.mark.timeout(30)
def test_a_write_to_a_name_node_that_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hdfs_native", reason="needs hdfs-native")
    monkeypatch.setattr("elasticdl.storage.hdfs_client._CLEANUP_S", 0.5)
    storage = FsspecStorage("hdfs", RetryPolicy(request_s=0.5, first_wait_s=0.01, longest_wait_s=0.1, total_s=1.0))
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StorageError, match="could not be reached"):
        storage.publish(f"hdfs://127.0.0.1:{silent.getsockname()[1]}/d/a", b"0123")


def test_oss_without_an_endpoint_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("oss2", reason="needs oss2")
    monkeypatch.delenv("OSS_ENDPOINT", raising=False)
    monkeypatch.delenv("OSS_REGION", raising=False)
    with pytest.raises(StorageError) as caught:
        FsspecStorage("oss", QUICK)
    assert "OSS_ENDPOINT" in caught.value.hint


@pytest.mark.parametrize(
    ("endpoint", "region"),
    [
        ("https://oss-eu-central-1.aliyuncs.com", "eu-central-1"),
        ("oss-cn-hangzhou-internal.aliyuncs.com", "cn-hangzhou"),
        ("https://oss-accelerate.aliyuncs.com", ""),  # of all regions
        ("https://oss-accelerate-overseas.aliyuncs.com", ""),
    ],
)
def test_requests_are_signed_for_the_region_that_an_endpoint_of_oss_names(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, region: str
) -> None:
    pytest.importorskip("oss2", reason="needs oss2")
    from elasticdl.storage.oss_client import OssClient

    monkeypatch.setenv("OSS_ENDPOINT", endpoint)
    monkeypatch.delenv("OSS_REGION", raising=False)
    assert OssClient()._region == region


def test_hdfs_shows_whole_files_alone_and_says_in_a_line_what_it_refuses(
    hdfs: FsspecStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = tmp_path / "large"
    large.write_bytes(b"x" * (9 << 20))
    hdfs.publish("hdfs:///d/e/f", large)
    assert [one.url for one in hdfs.list("hdfs:///d/e")] == ["hdfs:///d/e/f"]  # nothing is left of the upload
    hdfs.publish("hdfs:///d/g", b"")
    hdfs.delete("hdfs:///d/e/f")
    assert [one.url for one in hdfs.list("hdfs:///d")] == ["hdfs:///d/g"]
    hdfs.delete("hdfs:///d/g")
    assert hdfs.stat("hdfs:///d").is_directory  # right below the root
    assert hdfs.list("hdfs:///d") == []
    monkeypatch.setenv("HADOOP_USER_NAME", "another")
    with pytest.raises(StorageError, match=r"no permission: Permission denied: user=another") as caught:
        FsspecStorage("hdfs", QUICK).publish("hdfs:///d/h", b"")
    assert "\n" not in caught.value.what
    assert "org.apache" not in caught.value.what
    with pytest.raises(StorageError, match="could not be reached"):
        hdfs.stat("hdfs://127.0.0.1:1/d")
