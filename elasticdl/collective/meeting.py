"""Where the members of a world find each other: each process keeps a place of its own, and that of rank 0 is used.

A member comes with its version and rank, tells what the others must know of it, learns what they have told, and goes
with a farewell.  Who goes without one has died or given up: then the world cannot be formed, and all that wait are told
so at once.  A message is a line of JSON; names are never looked up (the store of torch does, and may take seconds).
"""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from elasticdl.collective import sockets
from elasticdl_client.errors import ElasticDLError

_READ_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class _Visitor:
    connection: socket.socket
    version: int = -1
    rank: int = -1
    unread: bytes = b""
    wants: list[str] = field(default_factory=list)
    has_said_farewell: bool = False


@dataclass(slots=True)
class _Table:
    told: dict[str, str] = field(default_factory=dict)
    visitors: list[_Visitor] = field(default_factory=list)


class MeetingPlace:
    """The place of this process, open until `close`; a thread of its own serves it.

    Attributes:
        address: `host:port` for the others.

    Raises:
        ElasticDLError: the host is not an address of this machine.
    """

    def __init__(self, host: str) -> None:
        try:
            number = sockets.numeric_host(host)
            family = socket.AF_INET6 if ":" in number else socket.AF_INET
            self._listening = socket.create_server((number, 0), family=family, backlog=1024)
        except OSError as error:
            raise ElasticDLError(
                f"This process cannot be reached at '{host}': {error}.", "Name an address of this machine."
            ) from None
        self.address = sockets.written(host, self._listening.getsockname()[1])
        self._tables: dict[int, _Table] = {}
        self._newest_broken = (-1, "")
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._ending, self._end = socket.socketpair()
        self._selector.register(self._ending, selectors.EVENT_READ)
        Thread(target=self._serve, name="meeting-place", daemon=True).start()

    def close(self) -> None:
        self._end.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._ending:
                    self._close_all()
                    return
                if key.fileobj is self._listening:
                    self._let_in()
                else:
                    self._hear(key.data)

    def _let_in(self) -> None:
        with suppress(OSError):  # gone again
            connection, _ = self._listening.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ, _Visitor(connection))

    def _hear(self, visitor: _Visitor) -> None:
        try:
            data = visitor.connection.recv(_READ_BYTES)
        except OSError:
            data = b""
        *lines, visitor.unread = (visitor.unread + data).split(b"\n")
        try:
            for line in lines:
                self._do(visitor, json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):  # no member of ours
            data = b""
        if not data or len(visitor.unread) > _LONGEST_LINE_BYTES:
            self._see_off(visitor)

    def _do(self, visitor: _Visitor, message: Mapping[str, Any]) -> None:
        if visitor.version < 0:
            visitor.version, visitor.rank = int(message["version"]), int(message["rank"])
            self._tables.setdefault(visitor.version, _Table()).visitors.append(visitor)
        table = self._tables[visitor.version]
        table.told |= {str(name): str(value) for name, value in message.get("tell", {}).items()}
        visitor.wants = [str(name) for name in message.get("learn", visitor.wants)]
        visitor.has_said_farewell = "farewell" in message
        for one in table.visitors:
            self._answer(one, table)

    def _answer(self, visitor: _Visitor, table: _Table) -> None:
        """What a visitor waits for, once all of it has been told, or why it will not be."""
        if not visitor.wants:
            return
        if all(name in table.told for name in visitor.wants):
            answer: dict[str, Any] = {"told": [table.told[name] for name in visitor.wants]}
        elif visitor.version <= self._newest_broken[0]:
            answer = {"broken": self._newest_broken[1]}
        else:
            return
        visitor.wants = []
        with suppress(OSError):  # gone: its connection says so, too
            visitor.connection.sendall(json.dumps(answer).encode() + b"\n")

    def _see_off(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.connection)
        visitor.connection.close()
        if visitor.version < 0:  # a stranger
            return
        table = self._tables[visitor.version]
        table.visitors.remove(visitor)
        if not visitor.has_said_farewell and visitor.version > self._newest_broken[0]:
            self._newest_broken = visitor.version, f"rank {visitor.rank} has gone"
        for one in table.visitors:
            self._answer(one, table)
        if not table.visitors:
            del self._tables[visitor.version]

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            with suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()


class Meeting:
    """A member's visit to the place of rank 0.

    Raises:
        OSError: nobody answers there.
    """

    def __init__(self, address: str, version: int, rank: int, timeout_s: float) -> None:
        self._connection = socket.create_connection(sockets.parse(address), timeout_s)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._connection.makefile("rb")
        self._say({"version": version, "rank": rank})

    def tell(self, name: str, value: bytes) -> None:
        self._say({"tell": {name: value.hex()}})

    def learn(self, names: list[str], timeout_s: float) -> list[bytes]:
        """What was told under these names, once all has been.

        Raises:
            OSError: the place is gone, the time is over (TimeoutError), or this was interrupted.
            RuntimeError: somebody has gone.
        """
        self._connection.settimeout(timeout_s)
        self._say({"learn": names})
        line = self._answers.readline()
        if not line:
            raise ConnectionError("rank 0 has gone")
        answer = json.loads(line)
        if "broken" in answer:
            raise RuntimeError(answer["broken"])
        return [bytes.fromhex(value) for value in answer["told"]]

    def interrupt(self) -> None:
        """Any thread: what waits in `learn` fails."""
        sockets.shut([self._connection])

    def close(self, farewell: bool) -> None:
        """Goes.  Without a farewell the world cannot be formed."""
        with suppress(OSError):
            if farewell:
                self._say({"farewell": True})
        self._answers.close()
        self._connection.close()

    def _say(self, message: Mapping[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")
