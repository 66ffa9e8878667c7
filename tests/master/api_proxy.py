"""Stands between a client and the API server, and breaks the connection in the ways that a network can."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from enum import Enum, auto
from pathlib import Path
from urllib.parse import urlsplit

import yaml


class Fault(Enum):
    """A fault of the path to the server."""

    NONE = auto()
    REFUSES = auto()  # connections are ended at once
    HANGS = auto()  # requests arrive nowhere
    LOSES_ANSWERS = auto()  # requests arrive; with the first byte of the answer the connection ends


class ApiProxy:
    """A TCP proxy in front of the server of a kubeconfig; `fault` may be changed at any time."""

    def __init__(self, kubeconfig: Path, own: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        server = urlsplit(config["clusters"][0]["cluster"]["server"])
        self._target = (server.hostname, server.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        own.write_text(yaml.safe_dump(config))
        self.kubeconfig = own
        self.fault = Fault.NONE
        self.num_lost = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.fault is Fault.REFUSES:
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
                threading.Thread(target=self._answers, args=(server, client), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self.fault is Fault.REFUSES:
                    break
                if self.fault is not Fault.HANGS:
                    server.sendall(data)
        self._end(client, server)

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if self.fault is Fault.LOSES_ANSWERS:
                    self.num_lost += 1
                    break
                client.sendall(data)
        self._end(client, server)

    @staticmethod
    def _end(*sockets: socket.socket) -> None:
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxied(kubeconfig: Path, own: Path) -> Iterator[ApiProxy]:
    """A proxy, and the kubeconfig `own` that goes through it."""
    proxy = ApiProxy(kubeconfig, own)
    try:
        yield proxy
    finally:
        proxy.close()
