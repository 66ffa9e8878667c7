"""Servers of Google Cloud Storage and of Azure's blobs on this machine, and the environment that names them."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer

import pytest

from elasticdl.rpc.addresses import free_ports

_HOST = "127.0.0.1"
# The account that every Azurite has, and that Azure's documentation publishes.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextlib.contextmanager
def google() -> Iterator[dict[str, str]]:
    """A server with the bucket `bucket`; yields the variables that name it."""
    pytest.importorskip("gcsfs", reason="needs gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="needs gcp-storage-emulator")
    emulator.server.HTTPServer = ThreadingHTTPServer  # a connection of a stopped client must not stop the others
    emulator.Router.handle = _one_at_a_time(emulator.Router.handle)  # its objects are not safe to use from threads
    (port,) = free_ports(_HOST, 1)
    server = emulator.create_server(_HOST, port, in_memory=True, default_bucket="bucket")
    server.start()
    try:
        yield {"STORAGE_EMULATOR_HOST": f"http://{_HOST}:{port}"}
    finally:
        server.stop()


def _one_at_a_time(function: Callable[..., None]) -> Callable[..., None]:
    lock = threading.Lock()

    @functools.wraps(function)
    def locked(*arguments: object) -> None:
        with lock:
            function(*arguments)

    return locked


@contextlib.contextmanager
def azure() -> Iterator[dict[str, str]]:
    """A server with the container `bucket`; yields the variables that name it."""
    pytest.importorskip("adlfs", reason="needs adlfs")
    from azure.storage.blob import BlobServiceClient

    program = shutil.which("azurite-blob", path=f"{sys.prefix}/node_modules/.bin:{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs azurite")
    (port,) = free_ports(_HOST, 1)
    argv = [program, f"--blobHost={_HOST}", f"--blobPort={port}", "--inMemoryPersistence", "--skipApiVersionCheck"]
    server = subprocess.Popen([*argv, "--disableTelemetry"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        next(line for line in server.stdout if "successfully listens" in line)
        connection = ";".join(
            [
                "DefaultEndpointsProtocol=http",
                f"AccountName={_ACCOUNT}",
                f"AccountKey={_KEY}",
                f"BlobEndpoint=http://{_HOST}:{port}/{_ACCOUNT}",
            ]
        )
        BlobServiceClient.from_connection_string(connection).create_container("bucket")
        yield {"AZURE_STORAGE_CONNECTION_STRING": connection}
    finally:
        server.kill()
        server.communicate()
