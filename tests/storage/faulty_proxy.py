"""A proxy in front of an HTTP server that answers as asked: refuses, cuts bodies off, or stalls."""

from __future__ import annotations

import enum
import http.client
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

_SLOW_BUFFER_BYTES = 64 << 10  # of a slow connection, at this end
_TRICKLE_S = 0.1  # between two bytes; much less than a client waits for anything


class Fault(enum.Enum):
    """A fault of an answer."""

    UNAVAILABLE = "503"
    CUT_OFF = "the connection ends in the middle of the body"
    TOO_SHORT = "half of the body, and a length that says it is all"
    HELD = "the request is not passed on until the proxy is closed, and then dropped"
    LOST = "the server does as asked, and its answer does not come: the connection ends"
    STALLED = "nothing comes after half of the body until the proxy is closed"
    TRICKLING = "the second half of the body comes by a byte at a time"


@dataclass(frozen=True)
class Request:
    """A request of a client; `range` is empty for whole files."""

    method: str
    path: str
    range: str


@dataclass
class FaultyProxy:
    """Forwards to a port of this machine.

    Attributes:
        target: the port.
        fault_of: asked of each request; None: it is answered as the server does.
        requests: all of them, in order.
        held: set once a request is held.
        address: that it listens on.
        upload_bytes_per_s: at which it takes each body; 0: as fast as it can.
        announces_close: it says of each answer that the connection ends after it.
    """

    target: int
    fault_of: Callable[[Request], Fault | None] = lambda request: None
    requests: list[Request] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    address: str = "127.0.0.1"
    upload_bytes_per_s: float = 0.0
    announces_close: bool = False

    def __post_init__(self) -> None:
        self._closing = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except ConnectionError:  # the client has gone: it waited too long, or has got enough
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                pass

            def _answer(self) -> None:
                proxy.answer(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815  as http.server names them

        self._server = ThreadingHTTPServer((self.address, 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def once_each(self, *faults: Fault, method: str = "GET") -> list[Fault]:
        """The next requests of a method that ask for a range get these faults, one each.

        Returns:
            Those that no request has got yet, from now on.
        """
        left, lock = list(faults), threading.Lock()

        def fault_of(request: Request) -> Fault | None:
            with lock:
                return left.pop(0) if left and request.method == method and (request.range or method != "GET") else None

        self.fault_of = fault_of
        return left

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answers one request."""
        request = Request(handler.command, handler.path, handler.headers.get("Range", ""))
        body = self._body(handler)
        self.requests.append(request)
        fault = self.fault_of(request)
        if fault is Fault.HELD:
            self.held.set()
            self._closing.wait()
            handler.close_connection = True
            return
        if fault is Fault.UNAVAILABLE:
            handler.send_response(503, "Slow Down")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        server = http.client.HTTPConnection("127.0.0.1", self.target)
        headers = {name: value for name, value in handler.headers.items() if name.lower() != "connection"}
        server.request(request.method, request.path, body, headers)
        answer = server.getresponse()
        content = answer.read()
        server.close()
        if fault is Fault.LOST:
            handler.close_connection = True
            return
        sent = content if fault is None else content[: len(content) // 2]
        length = answer.headers["Content-Length"] if handler.command == "HEAD" else str(len(content))
        handler.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(sent)) if fault is Fault.TOO_SHORT else length)
        if self.announces_close:
            handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(sent)
        handler.wfile.flush()
        if fault is Fault.STALLED:
            self._closing.wait()
        if fault is Fault.TRICKLING:
            for position in range(len(sent), len(content)):
                if self._closing.wait(_TRICKLE_S):
                    break
                handler.wfile.write(content[position : position + 1])
                handler.wfile.flush()
        handler.close_connection = fault is not None

    def _body(self, handler: BaseHTTPRequestHandler) -> bytes:
        size = int(handler.headers.get("Content-Length", 0))
        if not self.upload_bytes_per_s:
            return handler.rfile.read(size)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)
        pieces = []
        while size:
            pieces.append(handler.rfile.read(min(size, _SLOW_BUFFER_BYTES)))
            size -= len(pieces[-1])
            if not pieces[-1] or self._closing.wait(len(pieces[-1]) / self.upload_bytes_per_s):
                raise ConnectionAbortedError
        return b"".join(pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
