"""How the master reads what the user wants of a running job: from annotations, or from a file."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from elasticdl.cluster.kubernetes.api import ApiCalls
from elasticdl.master.environment import UserRequest
from elasticdl.master.kubernetes import environment
from elasticdl.master.kubernetes.environment import RequestWatch
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api_client import ApiClient, of_configuration
from tests.master.life import open_environment

LIMIT_S = 30.0


class OneConfigMap:
    """An API server that has one ConfigMap, and sends its watches what `say` says.

    Attributes:
        annotations: of it.
        watches: the query of each watch.
        num_failures: of the next watches, which are answered with 503.
    """

    def __init__(self) -> None:
        self.annotations: dict[str, str] = {}
        self.watches: list[str] = []
        self.num_failures = 0
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                script.watches.append(self.path)
                if script.num_failures:
                    script.num_failures -= 1
                    self.send_response(503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                too_old = "resourceVersion=" in self.path  # of an object that was not changed for long
                line: dict[str, Any] | None = {"type": "ERROR" if too_old else "ADDED", "object": script.found()}
                while line is not None:
                    data = json.dumps(line).encode() + b"\n"
                    self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                    line = script._lines.get()
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, *_: object) -> None:
                """Tests look at what comes of it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def found(self) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": "7", "annotations": self.annotations | {"other": "9"}}}

    def ask(self, text: str) -> None:
        """Request this number of workers from now on."""
        self.annotations = {names.NUM_WORKERS_ANNOTATION: text} if text else {}

    def say(self, kind: str) -> None:
        """Send the object as it is to a watch."""
        self._lines.put({"type": kind, "object": self.found()})

    def end_stream(self) -> None:
        self._lines.put(None)

    def watch(self) -> RequestWatch:
        configuration = client.Configuration()
        configuration.host = f"http://127.0.0.1:{self._server.server_address[1]}"
        return RequestWatch(ApiClient(of_configuration(configuration)), "team", "j", ApiCalls())

    def close(self) -> None:
        self.end_stream()
        self._server.shutdown()
        self._server.server_close()


class Reader:
    """Reads what is wanted, in a thread of its own."""

    def __init__(self, requests: Iterator[UserRequest]) -> None:
        self._found: queue.Queue[UserRequest] = queue.Queue()
        self.thread = threading.Thread(target=self._read, args=(requests,), daemon=True)
        self.thread.start()

    def _read(self, requests: Iterator[UserRequest]) -> None:
        for request in requests:
            self._found.put(request)

    def next(self) -> UserRequest:
        return self._found.get(timeout=LIMIT_S)

    def has_more(self) -> bool:
        return not self._found.empty()


@pytest.fixture
def server() -> Iterator[OneConfigMap]:
    found = OneConfigMap()
    yield found
    found.close()


def test_the_annotations_are_read_and_each_change_of_them_comes_at_once(server: OneConfigMap) -> None:
    server.ask("4")
    watch = server.watch()
    reader = Reader(watch.requests(threading.Event()))
    assert reader.next() == UserRequest("4")
    for text in ("4", "", "many"):  # the same, none, another
        server.ask(text)
        server.say("MODIFIED")
    assert [reader.next(), reader.next()] == [UserRequest(), UserRequest("many")]
    server.annotations[names.STOP_ANNOTATION] = "true"
    server.say("MODIFIED")
    assert reader.next() == UserRequest("many", is_stop=True)
    assert len(server.watches) == 1
    assert "fieldSelector=metadata.name%3Delasticdl-j" in server.watches[0]
    watch.close()
    reader.thread.join(LIMIT_S)
    assert not reader.thread.is_alive()
    assert not reader.has_more()


@pytest.mark.parametrize("end", ["ended", "expired"])
def test_what_changes_between_two_streams_comes_with_the_next(server: OneConfigMap, end: str) -> None:
    watch = server.watch()
    reader = Reader(watch.requests(threading.Event()))
    server.ask("2")
    server.say("MODIFIED")
    assert reader.next() == UserRequest("2")
    server.ask("5")
    if end == "expired":
        server.say("ERROR")
    server.end_stream()
    assert reader.next() == UserRequest("5")
    assert len(server.watches) == 2
    watch.close()


def test_streams_that_end_at_once_are_opened_again_later_and_later(
    server: OneConfigMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_LASTING_S", LIMIT_S)  # a busy machine may take long over a stream
    watch, began_at = server.watch(), time.monotonic()
    server.end_stream()
    server.end_stream()
    server.ask("9")
    server.say("MODIFIED")  # in the third stream
    server.ask("3")
    reader = Reader(watch.requests(threading.Event()))
    assert [reader.next(), reader.next()] == [UserRequest("3"), UserRequest("9")]
    assert time.monotonic() - began_at >= 0.5 + 1.0
    watch.close()


def test_a_server_that_takes_long_to_answer_with_an_error_is_asked_later_and_later(
    server: OneConfigMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_LASTING_S", 0.0)  # each answer comes later than that
    watch, began_at = server.watch(), time.monotonic()
    server.num_failures = 2
    server.ask("9")
    reader = Reader(watch.requests(threading.Event()))
    assert reader.next() == UserRequest("9")
    assert time.monotonic() - began_at >= 0.5 + 1.0
    watch.close()


def test_the_file_of_a_local_job_is_read_and_each_change_of_it(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(JobSpec(job_name="j").to_json())
    place, stop = open_environment(tmp_path, 0), threading.Event()
    reader = Reader(place.requests(stop))
    path = tmp_path / "num_workers"
    for text in ("4", "many", "2"):
        path.write_text(text)
        assert reader.next() == UserRequest(text)
    path.unlink()
    path.write_text("3")
    assert reader.next() == UserRequest("3")
    stop.set()
    reader.thread.join(LIMIT_S)
    assert not reader.thread.is_alive()
    place.close()
