"""Raw tensor calls over plain sockets, at a fifth of the cost of gRPC.

A PS listens on a second port and, for clients on its own machine, on a Unix socket, which takes two thirds of the time
of TCP.  It returns both addresses over gRPC (raw method `TENSOR_ADDRESS`: ``PORT NAME``); the name is in Linux's
abstract namespace, and random for each server, so only a process on the same machine can connect.  A client that can
reach neither makes the same calls over gRPC.  A connection carries one call at a time::

    hello    the handshake of `elasticdl.rpc.handshake`
    call     u32 method  u32 0  u64 size  frame     → u32 status  u32 0  u64 size  frame; text unless status is 0

Integers are little-endian; the method is its index in `METHODS`, the status is gRPC's number.  The prefix of a frame
comes last: both ends compute the checksum of each piece while it is in the cache, in native code without the GIL.  With
--encrypt, everything after the hello is sent in records, except over the Unix socket, which other users cannot read.

A peer that stops in the middle of the handshake, a frame or a reply holds no place, and no memory for long: each piece
of 512 KiB has a deadline, after which its connection is closed.  Between two calls a connection may be idle.
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
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc

from elasticdl.kernels import _native
from elasticdl.kernels._native import RecordError, RecordLayer
from elasticdl.rpc import addresses, handshake
from elasticdl.rpc.frames import MAGIC, PREFIX_BYTES, Arrived, Frame
from elasticdl.rpc.handshake import SecureConnection, crosses_network
from elasticdl.rpc.servers import Flow

_log = logging.getLogger(__name__)

METHODS = ("Initialize", "Exchange", "KnownIds")
TENSOR_ADDRESS = "TensorAddress"

_PURPOSE = "tensors"
_HEAD = struct.Struct("<IIQ")
_TIMEOUT = struct.Struct("@ll")  # timeval
_PEER = struct.Struct("=iII")  # Linux's ucred: process, user, group
_COMPLAINT_S = 60.0  # between two equal log lines
_GRACE_S = 1.0  # for calls in flight when a server closes
_BREATH_S = 0.1  # between two attempts to accept, when file descriptors are exhausted
_LOCAL_BUFFER_BYTES = 1 << 20  # of a Unix socket, whose buffer does not grow as TCP's does
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", 20_000))


class CallFailed(grpc.RpcError):  # type: ignore[misc]
    """A failed call, with gRPC's status; a server raises it to reject one."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server.

    Attributes:
        piece_s: Deadline for each piece of a frame or reply, and for the handshake, in seconds.
        num_connections: The most connections, each with a thread.
        num_strangers: The most connections that have not proved the token; a new one closes the oldest.
    """

    piece_s: float = handshake.TIMEOUT_S
    num_connections: int = 2048
    num_strangers: int = 64


class TensorServer:
    """Answers calls, with one thread per connection.

    Attributes:
        port, name: Where it listens; an empty name: it has no Unix socket.
    """

    def __init__(
        self,
        host: str,
        token: str,
        methods: Mapping[str, Callable[[Arrived], Frame]],
        flow: Flow,
        limits: Limits | None = None,
        encrypts: bool = False,
    ) -> None:
        """Listen from now on.

        Args:
            host: Address to listen on.
            methods: By name in `METHODS`; they may raise `CallFailed`.
            flow: Limits the calls; data of calls beyond the limit is not read until it is their turn.
            encrypts: Encrypt the network traffic.
        """
        self._token = token
        self._encrypts = encrypts
        self._methods = [methods.get(name) for name in METHODS]
        self._flow = flow
        self._limits = limits or Limits()
        self._lobby = handshake.Lobby(self._limits.num_strangers)
        self._lock = threading.Lock()
        self._has_ended = threading.Condition(self._lock)
        self._closed = threading.Event()
        self._connections: set[socket.socket] = set()  # one per thread
        self._complained_at = float("-inf")
        self._listening = [addresses.listen(host, 0, 128)]
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
        """The answer to `TENSOR_ADDRESS`."""
        return f"{self.port} {self.name}"

    def close(self) -> None:
        """Close all connections, and wait briefly for their threads: native code must not outlive Python."""
        self._closed.set()
        for listening in self._listening:
            _wake(listening)
            listening.close()
        with self._lock:
            for connection in self._connections:
                _wake(connection)  # its thread closes the connection
            self._has_ended.wait_for(lambda: not self._connections, _GRACE_S)

    def _accept(self, listening: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = listening.accept()
            except OSError as error:
                if not self._closed.is_set():
                    self._complain(f"cannot accept a connection: {error.strerror}")
                    self._closed.wait(_BREATH_S)
                continue
            with self._lock:
                is_taken = not self._closed.is_set() and len(self._connections) < self._limits.num_connections
                if is_taken:
                    self._connections.add(connection)
            if not is_taken:
                connection.close()
                continue
            self._lobby.enter(connection)
            try:
                threading.Thread(target=self._serve, args=(connection,), name="tensor", daemon=True).start()
            except RuntimeError as error:
                self._complain(f"cannot serve a connection: {error}")
                self._end(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            if not _is_of_same_user(connection):
                return
            _configure(connection)
            _limit(connection, self._limits.piece_s)
            proof = handshake.accepting(self._token, _PURPOSE, self._encrypts and crosses_network(connection))
            records = handshake.shake_hands(connection, proof, self._limits.piece_s)
            self._lobby.leave(connection)
            while self._answer(connection, records):
                pass
        except RecordError as error:
            _log.warning("%s has sent %s: its connection is ended", _named(connection), error)
        except (OSError, EOFError):
            pass  # no token, the client is gone or too slow, or this server closes
        except MemoryError:
            self._complain("no memory for a frame")
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        self._lobby.leave(connection)
        with self._lock:
            self._connections.discard(connection)
            self._has_ended.notify_all()
        connection.close()

    def _complain(self, what: str) -> None:
        """Log a problem, at most once per `_COMPLAINT_S`."""
        now = time.monotonic()
        with self._lock:
            is_due = now - self._complained_at >= _COMPLAINT_S
            if is_due:
                self._complained_at = now
        if is_due:
            _log.error("This server sheds load: %s. Further ones are dropped without a log line for a minute.", what)

    def _answer(self, connection: socket.socket, records: RecordLayer | None) -> bool:
        """Answer one call; return False if the caller does not follow the protocol."""
        socket_fd, within_s = connection.fileno(), self._limits.piece_s
        number, _, size = _HEAD.unpack(_native.receive_head(socket_fd, records, _HEAD.size, within_s))
        method = self._methods[number] if number < len(self._methods) else None
        if method is None or size < PREFIX_BYTES:
            return False
        try:
            if size > self._flow.max_bytes:
                _native.discard(socket_fd, records, size, within_s)
                raise _too_large(size, self._flow.max_bytes)
            with self._flow.frame(size) as held:
                request = Arrived(*_native.receive_frame(socket_fd, records, size, within_s))
                with self._flow.call(wait=True):
                    reply = self._outcome(method, request)
                    held.become(len(reply))
                del request
                _native.send_frame(socket_fd, records, 0, reply.parts, MAGIC, within_s)
        except CallFailed as error:
            text = error.details().encode()
            reply_bytes = _HEAD.pack(error.code().value[0], 0, len(text)) + text
            connection.sendall(records.seal(reply_bytes) if records else reply_bytes)
        return True

    @staticmethod
    def _outcome(method: Callable[[Arrived], Frame], request: Arrived) -> Frame:
        try:
            return method(request)
        except CallFailed:
            raise
        except MemoryError as error:
            raise CallFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, "the server is out of memory") from error
        except Exception as error:
            _log.exception("A call failed")
            raise CallFailed(grpc.StatusCode.UNKNOWN, f"Exception calling application: {error}") from error


class TensorClient:
    """Connections to one server, one per parallel call.  Thread-safe."""

    def __init__(self, host: str, address: str, token: str, timeout_s: float, encrypts: bool = False) -> None:
        """
        Args:
            address: See `TensorServer.address`.
            encrypts: Encrypt the network traffic.

        Raises:
            OSError: the server cannot be reached, or does not prove the token.
        """
        port, _, self._name = address.partition(" ")
        self._address = (host, int(port))
        self._token = token
        self._timeout_s = timeout_s
        self._encrypts = encrypts
        self._lock = threading.Lock()
        self._free: list[SecureConnection] = []
        self._all: set[socket.socket] = set()
        self._is_closed = False
        self._free.append(self._connected())

    def close(self) -> None:
        """Close all connections; calls in flight fail."""
        with self._lock:
            self._is_closed = True
            for connection in self._all:
                _wake(connection)
            for free in self._free:
                free.socket.close()
            self._free.clear()

    def call(self, method: str, frame: Frame, timeout_s: float) -> Arrived:
        """Make a call, and return the frame of the reply.

        Args:
            timeout_s: Deadline for sending, and for the reply.

        Raises:
            CallFailed: the server has rejected the call, or cannot be reached.
        """
        try:
            with self._lock:
                free = self._free.pop() if self._free else None
            connection, records = free or self._connected()
        except OSError as error:
            raise self._lost(error) from error
        try:
            if timeout_s != self._timeout_s:
                _limit(connection, timeout_s)
            number = METHODS.index(method)
            status, reply, checksum = _native.call(connection.fileno(), records, number, frame.parts, MAGIC)
            if timeout_s != self._timeout_s:
                _limit(connection, self._timeout_s)
        except BaseException as error:
            with self._lock:
                self._all.discard(connection)
            connection.close()
            if isinstance(error, OSError | EOFError):
                raise self._lost(error) from error
            raise
        with self._lock:
            if self._is_closed:
                connection.close()
            else:
                self._free.append(SecureConnection(connection, records))
        if status == 0:
            return Arrived(reply, checksum)
        raise CallFailed(_CODES.get(status, grpc.StatusCode.UNKNOWN), bytes(reply).decode(errors="replace"))

    def _lost(self, error: BaseException) -> CallFailed:
        if isinstance(error, BlockingIOError | TimeoutError):
            return CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")
        if isinstance(error, RecordError):
            host, port = self._address
            return CallFailed(grpc.StatusCode.DATA_LOSS, f"{host}:{port} has sent {error}")
        return CallFailed(grpc.StatusCode.UNAVAILABLE, str(error))

    def _connected(self) -> SecureConnection:
        made = handshake.connected(self._reached, self._token, _PURPOSE, self._timeout_s, self._encrypts)
        connection = made.socket
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
        return made

    def _reached(self, timeout_s: float) -> socket.socket:
        if self._name:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.settimeout(timeout_s)
                connection.connect(f"\0{self._name}")
                if _is_of_same_user(connection):
                    return connection
            except OSError:  # the server is on another machine, or in another network namespace
                pass
            connection.close()
        return socket.create_connection(self._address, timeout_s)


def _is_of_same_user(connection: socket.socket) -> bool:
    """Return whether the peer is the same user: any user of the machine may take or reach an abstract name."""
    if connection.family != socket.AF_UNIX:
        return True
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.geteuid())


def _too_large(size: int, max_bytes: int) -> CallFailed:
    return CallFailed(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"a frame of {size:,} bytes is more than the {max_bytes:,} that this server takes, half of its memory: "
        "use more parameter servers, or give them more memory",
    )


def _named(connection: socket.socket) -> str:
    """Return the name of the other end."""
    try:
        host, port = connection.getpeername()[:2]
    except (OSError, ValueError):  # closed, or a Unix socket
        return "a client"
    return f"{host}:{port}"


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
    """Set the time-out of each system call; 0: none.  Unlike `settimeout`, it keeps the socket blocking."""
    whole = math.floor(timeout_s)
    value = _TIMEOUT.pack(whole, round((timeout_s - whole) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _wake(connection: socket.socket) -> None:
    """End the waits of other threads on a connection."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
