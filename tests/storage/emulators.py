"""Servers of Google Cloud Storage, Azure's blobs, OSS and HDFS on this machine, and the environment that names them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from elasticdl.rpc.addresses import free_ports

_HOST = "127.0.0.1"
# The account that every Azurite has, and that Azure's documentation publishes.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextlib.contextmanager
def google() -> Iterator[dict[str, str]]:
    """A server with the bucket `bucket`; yields the variables that name it."""
    no_grpc = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"  # by which newer gcsfs ask for the kind of a bucket
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(no_grpc, "false")  # they read it when they are imported
        pytest.importorskip("gcsfs", reason="needs gcsfs")
    config = pytest.importorskip("fsspec.config", reason="needs gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="needs gcp-storage-emulator")
    emulator.server.HTTPServer = ThreadingHTTPServer  # a connection of a stopped client must not stop the others
    emulator.Router.handle = _one_at_a_time(emulator.Router.handle)  # its objects are not safe to use from threads
    (port,) = free_ports(_HOST, 1)
    server = emulator.create_server(_HOST, port, in_memory=True, default_bucket="bucket")
    server.start()
    try:
        # Older gcsfs ask an emulator's machine, too, for 15 s, whether it has credentials.
        no_credentials = {"FSSPEC_GS_TOKEN": "anon"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(config.conf, "gs", {"token": "anon"})  # fsspec has read the environment of this process
            yield {"STORAGE_EMULATOR_HOST": f"http://{_HOST}:{port}", no_grpc: "false", **no_credentials}
    finally:
        server.stop()


def _one_at_a_time(function: Callable[..., None]) -> Callable[..., None]:
    """Handle requests one after the other, each once it is there as a whole: a client may stop in its middle."""
    lock = threading.Lock()

    @functools.wraps(function)
    def locked(router: Any, *arguments: object) -> None:
        handler = router._request_handler
        received, sent = handler.rfile, handler.wfile
        body = _body(handler)
        if body is None:
            handler.close_connection = True
            return
        handler.rfile, handler.wfile = io.BytesIO(body), io.BytesIO()
        try:
            with lock:
                function(router, *arguments)
        finally:
            answer = handler.wfile.getvalue()
            handler.rfile, handler.wfile = received, sent
            sent.write(answer)

    return locked


def _body(handler: BaseHTTPRequestHandler) -> bytes | None:
    """The body of a request, chunks as they come; None: it breaks off."""
    read = handler.rfile
    if "chunked" not in handler.headers.get("Transfer-Encoding", ""):
        size_bytes = int(handler.headers.get("Content-Length") or 0)
        body = read.read(size_bytes)
        return body if len(body) == size_bytes else None
    body = b""
    while line := read.readline():
        size_bytes = int(line, 16)
        chunk = read.read(size_bytes)
        body += line + chunk + (end := read.readline())
        if len(chunk) < size_bytes or not end:
            return None
        if not size_bytes:
            return body
    return None


@contextlib.contextmanager
def azure() -> Iterator[dict[str, str]]:
    """A server with the container `bucket`; yields the variables that name it."""
    with _azurite("http") as connection:
        yield {"AZURE_STORAGE_CONNECTION_STRING": connection}


@contextlib.contextmanager
def azure_of_tokens(certificate: Path, key: Path) -> Iterator[dict[str, str]]:
    """The same, by TLS: it takes tokens of Entra that have not ended, by any signer."""
    with _azurite("https", "--oauth=basic", f"--cert={certificate}", f"--key={key}") as connection:
        host = connection.rpartition("https://")[2]
        hosts = {f"FSSPEC_{scheme}_ACCOUNT_HOST": host for scheme in ("AZ", "ABFS", "ABFSS")}
        yield {"AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT, **hosts}


@contextlib.contextmanager
def _azurite(protocol: str, *options: str) -> Iterator[str]:
    """A server with the container `bucket`; yields its connection string, the URL last."""
    pytest.importorskip("adlfs", reason="needs adlfs")
    from azure.storage.blob import BlobServiceClient

    program = shutil.which("azurite-blob", path=f"{sys.prefix}/node_modules/.bin:{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs azurite")
    (port,) = free_ports(_HOST, 1)
    argv = [program, f"--blobHost={_HOST}", f"--blobPort={port}", "--inMemoryPersistence", "--skipApiVersionCheck"]
    server = subprocess.Popen([*argv, "--disableTelemetry", *options], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        next(line for line in server.stdout if "successfully listens" in line)
        connection = ";".join(
            [
                f"DefaultEndpointsProtocol={protocol}",
                f"AccountName={_ACCOUNT}",
                f"AccountKey={_KEY}",
                f"BlobEndpoint={protocol}://{_HOST}:{port}/{_ACCOUNT}",
            ]
        )
        BlobServiceClient.from_connection_string(connection).create_container("bucket")
        yield connection
    finally:
        server.kill()
        server.communicate()


@contextlib.contextmanager
def alibaba() -> Iterator[dict[str, str]]:
    """A server of S3 that answers as OSS does, with the bucket `bucket`; yields the variables that name it."""
    oss2 = pytest.importorskip("oss2", reason="needs oss2")
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = make_server(_HOST, 0, _as_oss(DomainDispatcherApplication(create_backend_app)), threaded=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        endpoint = f"http://{_HOST}:{server.server_port}"
        oss2.Bucket(oss2.Auth("key", "secret"), endpoint, "bucket").create_bucket()
        yield {"OSS_ENDPOINT": endpoint, "OSS_ACCESS_KEY_ID": "key", "OSS_ACCESS_KEY_SECRET": "secret"}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_SIGNED = "AWS4-HMAC-SHA256 Credential=key/20000101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


def _as_oss(server: Callable[..., Iterable[bytes]]) -> Callable[..., list[bytes]]:
    """A server of S3 whose documents are those of OSS: without a name space, and with the type of each object."""

    def answer(
        environ: dict[str, object], start_response: Callable[[str, list[tuple[str, str]]], object]
    ) -> list[bytes]:
        environ["HTTP_AUTHORIZATION"] = _SIGNED  # moto takes parts of OSS's signature for the names of services
        begun: list[tuple[str, list[tuple[str, str]]]] = []
        body = b"".join(server(environ, lambda status, headers, *_: begun.append((status, headers))))
        ((status, headers),) = begun
        if dict(headers).get("Content-Type", "").endswith("/xml"):
            body = re.sub(rb' xmlns="http://s3[^"]*"', b"", body).replace(b"</ETag>", b"</ETag><Type>Normal</Type>")
            headers = [(name, value) for name, value in headers if name != "Content-Length"]
            headers.append(("Content-Length", str(len(body))))
        start_response(status, headers)
        return [body]

    return answer


_HDFS = {
    "dfs.replication": "1",
    "dfs.webhdfs.enabled": "false",
    "dfs.namenode.http-address": f"{_HOST}:0",
    "dfs.datanode.address": f"{_HOST}:0",
    "dfs.datanode.http.address": f"{_HOST}:0",
    "dfs.datanode.ipc.address": f"{_HOST}:0",
}


@contextlib.contextmanager
def hadoop() -> Iterator[dict[str, str]]:
    """A NameNode and a DataNode of HDFS, of the jars that pyspark brings; yields the variables that name it."""
    pytest.importorskip("hdfs_native", reason="needs hdfs-native")
    pyspark = importlib.util.find_spec("pyspark")
    if pyspark is None or pyspark.origin is None or shutil.which("java") is None:
        pytest.skip("needs pyspark and java")
    (port,) = free_ports(_HOST, 1)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        for pages in ("hdfs", "datanode"):
            (directory / "webapps" / pages).mkdir(parents=True)
        places = {
            "dfs.namenode.name.dir": f"file://{directory}/names",
            "dfs.datanode.data.dir": f"file://{directory}/blocks",
        }
        _write_settings(directory / "core-site.xml", {"fs.defaultFS": f"hdfs://{_HOST}:{port}"})
        _write_settings(directory / "hdfs-site.xml", _HDFS | places)
        (directory / "log4j.properties").write_text(
            "log4j.rootLogger=INFO,A\nlog4j.appender.A=org.apache.log4j.ConsoleAppender\n"
            "log4j.appender.A.layout=org.apache.log4j.SimpleLayout\n"
        )
        java = ["java", "-Xmx256m", "-Djava.net.preferIPv4Stack=true", f"-Dhadoop.log.dir={directory}"]
        java += [f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in ("lang", "util")]
        java += ["-cp", f"{directory}:{Path(pyspark.origin).parent}/jars/*"]
        servers = "org.apache.hadoop.hdfs.server"
        of_names = [*java, f"{servers}.namenode.NameNode"]
        subprocess.run([*of_names, "-format", "-nonInteractive"], check=True, capture_output=True)
        _start(stack, of_names, "IPC Server listener on", directory)
        _start(stack, [*java, f"{servers}.datanode.DataNode"], "successfully registered with NN", directory)
        yield {"HADOOP_CONF_DIR": name}


def _write_settings(path: Path, settings: Mapping[str, str]) -> None:
    rows = (f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items())
    path.write_text(f"<configuration>{''.join(rows)}</configuration>")


def _start(stack: contextlib.ExitStack, argv: list[str], ready: str, directory: Path) -> None:
    """Start a server that the stack ends, and wait for a line of its log."""
    server = subprocess.Popen(argv, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = server.stdout
    assert output is not None
    stack.enter_context(output)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(
        target=lambda: [lines.put(line) for line in itertools.chain(output, [""])]
    )  # it must not wait to write
    stack.callback(reader.join)
    stack.callback(server.wait)
    stack.callback(server.kill)
    reader.start()
    seen = []
    while ready not in (line := lines.get()):
        assert line, "".join(seen[-20:])
        seen.append(line)
