"""A TCP proxy in front of a server, through which a network fails in the ways that networks do."""

from __future__ import annotations

import contextlib
import socket
import threading


class TcpProxy:
    """Listens on a port of this machine and passes bytes on, until it is told otherwise.

    Args:
        host: of the server.
        port: of the server.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._passing = threading.Event()  # in both directions
        self._answering = threading.Event()  # from the server to the client
        self._passing.set()
        self._answering.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """Every connection breaks; new ones work."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                _close(end)

    def stall(self) -> None:
        """Connections stay, new ones are accepted, and not a byte passes."""
        self._passing.clear()

    def mute(self) -> None:
        """Requests of clients arrive; no answer comes back."""
        self._answering.clear()

    def refuse(self) -> None:
        """Every connection breaks, and new ones are refused."""
        _close(self._listener)
        self.cut()

    def repair(self) -> None:
        """New connections work again; those that were stalled stay silent."""
        with self._lock:
            self._pairs.clear()
        self._passing, self._answering = threading.Event(), threading.Event()
        self._passing.set()
        self._answering.set()
        if self._listener.fileno() < 0:
            self._listener = socket.create_server(("127.0.0.1", self.port))
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        self.refuse()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the listener has been closed
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self._target)
                with self._lock:
                    self._pairs.append((client, server))
                passing, answering = self._passing, self._answering
                for source, sink, gates in [(client, server, [passing]), (server, client, [passing, answering])]:
                    threading.Thread(target=_pump, args=(source, sink, gates), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, gates: list[threading.Event]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            for gate in gates:
                gate.wait()
            sink.sendall(data)
    _close(sink)
    _close(source)


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
