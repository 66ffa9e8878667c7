"""A server of S3, moto's, with a proxy in front of it, and the environment that names the proxy as the endpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from elasticdl.storage.fsspec_storage import storage_of_scheme
from tests.storage.faulty_proxy import FaultyProxy

SECRET = "only-the-environment-knows-this"


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """The port of the server itself."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else it logs each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="bucket")
        yield port
    server.stop()


@pytest.fixture
def proxy(
    s3_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultyProxy]:
    """The endpoint; nothing is left of earlier tests' indexes, neither in storage nor on this machine."""
    with FaultyProxy(s3_port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        storage_of_scheme.cache_clear()
        yield proxy
        storage_of_scheme.cache_clear()
