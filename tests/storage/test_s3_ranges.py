"""Ranges of S3 are read with the settings that s3fs has, whatever gave them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from elasticdl.storage.fsspec_storage import FsspecStorage, RetryPolicy
from elasticdl.storage.s3_ranges import S3Ranges
from elasticdl_client.errors import StorageError
from tests.storage.faulty_proxy import Fault, FaultyProxy

CONTENT = bytes(range(256))


@pytest.mark.parametrize(
    "settings",
    [
        {"key": "key", "secret": "secret"},
        {"client_kwargs": {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}},
        {"key": "key", "secret": "secret", "requester_pays": True, "s3_additional_kwargs": {"ACL": "private"}},
        {"key": "key", "secret": "secret", "config_kwargs": {"connector_args": {}, "max_pool_connections": 2}},
    ],
)
def test_settings_of_s3fs_hold_without_those_of_the_environment(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    url = f"s3://bucket/{tmp_path.name}/a"
    FsspecStorage("s3").publish(url, CONTENT)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    endpoint = f"http://127.0.0.1:{proxy.port}"
    file_system = fsspec.filesystem("s3", endpoint_url=endpoint, skip_instance_cache=True, **settings)
    ranges = S3Ranges(file_system)
    assert ranges.read(url, start=10, end=100, timeout_s=10.0) == CONTENT[10:100]
    with pytest.raises(FileNotFoundError):
        ranges.read(url + "b", start=10, end=100, timeout_s=10.0)


def test_requests_are_anonymous_where_s3fs_sends_such(proxy: FaultyProxy, tmp_path: Path) -> None:
    url = f"s3://bucket/{tmp_path.name}/a"
    FsspecStorage("s3").publish(url, CONTENT)
    anonymous = S3Ranges(fsspec.filesystem("s3", anon=True, skip_instance_cache=True))
    with pytest.raises(PermissionError, match="Forbidden"):
        anonymous.read(url, start=10, end=100, timeout_s=10.0)


def test_an_answer_that_comes_too_slowly_is_ended_although_its_connection_ends_with_it(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    storage = FsspecStorage("s3", RetryPolicy(request_s=0.5, first_wait_s=0.01, longest_wait_s=0.1, total_s=20.0))
    url = f"s3://bucket/{tmp_path.name}/a"
    storage.publish(url, CONTENT)
    proxy.announces_close = True
    proxy.once_each(Fault.TRICKLING)
    started = time.monotonic()
    assert storage.read(url, 0, 256) == CONTENT
    assert time.monotonic() - started < 8.0  # all of the bytes take 13 s
    assert [request.method for request in proxy.requests].count("GET") == 2


def test_a_forked_process_does_not_read_from_the_connections_of_its_parent(proxy: FaultyProxy, tmp_path: Path) -> None:
    storage, url = FsspecStorage("s3"), f"s3://bucket/{tmp_path.name}/a"
    storage.publish(url, CONTENT)
    assert storage.read(url, 0, 10) == CONTENT[:10]
    child = os.fork()
    if not child:
        try:
            storage.read(url, 10, 20)
        except StorageError as error:
            os._exit(0 if "fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert storage.read(url, 20, 30) == CONTENT[20:30]
