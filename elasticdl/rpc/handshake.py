"""The handshake with which a connection of ours begins: both ends prove the job's token, and neither sends it.

::

    connecting   "ELDH", nonce      36 bytes
    accepting    nonce, proof       64 bytes
    connecting   proof              32 bytes
    accepting    "ELDH"              4 bytes

A nonce is 32 random bytes.  A proof is the HMAC-SHA256, keyed by the token, of what the connection is for, of the end
that makes the proof, and of both nonces: it is of no use for another connection, another purpose or the other end.
Nothing else is read before.  The handshake does not encrypt: a machine on the path between the two ends can read and
change what follows.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass

TIMEOUT_S = 10.0
"""A connection that has not proved the token by then is closed."""

_MAGIC = b"ELDH"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_ATTEMPTS = 8  # a server that is flooded with strangers may drop a member's connection with theirs


class HandshakeError(ConnectionError):
    """The other end does not hold the job's token, or speaks another protocol."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one end does next: it sends, then it receives exactly `num_wanted` bytes (0: the handshake is over)."""

    sent: bytes
    num_wanted: int


Handshake = Generator[Step, bytes, None]
"""One end's part without I/O: takes the bytes that a step wanted, gives the next step, raises `HandshakeError`."""


def connecting(token: str, purpose: str) -> Handshake:
    """Prove the token as the end that has connected."""
    own = secrets.token_bytes(_NONCE_BYTES)
    reply = yield Step(_MAGIC + own, _NONCE_BYTES + _PROOF_BYTES)
    nonces = own + reply[:_NONCE_BYTES]
    _check(reply[_NONCE_BYTES:], _proof(token, purpose, "accepting", nonces))
    welcome = yield Step(_proof(token, purpose, "connecting", nonces), len(_MAGIC))
    if welcome != _MAGIC:
        raise HandshakeError("the other end speaks another protocol")
    yield Step(b"", 0)


def accepting(token: str, purpose: str) -> Handshake:
    """Prove the token as the end that has accepted the connection."""
    greeting = yield Step(b"", len(_MAGIC) + _NONCE_BYTES)
    if greeting[: len(_MAGIC)] != _MAGIC:
        raise HandshakeError("the other end speaks another protocol")
    own = secrets.token_bytes(_NONCE_BYTES)
    nonces = greeting[len(_MAGIC) :] + own
    reply = yield Step(own + _proof(token, purpose, "accepting", nonces), _PROOF_BYTES)
    _check(reply, _proof(token, purpose, "connecting", nonces))
    yield Step(_MAGIC, 0)


def shake_hands(connection: socket.socket, handshake: Handshake, timeout_s: float = TIMEOUT_S) -> None:
    """Carry out a handshake on a blocking socket, whose time-out is the same afterwards.

    Raises:
        HandshakeError: the other end does not hold the token.
        OSError: it is gone, or the time is over (TimeoutError).
    """
    end, timeout_before = time.monotonic() + timeout_s, connection.gettimeout()
    step = next(handshake)
    while True:
        connection.settimeout(_left(end))
        if step.sent:  # sending nothing fails, too, if the other end has closed
            connection.sendall(step.sent)
        if step.num_wanted == 0:
            break
        received = b""
        while len(received) < step.num_wanted:
            connection.settimeout(_left(end))
            some = connection.recv(step.num_wanted - len(received))
            if not some:
                raise ConnectionAbortedError("the connection was closed during the handshake")
            received += some
        step = handshake.send(received)
    connection.settimeout(timeout_before)


def connected(connect: Callable[[float], socket.socket], token: str, purpose: str, timeout_s: float) -> socket.socket:
    """A new connection whose other end has proved the token.

    Args:
        connect: makes a connection within so many seconds; called again if the server drops it, as a server does that
            is full of strangers.

    Raises:
        HandshakeError: the other end does not hold the token.
        OSError: it cannot be reached, or the time is over.
    """
    end = time.monotonic() + timeout_s
    for attempt in range(1, _ATTEMPTS + 1):
        connection = connect(_left(end))
        try:
            shake_hands(connection, connecting(token, purpose), min(TIMEOUT_S, _left(end)))
        except HandshakeError:
            connection.close()
            raise
        except ConnectionError as error:
            connection.close()
            if attempt == _ATTEMPTS:
                raise HandshakeError(f"the other end refuses the connection: {error}") from error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise AssertionError


class Lobby:
    """The connections of a server that have proved nothing yet: a bounded number; a new one drives out the oldest.

    So strangers cannot keep members out by staying.  Thread-safe.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._strangers)

    def enter(self, connection: socket.socket) -> None:
        """Admit a new connection.  One that is driven out is shut down, which ends its owner's wait for it."""
        with self._lock:
            if len(self._strangers) >= self._num_places:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with suppress(OSError):  # gone already
                    oldest.shutdown(socket.SHUT_RDWR)
            self._strangers[connection] = None

    def leave(self, connection: socket.socket) -> None:
        """Forget a connection, which has proved the token or is about to be closed."""
        with self._lock:
            self._strangers.pop(connection, None)


def _proof(token: str, purpose: str, end: str, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), f"elasticdl {purpose} {end}\0".encode() + nonces, "sha256")


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise HandshakeError("the other end does not hold the job's token; the connection was refused")


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the other end did not answer in time")
    return left
