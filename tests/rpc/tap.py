"""A tapped wire between two ends: it sees all that goes through, and may spoil the records."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

HOST = "127.0.0.1"
_SIZE = struct.Struct("<I")
_TAG_BYTES = 16
_HANDSHAKE_BYTES = {True: 36 + 32, False: 64 + 4}  # to the end that has accepted the connection, and from it


class Fault(StrEnum):
    """A fault of a record, the third of its direction."""

    FLIPPED = "a byte is changed"
    SIZE = "its size is changed"
    REPEATED = "it comes twice"
    DROPPED = "it is left out"
    MOVED = "it changes places with the next one"
    CUT = "the stream ends in it"


@dataclass
class Tap:
    """
    Attributes:
        port: leads to another one.
        seen: the bytes so far, both directions together.
        fault: of the next connection alone; None: all goes through as it comes.
        to_server: the direction that has the fault.
    """

    port: int
    seen: bytearray = field(default_factory=bytearray)
    fault: Fault | None = None
    to_server: bool = True


@contextmanager
def tap(port: int) -> Iterator[Tap]:
    opened = [socket.create_server((HOST, 0))]
    made = Tap(opened[0].getsockname()[1])

    def copy(source: socket.socket, target: socket.socket, to_server: bool, fault: Fault | None) -> None:
        with contextlib.suppress(OSError, EOFError):
            if fault is not None:
                _copy_spoilt(source, target, _HANDSHAKE_BYTES[to_server], fault)
            else:
                while data := source.recv(65536):
                    made.seen.extend(data)
                    target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                one, other = opened[0].accept()[0], socket.create_connection((HOST, port))
                opened.extend((one, other))
                fault, made.fault = made.fault, None
                for source, target, to_server in ((one, other, True), (other, one, False)):
                    spoils = fault if made.to_server is to_server else None
                    threading.Thread(target=copy, args=(source, target, to_server, spoils), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield made
    finally:
        for found in opened:
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)
            found.close()


def _copy_spoilt(source: socket.socket, target: socket.socket, num_clear: int, fault: Fault) -> None:
    for _ in range(num_clear):  # as they come: each end waits for the other
        target.sendall(_exactly(source, 1))
    records = _records_of(source)
    for _ in range(2):
        target.sendall(next(records))
    third = next(records)
    if fault is Fault.FLIPPED:
        target.sendall(third[:-1] + bytes([third[-1] ^ 1]))
    elif fault is Fault.SIZE:
        target.sendall(bytes([third[0] ^ 1]) + third[1:])
    elif fault is Fault.REPEATED:
        target.sendall(third + third)
    elif fault is Fault.MOVED:
        target.sendall(next(records) + third)
    elif fault is Fault.CUT:
        target.sendall(third[:-1])
        return
    for record in records:
        target.sendall(record)


def _records_of(source: socket.socket) -> Iterator[bytes]:
    while True:
        size = _exactly(source, _SIZE.size)
        yield size + _exactly(source, _SIZE.unpack(size)[0] + _TAG_BYTES)


def _exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        some = source.recv(size - len(data))
        if not some:
            raise EOFError
        data += some
    return data
