"""An HTTP server that takes posts, for tests of --on_end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class Receiver:
    """Its first answers, then 200.

    Attributes:
        url: with a path that is secret.
        posts: the path, the headers and the body of each request.
        holds: while it is set, answers wait for `go`.
    """

    url: str
    answers: list[int]
    posts: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    holds: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)


@contextmanager
def receiving(*answers: int) -> Iterator[Receiver]:
    """A receiver that answers with these codes first."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.posts.append((self.path, dict(self.headers), body))
            code = found.answers.pop(0) if found.answers else 200
            found.arrived.release()
            if found.holds.is_set():
                found.go.wait(60)
            try:
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()
            except OSError:
                """The sender is gone."""

        def do_GET(self) -> None:
            raise AssertionError("a redirect was followed")

        def log_message(self, *_: object) -> None:
            """Tests look at the posts."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Receiver(f"http://127.0.0.1:{server.server_address[1]}/services/s3cr3t", list(answers))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield found
    finally:
        found.go.set()
        server.shutdown()
        server.server_close()
