"""Tensor calls over plain sockets: the road that raw methods take beside gRPC, which costs them five times as much.

A PS listens on a second port and, for clients on its own machine, at a Unix socket, which moves bytes for two thirds of
what TCP takes.  It tells both over gRPC (raw method `TENSOR_ADDRESS`: ``PORT NAME``); the name is of Linux's abstract
namespace and made up anew by each server, so that nobody but a neighbour finds it.  A client that can reach neither
makes the same calls over gRPC.  A connection carries one call at a time::

    hello    the handshake of `elasticdl.rpc.handshake`
    call     u32 method  u32 0  u64 size  frame     → u32 status  u32 0  u64 size  frame; text unless status is 0

Integers are little-endian; the method is its place in `METHODS`, the status is gRPC's number.  Of a frame the prefix
comes last: both ends make the checksum of each piece while it is in the cache, in native code without the GIL.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping

import grpc

from elasticdl.kernels import _native
from elasticdl.rpc import handshake
from elasticdl.rpc.frames import MAGIC, PREFIX_BYTES, Arrived, Frame

_log = logging.getLogger(__name__)

METHODS = ("Initialize", "Exchange", "KnownIds")
TENSOR_ADDRESS = "TensorAddress"

_PURPOSE = "tensors"
_HEAD = struct.Struct("<IIQ")
_TIMEOUT = struct.Struct("@ll")  # timeval
_MOST_CONNECTIONS = 2048
_MOST_STRANGERS = 64  # each has a thread until it has proved the token
_PEER = struct.Struct("=iII")  # Linux's ucred: process, user, group
_LOCAL_BUFFER_BYTES = 1 << 20  # of a Unix socket, which does not grow it as TCP does
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", 20_000))


class CallFailed(grpc.RpcError):  # type: ignore[misc]
    """A call that was not answered, in gRPC's words; also a server's way to refuse one."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class TensorServer:
    """Answers calls, each connection in a thread of its own.

    Attributes:
        port, name: where it listens; no name: it has no Unix socket.
    """

    def __init__(
        self,
        host: str,
        token: str,
        methods: Mapping[str, Callable[[Arrived], Frame]],
        max_calls: int,
    ) -> None:
        """Listens from now on.

        Args:
            host: address to listen on.
            methods: by name in `METHODS`; they may raise `CallFailed`.
            max_calls: at once; others wait, and what they bring is not read meanwhile.
        """
        self._token = token
        self._lobby = handshake.Lobby(_MOST_STRANGERS)
        self._methods = [methods.get(name) for name in METHODS]
        self._places = threading.Semaphore(max_calls)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] | None = set()  # None: closed
        self._listening = [socket.create_server((host, 0), backlog=128)]
        self.port: int = self._listening[0].getsockname()[1]
        self.name = f"elasticdl-{secrets.token_hex(16)}" if sys.platform == "linux" else ""
        if self.name:
            self._listening.append(socket.socket(socket.AF_UNIX))
            self._listening[1].bind(f"\0{self.name}")
            self._listening[1].listen(128)
        for listening in self._listening:
            threading.Thread(target=self._accept, args=(listening,), name="tensor-accept", daemon=True).start()

    @property
    def address(self) -> str:
        """What `TENSOR_ADDRESS` answers."""
        return f"{self.port} {self.name}"

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            connections, self._connections = self._connections or set(), None
        for listening in self._listening:
            _wake(listening)
            listening.close()
        for connection in connections:
            _wake(connection)  # its thread closes it

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
                if not _is_of_same_user(connection):
                    connection.close()
                    continue
            except OSError:
                if self._connections is None:
                    return
                _log.exception("Cannot accept a connection")
                continue
            with self._lock:
                taken = self._connections is not None and len(self._connections) < _MOST_CONNECTIONS
                if self._connections is not None and taken:
                    self._connections.add(connection)
            if taken:
                self._lobby.enter(connection)
                threading.Thread(target=self._serve, args=(connection,), name="tensor", daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            _configure(connection)
            handshake.shake_hands(connection, handshake.accepting(self._token, _PURPOSE))
            self._lobby.leave(connection)
            while self._answer(connection):
                pass
        except (OSError, EOFError):
            pass  # a stranger, the client is gone, or this server closes
        finally:
            self._lobby.leave(connection)
            with self._lock:
                if self._connections is not None:
                    self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket) -> bool:
        """One call; False: its caller speaks another language."""
        number, _, size = _HEAD.unpack(_native.receive(connection.fileno(), _HEAD.size).data)
        method = self._methods[number] if number < len(self._methods) else None
        if method is None or size < PREFIX_BYTES:
            return False
        with self._places:
            try:
                reply = self._outcome(method, Arrived(*_native.receive_frame(connection.fileno(), size)))
                _native.send_frame(connection.fileno(), 0, reply.parts, MAGIC)
            except CallFailed as error:
                text = error.details().encode()
                connection.sendall(_HEAD.pack(error.code().value[0], 0, len(text)) + text)
        return True

    @staticmethod
    def _outcome(method: Callable[[Arrived], Frame], request: Arrived) -> Frame:
        try:
            return method(request)
        except CallFailed:
            raise
        except Exception as error:
            _log.exception("A call failed")
            raise CallFailed(grpc.StatusCode.UNKNOWN, f"Exception calling application: {error}") from error


class TensorClient:
    """Connections to one server, as many as there are calls at once.  Thread-safe."""

    def __init__(self, host: str, address: str, token: str, timeout_s: float) -> None:
        """
        Args:
            address: see `TensorServer.address`.

        Raises:
            OSError: the server cannot be reached.
        """
        port, _, self._name = address.partition(" ")
        self._address = (host, int(port))
        self._token = token
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._free: list[socket.socket] = []
        self._all: set[socket.socket] = set()
        self._is_closed = False
        self._free.append(self._connected())

    def close(self) -> None:
        """Calls under way fail."""
        with self._lock:
            self._is_closed = True
            for connection in self._all:
                _wake(connection)
            for connection in self._free:
                connection.close()
            self._free.clear()

    def call(self, method: str, frame: Frame, timeout_s: float) -> Arrived:
        """The reply's frame.

        Args:
            timeout_s: for sending, and for the reply.

        Raises:
            CallFailed: by the server's word, or because it cannot be reached.
        """
        try:
            with self._lock:
                connection = self._free.pop() if self._free else None
            connection = connection or self._connected()
        except OSError as error:
            raise _lost(error) from error
        try:
            if timeout_s != self._timeout_s:
                _limit(connection, timeout_s)
            status, reply, checksum = _native.call(connection.fileno(), METHODS.index(method), frame.parts, MAGIC)
            if timeout_s != self._timeout_s:
                _limit(connection, self._timeout_s)
        except BaseException as error:
            with self._lock:
                self._all.discard(connection)
            connection.close()
            if isinstance(error, OSError | EOFError):
                raise _lost(error) from error
            raise
        with self._lock:
            if self._is_closed:
                connection.close()
            else:
                self._free.append(connection)
        if status == 0:
            return Arrived(reply, checksum)
        raise CallFailed(_CODES.get(status, grpc.StatusCode.UNKNOWN), bytes(reply).decode(errors="replace"))

    def _connected(self) -> socket.socket:
        connection = handshake.connected(self._reached, self._token, _PURPOSE, self._timeout_s)
        try:
            connection.settimeout(None)
            _configure(connection)
            _limit(connection, self._timeout_s)
            with self._lock:
                if self._is_closed:
                    raise ConnectionAbortedError("the client is closed")
                self._all.add(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _reached(self, timeout_s: float) -> socket.socket:
        if self._name:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.settimeout(timeout_s)
                connection.connect(f"\0{self._name}")
                if _is_of_same_user(connection):
                    return connection
            except OSError:  # another machine, or another network namespace
                pass
            connection.close()
        return socket.create_connection(self._address, timeout_s)


def _is_of_same_user(connection: socket.socket) -> bool:
    """False: another user of this machine, who can reach and take any abstract name, is at the other end."""
    if connection.family != socket.AF_UNIX:
        return True
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.geteuid())


def _lost(error: BaseException) -> CallFailed:
    if isinstance(error, BlockingIOError | TimeoutError):
        return CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")
    return CallFailed(grpc.StatusCode.UNAVAILABLE, str(error))


def _configure(connection: socket.socket) -> None:
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_BYTES)
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _limit(connection: socket.socket, timeout_s: float) -> None:
    """Of each call of the system; 0: none.  Unlike `settimeout` it keeps the socket blocking, so that one call does."""
    whole = math.floor(timeout_s)
    value = _TIMEOUT.pack(whole, round((timeout_s - whole) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _wake(connection: socket.socket) -> None:
    """Ends what another thread waits for on it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
