"""A watch whose stream the server, or a proxy before it, ends at once."""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kubernetes import client

from elasticdl.cluster.kubernetes import watch
from elasticdl.cluster.kubernetes.adapter import KubernetesCluster
from elasticdl_client.kubernetes.api_client import ApiClient, of_configuration

LIMIT_S = 60.0


class EndingStreams:
    """An API server without pods that ends each watch at once.

    Attributes:
        opened: the times at which watches began.
    """

    def __init__(self) -> None:
        self.opened: queue.SimpleQueue[float] = queue.SimpleQueue()
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if "watch=1" in self.path:
                    script.opened.put(time.monotonic())
                is_list = "watch=1" not in self.path
                body = json.dumps({"items": [], "metadata": {"resourceVersion": "7"}}).encode() if is_list else b""
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Tests look at what comes of it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def cluster(self) -> KubernetesCluster:
        configuration = client.Configuration()
        configuration.host = f"http://127.0.0.1:{self._server.server_address[1]}"
        return KubernetesCluster("team", "j", lambda spec: {}, ApiClient(of_configuration(configuration)))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[EndingStreams]:
    found = EndingStreams()
    yield found
    found.close()


def test_streams_that_end_at_once_are_opened_again_later_and_later(
    server: EndingStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_LASTING_S", LIMIT_S)  # a busy machine may take long over a stream
    cluster = server.cluster()
    threading.Thread(target=lambda: list(cluster.watch()), daemon=True).start()
    opened = [server.opened.get(timeout=LIMIT_S) for _ in range(5)]
    pauses = [after - before for before, after in itertools.pairwise(opened)]
    assert all(pause >= 0.2 * 2**number for number, pause in enumerate(pauses)), pauses
    cluster.close()
