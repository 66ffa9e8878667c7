"""How the master reads the number of workers that the user wants: from an annotation, or from a file."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from elasticdl.cluster.kubernetes.api import ApiCalls
from elasticdl.master.kubernetes.environment import ScaleWatch
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import names
from tests.master.life import open_environment

LIMIT_S = 30.0


class OneConfigMap:
    """An API server that has one ConfigMap, and sends its watches what `say` says.

    Attributes:
        text: of the annotation; empty: there is none.
        reads: how often the object was read.
        watches: the query of each watch.
    """

    def __init__(self) -> None:
        self.text = ""
        self.reads = 0
        self.watches: list[str] = []
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if "watch=1" in self.path:
                    script.watches.append(self.path)
                    self._stream()
                    return
                script.reads += 1
                body = json.dumps(script.found()).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _stream(self) -> None:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while (line := script._lines.get()) is not None:
                    data = json.dumps(line).encode() + b"\n"
                    self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, *_: object) -> None:
                """Tests look at what comes of it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def found(self) -> dict[str, Any]:
        annotations = {names.NUM_WORKERS_ANNOTATION: self.text} if self.text else {}
        return {"metadata": {"resourceVersion": "7", "annotations": annotations | {"other": "9"}}}

    def say(self, kind: str) -> None:
        """Send the object as it is to a watch."""
        self._lines.put({"type": kind, "object": self.found()})

    def end_stream(self) -> None:
        self._lines.put(None)

    def watch(self) -> ScaleWatch:
        configuration = client.Configuration()
        configuration.host = f"http://127.0.0.1:{self._server.server_address[1]}"
        return ScaleWatch(client.ApiClient(configuration), "team", "j", ApiCalls())

    def close(self) -> None:
        self.end_stream()
        self._server.shutdown()
        self._server.server_close()


class Reader:
    """Reads what is wanted, in a thread of its own."""

    def __init__(self, requests: Iterator[str]) -> None:
        self._found: queue.Queue[str] = queue.Queue()
        self.thread = threading.Thread(target=self._read, args=(requests,), daemon=True)
        self.thread.start()

    def _read(self, requests: Iterator[str]) -> None:
        for text in requests:
            self._found.put(text)

    def next(self) -> str:
        return self._found.get(timeout=LIMIT_S)

    def has_more(self) -> bool:
        return not self._found.empty()


@pytest.fixture
def server() -> Iterator[OneConfigMap]:
    found = OneConfigMap()
    yield found
    found.close()


def test_the_annotation_is_read_and_each_change_of_it_comes_at_once(server: OneConfigMap) -> None:
    server.text = "4"
    watch = server.watch()
    reader = Reader(watch.requests(threading.Event()))
    assert reader.next() == "4"
    for text in ("4", "", "6"):  # the same, none, another
        server.text = text
        server.say("MODIFIED")
    assert reader.next() == "6"
    server.text = "many"
    server.say("MODIFIED")
    assert reader.next() == "many"
    assert (server.reads, len(server.watches)) == (1, 1)
    assert "fieldSelector=metadata.name%3Delasticdl-j" in server.watches[0]
    assert "resourceVersion=7" in server.watches[0]
    watch.close()
    reader.thread.join(LIMIT_S)
    assert not reader.thread.is_alive()
    assert not reader.has_more()


@pytest.mark.parametrize("end", ["ended", "expired"])
def test_what_changes_between_two_streams_is_read_with_the_object(server: OneConfigMap, end: str) -> None:
    watch = server.watch()
    reader = Reader(watch.requests(threading.Event()))
    server.text = "2"
    server.say("MODIFIED")
    assert reader.next() == "2"
    server.text = "5"
    if end == "expired":
        server.say("ERROR")
    server.end_stream()
    assert reader.next() == "5"
    assert server.reads == 2
    watch.close()


def test_the_file_of_a_local_job_is_read_and_each_change_of_it(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(JobSpec(job_name="j").to_json())
    place, stop = open_environment(tmp_path, 0), threading.Event()
    reader = Reader(place.scale_requests(stop))
    path = tmp_path / "num_workers"
    for text in ("4", "many", "2"):
        path.write_text(text)
        assert reader.next() == text
    path.unlink()
    path.write_text("3")
    assert reader.next() == "3"
    stop.set()
    reader.thread.join(LIMIT_S)
    assert not reader.thread.is_alive()
    place.close()
