"""Gloo: collectives of arrays in main memory, over TCP.

What ends a collective is an error of a connection, never the engine's clock: a slow peer is waited for.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Lock
from typing import Any

from elasticdl.collective import sockets
from elasticdl.collective.engine import Tensor, Work
from elasticdl.collective.sockets import Address
from elasticdl.collective.torch_store import engine_module

FOR_EVER = timedelta(days=7)
_LOOK_EVERY_S = 0.1
_LOOKS_OF_GRACE = 2  # one that has left has sent its part; that of others may take a moment longer
_ONE_AT_A_TIME = Lock()
_RANK_GONE = re.compile(r"rank (\d+) has gone")
logger = logging.getLogger("elasticdl.collective")


class GlooListener:
    """The place at which the others of one world connect to this member.

    Attributes:
        address: `host:port`, to be told to the others.
    """

    def __init__(self, host: str) -> None:
        with _ONE_AT_A_TIME:  # or another group of this process would take ours for its own
            known = _listening()
            self.device = engine_module().ProcessGroupGloo.create_device(hostname=sockets.numeric_host(host))
            opened = _listening() - known
        self.own = frozenset(opened)
        self.address = " ".join(sockets.written(*address) for address in sorted(opened))


class GlooLinks:
    """Gloo's connections to all others of a world."""

    def __init__(self, listener: GlooListener) -> None:
        self._listener = listener
        self._listeners: dict[Address, int] = {}  # of the others → rank
        self._held: dict[socket.socket, Address] = {}  # a copy of each connection → its other end
        self._rank_at: dict[Address, int] = {}  # the other end of each connection → rank
        self._rank = -1
        self._store: Any = None
        self._group: Any = None
        self._lock = Lock()

    def connect(self, store: Any, rank: int, listeners: list[str], timeout_s: float) -> None:
        """Connects to all others.

        Args:
            store: of torch.
            listeners: the addresses of all, by rank.

        Raises:
            RuntimeError: they cannot all be reached.
        """
        c10d = engine_module()
        self._rank = rank
        self._listeners = {
            sockets.parse(address): other
            for other, written in enumerate(listeners)
            if other != rank
            for address in written.split()
        }
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [self._listener.device]
        options._timeout = timedelta(seconds=timeout_s)
        group = c10d.ProcessGroupGloo(c10d.PrefixStore("gloo", store), rank, len(listeners), options)
        group.set_timeout(FOR_EVER)
        with self._lock:
            self._store = store
            self._group = group
            self._held = {
                one: remote for one in sockets.copies(self._is_link) if (remote := sockets.remote_address(one))
            }
        if len(self._held) < len(listeners) - 1:
            logger.warning(
                "Found %d of %d connections to the others; a collective that is stuck may not end at once.",
                len(self._held), len(listeners) - 1,
            )  # fmt: skip
        self._learn_ranks(len(listeners), timeout_s)

    def all_reduce(self, tensor: Tensor) -> Work:
        return GlooWork(self._open().allreduce([tensor]))

    def all_gather(self, into: list[Tensor], tensor: Tensor) -> Work:
        return GlooWork(self._open().allgather([into], [tensor]))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return GlooWork(self._open().broadcast(tensor, source))

    def _open(self) -> Any:
        group = self._group
        if group is None:
            raise RuntimeError("the connections are closed")
        return group

    def finish(self, work: Work, check: Callable[[], None], timeout_s: float) -> None:
        """Waits for a collective of this world, of any engine, as long as all members hold their connections.

        Gloo itself may miss that one is closed, if not by a neighbour in its ring or before the collective began.

        Args:
            check: called now and then; may raise.

        Raises:
            RuntimeError: it failed, one has gone, or the time is over.
        """
        end = time.monotonic() + timeout_s
        looks_since_gone = 0
        while not work.wait(_LOOK_EVERY_S):
            check()
            gone = self._gone_peer()
            looks_since_gone += gone is not None
            if looks_since_gone > _LOOKS_OF_GRACE:
                raise RuntimeError(f"rank {gone} has gone")
            if time.monotonic() >= end:
                raise TimeoutError

    def rank_in(self, message: str) -> int | None:
        """The rank of the peer that an error of this or of the engine names."""
        named = _RANK_GONE.search(message)
        if named:
            return int(named[1])
        for (host, port), rank in self._rank_at.items():
            # Gloo writes the bytes of a port in the network's order, and so another number.
            if f"{host}]:{port}" in message or f"{host}]:{socket.htons(port)}" in message:
                return rank
        return None

    def interrupt(self) -> None:
        """Any thread, at any time, `connect` included."""
        with self._lock:
            if self._group is not None:
                sockets.shut(self._held)
                return
        found = sockets.copies(self._is_link)
        sockets.shut(found)
        sockets.close(found)

    def close(self) -> None:
        self._group = None  # its destructor waits for what is on its way, and lets other threads run meanwhile
        with self._lock:
            sockets.close(self._held)
            self._held = {}

    def _learn_ranks(self, size: int, timeout_s: float) -> None:
        """Who is at the other end of each connection: who has made it tells its own port.

        When this has ended all have all their connections.
        """
        import torch

        mine = torch.zeros(size, dtype=torch.int64)
        for one, remote in self._held.items():
            if remote in self._listeners:
                self._rank_at[remote] = self._listeners[remote]
                mine[self._listeners[remote]] = sockets.local_address(one)[1]
        into = [torch.zeros_like(mine) for _ in range(size)]
        self.finish(self.all_gather(into, mine), lambda: None, timeout_s)
        rank_of_port = {int(ports[self._rank]): other for other, ports in enumerate(into) if other != self._rank}
        for remote in self._held.values():
            if remote not in self._listeners and remote[1] in rank_of_port:
                self._rank_at[remote] = rank_of_port[remote[1]]

    def _gone_peer(self) -> int | None:
        """The rank of one whose connection is closed from its end; -1: it is not known."""
        with self._lock:
            closed = sockets.closed_from_afar(self._held)
            return self._rank_at.get(self._held[closed[0]], -1) if closed else None

    def _is_link(self, one: socket.socket) -> bool:
        remote = sockets.remote_address(one)
        return remote is not None and (remote in self._listeners or sockets.local_address(one) in self._listener.own)


class GlooWork:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError:  # the time is over, or it has failed
            if not self._work.is_completed():
                return False
            self._work.wait()  # says which, also of one that has ended this very moment
        return True


def _listening() -> set[Address]:
    found = sockets.copies(sockets.is_listening)
    addresses = {sockets.local_address(one) for one in found}
    sockets.close(found)
    return addresses
