"""Peers for the tests of tensor sockets: a server of one method, and a peer that sends arbitrary bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elasticdl.ps.tensor_sockets import Limits, TensorServer
from elasticdl.rpc.frames import Arrived, Frame, decode
from elasticdl.rpc.handshake import connecting, shake_hands
from elasticdl.rpc.servers import Flow
from tests.ps.scenes import TOKEN

HOST = "127.0.0.1"
EXCHANGE = 1
_HEAD = struct.Struct("<IIQ")


def echo(request: Arrived) -> Frame:
    header, arrays = decode(request)
    return Frame(b"seen " + header, arrays)


@contextmanager
def server_of(
    exchange: Callable[[Arrived], Frame], max_calls: int = 8, max_bytes: int = 0, limits: Limits | None = None
) -> Iterator[TensorServer]:
    server = TensorServer(HOST, TOKEN, {"Exchange": exchange}, Flow(max_calls, max_bytes), limits)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def member(server: TensorServer) -> Iterator[socket.socket]:
    """A connection that has shown the token."""
    with socket.create_connection((HOST, server.port), timeout=30) as connection:
        shake_hands(connection, connecting(TOKEN, "tensors"))
        yield connection


def head(size: int) -> bytes:
    """Of a call."""
    return _HEAD.pack(EXCHANGE, 0, size)


def reply_of(connection: socket.socket) -> tuple[int, bytes]:
    """Its status, and what follows."""
    status, _, size = _HEAD.unpack(connection.recv(_HEAD.size, socket.MSG_WAITALL))
    return status, connection.recv(size, socket.MSG_WAITALL)


def wait_for_end(connection: socket.socket) -> None:
    """Until the other end has closed; its replies are dropped.

    Raises:
        TimeoutError: it does not.
    """
    while True:
        try:
            if not connection.recv(1 << 16):
                return
        except ConnectionResetError:
            return
