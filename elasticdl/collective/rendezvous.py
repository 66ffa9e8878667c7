"""The rendezvous of the members of a group: every process runs a server, and the one of rank 0 is used.

A connection begins with the handshake of `elasticdl.rpc.handshake`; nothing is read from a stranger before.  A member
sends its version and rank, publishes values for the others, waits for theirs, and leaves with a farewell.  If its
connection closes without one, it has died or given up: then the group cannot be formed, and all waiting members are
told at once.  A message is a line of JSON.  Names of hosts are never resolved (torch's store does, which may take
seconds).

A peer may also bring a connection for a group's collectives: it is kept, unread, until this process takes it.  With
--encrypt, everything after a handshake is sent in records, except over Unix sockets, which other users cannot read.
"""

from __future__ import annotations

import json
import logging
import selectors
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any

from elasticdl.kernels._native import RecordError, RecordLayer
from elasticdl.rpc import addresses, handshake
from elasticdl.rpc.handshake import RECORD_OVERHEAD, SecureConnection, crosses_network
from elasticdl_client.errors import ElasticDLError

_PURPOSE = "meeting"
_READ_BYTES = 1 << 16
_BACKLOG = 1024
_LONGEST_LINE_BYTES = 1 << 18
_MAX_VALUE_BYTES = 4 << 20  # published in one group; a member publishes some hundred bytes
_MOST_UNSENT_BYTES = 8 << 20  # not read by a peer yet
_MOST_STRANGERS = 256
_MOST_BROKEN = 64  # failed groups that are remembered for late members
_MOST_MEMBERS = 1 << 20
_LAST_VERSION = 1 << 63
_LINKED = b"linked\n"
_PAUSE_S = 0.2  # pause before the next accept, when file descriptors are exhausted
_log = logging.getLogger("elasticdl.collective")


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of a peer; only the first has a version and a rank."""

    version: int | None
    rank: int
    values: Mapping[str, str]
    wants: list[str] | None
    is_link: bool
    is_farewell: bool

    @classmethod
    def of(cls, line: bytes) -> _Message:
        """Parse and check a message.

        Raises:
            ValueError: no member sends such a line.
        """
        try:
            given = json.loads(line)
        except RecursionError:
            raise ValueError("nested too deep") from None
        if not isinstance(given, dict):
            raise ValueError("no message")
        version, rank = given.get("version"), given.get("rank", 0)
        values, wants = given.get("tell", {}), given.get("learn")
        if version is not None and not _is_within(version, _LAST_VERSION):
            raise ValueError("no version")
        if not _is_within(rank, _MOST_MEMBERS):
            raise ValueError("no rank")
        if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
            raise ValueError("cannot be told")
        if wants is not None and not (isinstance(wants, list) and all(isinstance(name, str) for name in wants)):
            raise ValueError("cannot be learned")
        return cls(version, rank, values, wants, "link" in given, "farewell" in given)


@dataclass(slots=True, eq=False)
class _Peer:
    connection: socket.socket
    handshake: handshake.Handshake | None  # None once the peer has proved the token
    num_wanted: int  # bytes of the handshake's next step; 0 after it
    come_at: float
    records: RecordLayer | None = None
    version: int = -1
    rank: int = -1
    unread: bytes = b""
    unsent: bytes = b""
    wants: list[str] = field(default_factory=list)
    is_leaving: bool = False


@dataclass(slots=True)
class _Table:
    values: dict[str, str] = field(default_factory=dict)
    value_bytes: int = 0
    peers: list[_Peer] = field(default_factory=list)


class RendezvousServer:
    """The server of this process, open until `close`, in a thread of its own.

    Attributes:
        address: `host:port` for the other members.

    Raises:
        ElasticDLError: the host is not an address of this machine.
    """

    def __init__(self, host: str, token: str, encrypts: bool = False) -> None:
        try:
            number = addresses.numeric_host(host)
            listening = addresses.listen(number, 0, _BACKLOG)
        except OSError as error:
            raise ElasticDLError(
                f"This process cannot be reached at '{host}': {error}.", "Name an address of this machine."
            ) from None
        port = listening.getsockname()[1]
        self.address = addresses.written(host, port)
        self._doors = [listening, *_local_door(number, port)]
        self._token = token
        self._encrypts = encrypts
        self._lobby = handshake.Lobby(_MOST_STRANGERS)
        self._strangers: dict[_Peer, None] = {}  # oldest first
        self._tables: dict[int, _Table] = {}
        self._broken: dict[int, str] = {}  # version → reason; the oldest first
        self._paused_until: float | None = None
        self._lock = Lock()
        self._links: dict[int, dict[int, SecureConnection]] = {}  # version → rank → connection
        self._selector = selectors.DefaultSelector()
        for door in self._doors:
            door.setblocking(False)
            self._selector.register(door, selectors.EVENT_READ)
        self._ending, self._end = socket.socketpair()
        self._selector.register(self._ending, selectors.EVENT_READ)
        Thread(target=self._serve, name="rendezvous-server", daemon=True).start()

    def close(self) -> None:
        self._end.close()

    def take_links(self, version: int) -> dict[int, SecureConnection]:
        """Return the connections that members of a group have brought, by rank; the caller must close them."""
        with self._lock:
            return self._links.pop(version, {})

    def drop_links(self, older_than: int) -> None:
        """Close the connections for groups that will not be formed any more."""
        with self._lock:
            dropped = [self._links.pop(version) for version in list(self._links) if version < older_than]
        for links in dropped:
            _close_all(links.values())

    def _serve(self) -> None:
        while True:
            for key, events in self._selector.select(self._select_timeout_s()):
                if key.fileobj is self._ending:
                    self._close_all()
                    return
                if key.fileobj in self._doors:
                    self._accept(key.fileobj)
                else:
                    self._handle(key.data, events)
            self._end_overdue()

    def _select_timeout_s(self) -> float | None:
        """Return the seconds until the first deadline of a stranger, or the end of the pause; None without any."""
        ends = [peer.come_at + handshake.TIMEOUT_S for peer in self._strangers][:1]
        if self._paused_until is not None:
            ends.append(self._paused_until)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for peer in list(self._strangers):
            if peer.come_at + handshake.TIMEOUT_S > now:
                break
            self._remove(peer)
        if self._paused_until is not None and self._paused_until <= now:
            self._paused_until = None
            for door in self._doors:
                self._selector.register(door, selectors.EVENT_READ)

    def _accept(self, door: socket.socket) -> None:
        try:
            connection, _ = door.accept()
        except (ConnectionError, BlockingIOError):  # already closed
            return
        except OSError as error:
            _log.warning("The rendezvous server cannot accept a connection: %s", error)
            for resting in self._doors:
                self._selector.unregister(resting)
            self._paused_until = time.monotonic() + _PAUSE_S
            return
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            with suppress(OSError):  # already closed; reading will show it
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        proof = handshake.accepting(self._token, _PURPOSE, self._encrypts and crosses_network(connection))
        peer = _Peer(connection, proof, next(proof).num_wanted, time.monotonic())
        self._strangers[peer] = None
        self._lobby.enter(connection)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _handle(self, peer: _Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(peer, b"")
        if not events & selectors.EVENT_READ:
            return
        room = peer.num_wanted - len(peer.unread) if peer.handshake else _READ_BYTES
        try:
            data = peer.connection.recv(room)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            peer.unread += peer.records.open(data) if peer.records else data
            self._take(peer)
        except RecordError as error:
            if peer.version >= 0:
                self._break(peer.version, f"rank {peer.rank} has sent {error}")
            data = b""
        except (ValueError, ConnectionError):  # not a member
            data = b""
        if not data or len(peer.unread) > _LONGEST_LINE_BYTES:
            self._remove(peer)

    def _take(self, peer: _Peer) -> None:
        """Process the complete messages that a peer has sent.

        Raises:
            ConnectionError: the peer does not have the token.
            ValueError: the peer is not a member.
        """
        if peer.handshake is not None:
            if len(peer.unread) == peer.num_wanted:
                message, peer.unread = peer.unread, b""
                step = peer.handshake.send(message)
                peer.num_wanted = step.num_wanted
                self._send(peer, step.sent)
                if step.num_wanted == 0:
                    peer.handshake, peer.records = None, step.records
                    self._forget_stranger(peer)
            return
        *lines, peer.unread = peer.unread.split(b"\n")
        messages = [_Message.of(line) for line in lines]
        if any(message.is_link for message in messages):
            is_amid_record = peer.records is not None and peer.records.is_amid_record
            if peer.version >= 0 or peer.unread or is_amid_record or len(messages) > 1:
                raise ValueError("a link is brought alone")
            self._keep_link(peer, messages[0])
            return
        for one in messages:
            self._handle_message(peer, one)

    def _keep_link(self, peer: _Peer, message: _Message) -> None:
        """Keep a connection for the collectives of a group.

        Raises:
            ValueError: this rank has brought one already.
        """
        if message.version is None:
            raise ValueError("a link is for a version")
        with self._lock:
            links = self._links.setdefault(message.version, {})
            if message.rank in links:
                raise ValueError("this rank is linked already")
            links[message.rank] = SecureConnection(peer.connection, peer.records)
        self._selector.unregister(peer.connection)
        with suppress(OSError):  # closed: the group will notice it
            peer.connection.send(_sealed(peer.records, _LINKED))

    def _handle_message(self, peer: _Peer, message: _Message) -> None:
        if peer.version < 0:
            if message.version is None:
                raise ValueError("a member begins with its version and rank")
            self._add_member(peer, message.version, message.rank)
        table = self._tables[peer.version]
        twice = sorted(message.values.keys() & table.values.keys())
        table.value_bytes += sum(len(name) + len(value) for name, value in message.values.items())
        if twice or table.value_bytes > _MAX_VALUE_BYTES:
            what = f"'{twice[0]}' twice" if twice else "too much"
            self._break(peer.version, f"rank {peer.rank} published {what}")
            raise ValueError("refused")
        table.values |= message.values
        if message.wants is not None:
            peer.wants = message.wants
        peer.is_leaving |= message.is_farewell
        self._answer_all(peer.version)

    def _add_member(self, peer: _Peer, version: int, rank: int) -> None:
        """Add a member to its group.

        Raises:
            ValueError: this rank has come already.
        """
        table = self._tables.setdefault(version, _Table())
        if any(other.rank == rank for other in table.peers):
            raise ValueError("this rank is there already")
        peer.version, peer.rank = version, rank
        table.peers.append(peer)

    def _answer_all(self, version: int) -> None:
        table = self._tables[version]
        for peer in list(table.peers):
            self._answer(peer, table)

    def _answer(self, peer: _Peer, table: _Table) -> None:
        """Answer a peer with all values it waits for, or with the reason why they will not come; else wait."""
        if not peer.wants:
            return
        if all(name in table.values for name in peer.wants):
            answer: dict[str, Any] = {"told": [table.values[name] for name in peer.wants]}
        elif peer.version in self._broken:
            answer = {"broken": self._broken[peer.version]}
        else:
            return
        peer.wants = []
        self._send(peer, json.dumps(answer).encode() + b"\n")

    def _send(self, peer: _Peer, data: bytes) -> None:
        """Send as much as the connection accepts now, and the rest later.

        A connection that accepts nothing, or is closed, is shut down; the peer is removed when its end is read.
        """
        peer.unsent += _sealed(peer.records, data)
        try:
            peer.unsent = peer.unsent[peer.connection.send(peer.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            peer.unsent = b""
        if len(peer.unsent) > _MOST_UNSENT_BYTES:
            _shut(peer.connection)
            peer.unsent = b""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.connection, events, peer)

    def _break(self, version: int, why: str) -> None:
        """Mark a group as failed; the first reason is kept."""
        self._broken.setdefault(version, why)
        if len(self._broken) > _MOST_BROKEN:
            del self._broken[next(iter(self._broken))]
        self._answer_all(version)

    def _forget_stranger(self, peer: _Peer) -> None:
        self._strangers.pop(peer, None)
        self._lobby.leave(peer.connection)

    def _remove(self, peer: _Peer) -> None:
        self._forget_stranger(peer)
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.version < 0:
            return
        table = self._tables[peer.version]
        table.peers.remove(peer)
        if not peer.is_leaving:
            self._break(peer.version, f"rank {peer.rank} has gone")
        if not table.peers:
            del self._tables[peer.version]

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            with suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]
        for door in self._doors:  # doors are not registered during a pause
            door.close()
        self._selector.close()
        self.drop_links(_LAST_VERSION)


class Rendezvous:
    """A member's connection to the server of rank 0.

    Raises:
        HandshakeError: the server belongs to another job.
        OSError: the address does not answer.
    """

    def __init__(
        self, address: str, token: str, version: int, rank: int, timeout_s: float, encrypts: bool = False
    ) -> None:
        self._connection, self._records = _connect(address, token, timeout_s, encrypts)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unread = b""
        self._send({"version": version, "rank": rank})

    def publish(self, name: str, value: bytes) -> None:
        """Publish a value for the other members; each name once."""
        self._send({"tell": {name: value.hex()}})

    def wait_for(self, names: list[str], timeout_s: float) -> list[bytes]:
        """Return the values of these names; wait until all are published.

        Raises:
            OSError: the server is gone, the time is over (TimeoutError), or `interrupt` was called.
            RuntimeError: a member is gone.
        """
        self._connection.settimeout(timeout_s)
        self._send({"learn": names})
        answer = json.loads(self._line())
        if "broken" in answer:
            raise RuntimeError(answer["broken"])
        return [bytes.fromhex(value) for value in answer["told"]]

    def interrupt(self) -> None:
        """Make calls that wait in `learn` fail.  Thread-safe."""
        _shut(self._connection)

    def close(self, farewell: bool) -> None:
        """Close the connection.  Without a farewell, the group cannot be formed."""
        with suppress(OSError):
            if farewell:
                self._send({"farewell": True})
        self._connection.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._connection.sendall(_sealed(self._records, json.dumps(message).encode() + b"\n"))

    def _line(self) -> bytes:
        while b"\n" not in self._unread:
            data = self._connection.recv(_READ_BYTES)
            if not data:
                raise ConnectionError("rank 0 has gone")
            try:
                self._unread += self._records.open(data) if self._records else data
            except RecordError as error:
                raise RecordError(f"rank 0 has sent {error}") from error
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def link(
    address: str, token: str, version: int, rank: int, timeout_s: float, encrypts: bool = False
) -> SecureConnection:
    """Connect to another member's process, for the collectives of a group.

    Args:
        address: `host:port` of its server.
        token: The token of the job.
        version: Version of the group.
        rank: Rank of this process.
        timeout_s: Limit for the connection.
        encrypts: Encrypt the network traffic.

    Raises:
        HandshakeError: the process belongs to another job.
        OSError: it does not answer, or rejects the connection.
    """
    made = _connect_locally(address, token, timeout_s) or _connect(address, token, timeout_s, encrypts)
    connection, records = made
    try:
        wish = json.dumps({"version": version, "rank": rank, "link": True}).encode() + b"\n"
        connection.sendall(_sealed(records, wish))
        num_wanted = len(_LINKED) + (RECORD_OVERHEAD if records else 0)  # later bytes belong to the collectives
        while num_wanted:
            some = connection.recv(num_wanted)
            if not some:
                raise ConnectionAbortedError("the connection was refused")
            num_wanted -= len(some)
            if records is not None:
                records.open(some)
    except BaseException:
        connection.close()
        raise
    return made


def _sealed(records: RecordLayer | None, data: bytes) -> bytes:
    return records.seal(data) if records else data


def _local_door(number: str, port: int) -> list[socket.socket]:
    """Return a Unix socket for members on this machine: it takes two thirds of the processor time of TCP."""
    if sys.platform != "linux":
        return []
    door = socket.socket(socket.AF_UNIX)
    try:
        door.bind(_local_name(number, port))
        door.listen(_BACKLOG)
    except OSError:  # the name is taken: members use TCP
        door.close()
        return []
    return [door]


def _connect_locally(address: str, token: str, timeout_s: float) -> SecureConnection | None:
    """Return a connection to a process on this machine; None if it is on another one."""
    if sys.platform != "linux":
        return None
    host, port = addresses.parse(address)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(_local_name(addresses.numeric_host(host), port))
        handshake.shake_hands(connection, handshake.connecting(token, _PURPOSE), min(timeout_s, handshake.TIMEOUT_S))
    except OSError:
        connection.close()
        return None
    return SecureConnection(connection, None)


def _local_name(number: str, port: int) -> str:
    """Return the name of the Unix socket of a process that also listens at this address (Linux abstract namespace).

    Any process of the machine may take the name first; the handshake detects that.
    """
    return f"\0elasticdl-meeting-{number}-{port}"


def _connect(address: str, token: str, timeout_s: float, encrypts: bool) -> SecureConnection:
    made = handshake.connected(
        lambda left_s: socket.create_connection(addresses.parse(address), left_s), token, _PURPOSE, timeout_s, encrypts
    )
    made.socket.settimeout(timeout_s)
    return made


def _shut(connection: socket.socket) -> None:
    """End all waits on a connection, here and at the other end."""
    with suppress(OSError):  # no longer connected
        connection.shutdown(socket.SHUT_RDWR)


def _close_all(connections: Iterable[SecureConnection]) -> None:
    for connection in connections:
        connection.socket.close()


def _is_within(value: object, bound: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < bound
