"""The handshake of ElasticDL's own connections: both ends prove the job's token, and neither sends it.

::

    connecting   "ELDH", nonce      36 bytes
    accepting    nonce, proof       64 bytes
    connecting   proof              32 bytes
    accepting    "ELDH"              4 bytes

A nonce is 32 random bytes.  A proof is the HMAC-SHA256, keyed by the token, of the purpose of the connection, the end
that makes the proof, and both nonces: it is useless for another connection, another purpose, or the other end.  Nothing
else is read before.  The handshake alone does not encrypt: a machine on the path between the ends can read and change
what follows.

Ends that encrypt begin with "ELDX", and their nonces are X25519 public keys, generated for this connection.  Their
shared secret and the token give a key for each direction (HKDF-SHA256), and everything that follows is sent in the
records of `RecordLayer`.  Recorded traffic cannot be decrypted by learning the token later.  An end that meets one of
the other kind rejects it, with a proof that says so.
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
from typing import NamedTuple

from elasticdl.kernels._native import CipherError, RecordLayer
from elasticdl_client.errors import JobError

TIMEOUT_S = 10.0
"""A connection that has not proved the token by then is closed."""

ENCRYPT_VARIABLE = "ELASTICDL_ENCRYPT"
"""Set where a process listens before it knows the job, and the job has --encrypt."""

RECORD_OVERHEAD = 20
"""Bytes of a record, beside what it carries: its size and its tag."""

_MAGIC, _ENCRYPTED_MAGIC = b"ELDH", b"ELDX"
_NONCE_BYTES = 32
_KEY_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_ATTEMPTS = 8  # a server flooded by strangers may drop a member's connection, too
_FIRST_PAUSE_S = 0.01  # doubled each time, 1.3 s in all: frees the threads and descriptors of a flood


class HandshakeError(ConnectionError):
    """The other end does not have the job's token, or uses another protocol."""


@dataclass(frozen=True, slots=True)
class HandshakeStep:
    """The next step of one end: it sends, then it receives exactly `num_wanted` bytes (0: the handshake is over).

    Attributes:
        records: Encryption of everything that follows; None: not encrypted.
    """

    sent: bytes
    num_wanted: int
    records: RecordLayer | None = None


class SecureConnection(NamedTuple):
    """A socket whose other end has proved the token.

    Attributes:
        records: Encryption of everything sent through it; None: not encrypted.
    """

    socket: socket.socket
    records: RecordLayer | None


Handshake = Generator[HandshakeStep, bytes, None]
"""One end's part without I/O: takes the bytes that a step wanted, gives the next step, raises `HandshakeError`."""


def check_encryption() -> None:
    """Raise JobError unless this process can encrypt."""
    try:
        RecordLayer(bytes(_KEY_BYTES), bytes(_KEY_BYTES))
        _KeyExchange()
    except (CipherError, ImportError) as error:
        raise JobError(
            f"the job has --encrypt, and nothing can be encrypted here: {error}",
            "use an image whose Python has OpenSSL (`import ssl`) and the package cryptography, as that of `zoo build`",
        ) from error


def crosses_network(connection: socket.socket) -> bool:
    """Return False for a Unix socket, whose bytes do not leave this machine and are never encrypted."""
    return connection.family != socket.AF_UNIX


def connecting(token: str, purpose: str, encrypts: bool = False) -> Handshake:
    """Prove the token as the end that has connected."""
    exchange = _KeyExchange() if encrypts else None
    magic, own = _greeting(exchange)
    reply = yield HandshakeStep(magic + own, _NONCE_BYTES + _PROOF_BYTES)
    other, proof = reply[:_NONCE_BYTES], reply[_NONCE_BYTES:]
    if hmac.compare_digest(proof, _proof(token, purpose, "refusing", own + other)):
        raise _of_other_kind(encrypts)
    purpose = _of_kind(purpose, encrypts)
    _check(proof, _proof(token, purpose, "accepting", own + other))
    welcome = yield HandshakeStep(_proof(token, purpose, "connecting", own + other), len(_MAGIC))
    if welcome != _MAGIC:
        raise HandshakeError("the other end speaks another protocol")
    records = exchange.records(other, token, purpose, own + other, ("connecting", "accepting")) if exchange else None
    yield HandshakeStep(b"", 0, records)


def accepting(token: str, purpose: str, encrypts: bool = False) -> Handshake:
    """Prove the token as the end that has accepted the connection."""
    greeting = yield HandshakeStep(b"", len(_MAGIC) + _NONCE_BYTES)
    magic, other = greeting[: len(_MAGIC)], greeting[len(_MAGIC) :]
    if magic not in (_MAGIC, _ENCRYPTED_MAGIC):
        raise HandshakeError("the other end speaks another protocol")
    exchange = _KeyExchange() if encrypts else None
    expected, own = _greeting(exchange)
    if magic != expected:
        yield HandshakeStep(own + _proof(token, purpose, "refusing", other + own), 1)
        raise _of_other_kind(encrypts)
    purpose = _of_kind(purpose, encrypts)
    reply = yield HandshakeStep(own + _proof(token, purpose, "accepting", other + own), _PROOF_BYTES)
    _check(reply, _proof(token, purpose, "connecting", other + own))
    records = exchange.records(other, token, purpose, other + own, ("accepting", "connecting")) if exchange else None
    yield HandshakeStep(_MAGIC, 0, records)


def shake_hands(connection: socket.socket, handshake: Handshake, timeout_s: float = TIMEOUT_S) -> RecordLayer | None:
    """Run a handshake on a blocking socket; its own time-out is restored afterwards.

    Returns:
        The encryption of all later bytes; None: not encrypted.

    Raises:
        HandshakeError: the other end does not have the token.
        OSError: it has closed the connection, or the time is over (TimeoutError).
    """
    end, timeout_before = time.monotonic() + timeout_s, connection.gettimeout()
    step = next(handshake)
    while True:
        connection.settimeout(_left(end))
        if step.sent:  # an empty send would fail, too, if the other end has closed
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
    return step.records


def connected(
    connect: Callable[[float], socket.socket], token: str, purpose: str, timeout_s: float, encrypts: bool = False
) -> SecureConnection:
    """Return a new connection whose other end has proved the token.

    Args:
        connect: Connects within the given seconds; called again if the server drops the connection, because it has too
            many strangers.
        encrypts: Encrypt the traffic, unless it is a Unix socket.

    Raises:
        HandshakeError: the other end does not hold the token.
        OSError: it cannot be reached, or the time is over.
    """
    end = time.monotonic() + timeout_s
    for attempt in range(1, _ATTEMPTS + 1):
        connection = connect(_left(end))
        try:
            proof = connecting(token, purpose, encrypts and crosses_network(connection))
            records = shake_hands(connection, proof, min(TIMEOUT_S, _left(end)))
        except HandshakeError:
            connection.close()
            raise
        except ConnectionError as error:
            connection.close()
            if attempt == _ATTEMPTS:
                raise HandshakeError(f"the other end refuses the connection: {error}") from error
            time.sleep(min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _left(end)))
        except BaseException:
            connection.close()
            raise
        else:
            return SecureConnection(connection, records)
    raise AssertionError


class Lobby:
    """The connections of a server that have not proved the token, up to a limit; a new one closes the oldest.

    So strangers cannot block others by staying.  Thread-safe.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._strangers)

    def enter(self, connection: socket.socket) -> None:
        """Add a new connection.  If the oldest must go, it is shut down, which ends its owner's wait."""
        with self._lock:
            if len(self._strangers) >= self._num_places:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with suppress(OSError):  # already closed
                    oldest.shutdown(socket.SHUT_RDWR)
            self._strangers[connection] = None

    def leave(self, connection: socket.socket) -> None:
        """Remove a connection that has proved the token, or is about to be closed."""
        with self._lock:
            self._strangers.pop(connection, None)


class _KeyExchange:
    """One end of the key exchange of a connection.

    Attributes:
        public: The key sent to the other end.

    Raises:
        ImportError: `cryptography` is not installed.
    """

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def records(self, other: bytes, token: str, purpose: str, nonces: bytes, ends: tuple[str, str]) -> RecordLayer:
        """Return the encryption for a connection.

        Args:
            other: The other end's public key.
            ends: This end, and the other one.

        Raises:
            HandshakeError: the public key is invalid.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError as error:
            raise HandshakeError("the other end's key is none of X25519") from error

        def key(end: str) -> bytes:
            info = f"elasticdl {purpose} {end} key\0".encode() + nonces
            return bytes(HKDF(SHA256(), _KEY_BYTES, token.encode(), info).derive(shared))

        return RecordLayer(key(ends[0]), key(ends[1]))


def _greeting(exchange: _KeyExchange | None) -> tuple[bytes, bytes]:
    """Return the magic for this kind of end, and its nonce."""
    return (_ENCRYPTED_MAGIC, exchange.public) if exchange else (_MAGIC, secrets.token_bytes(_NONCE_BYTES))


def _of_kind(purpose: str, encrypts: bool) -> str:
    """Return the purpose with the kind, so that proofs for one kind are invalid for the other."""
    return f"{purpose}, encrypted," if encrypts else purpose


def _of_other_kind(encrypts: bool) -> HandshakeError:
    if encrypts:
        return HandshakeError("the other end does not encrypt what it sends, and this one does (--encrypt)")
    return HandshakeError("the other end encrypts what it sends (--encrypt), and this one does not")


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
