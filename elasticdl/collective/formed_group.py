"""A group of one version in this process: from the first attempt to form it until all its resources are freed.

A group ends once, by whichever comes first: an error of a collective, `end`, or `leave`.  Forming and freeing a group
run in threads of their own, since both can block in the engine; waiting callers return at once.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread

from elasticdl.collective import nccl
from elasticdl.collective.engine import GroupLost, Links, PendingCollective, Tensor
from elasticdl.collective.nccl import store_of
from elasticdl.collective.rendezvous import Rendezvous, RendezvousServer, link
from elasticdl.kernels._native import Mesh, RecordLayer
from elasticdl.rpc.handshake import SecureConnection

_GRACE_S = 0.1  # extra time for an engine that does not end when it should
_FREED_WITHIN_S = 5.0  # limit for an interrupted collective to release its memory, which it mostly does at once
_LOOK_EVERY_S = 0.02  # after each, Python runs signal handlers, and the loss of a peer that NCCL waits for is noticed
_LONGEST_MESSAGE = 200
_log = logging.getLogger("elasticdl.collective")
_RANK = re.compile(r"rank (\d+) (?:has|cannot|does)")
_LOCAL_BUFFER_BYTES = 1 << 20  # of a Unix socket, whose buffer does not grow as TCP's does


class FormedGroup:
    """The group of one version, from the view of one member.

    Attributes:
        waiting_since: Monotonic time at which the calling thread entered a collective; None outside of one.
    """

    def __init__(
        self, version: int, addresses: list[str], rank: int, token: str, place: RendezvousServer, encrypts: bool = False
    ) -> None:
        self.version = version
        self.rank = rank
        self.size = len(addresses)
        self.waiting_since: float | None = None
        self._addresses = addresses
        self._token = token
        self._place = place
        self._encrypts = encrypts
        self._lock = Lock()
        self._settled = Event()
        self._freed = Event()
        self._lost: GroupLost | None = None
        self._on_their_way: list[PendingCollective] = []  # collectives in flight, of the calling thread
        self._is_formed = False
        self._engine = ""
        self._meeting: Rendezvous | None = None
        self._mesh: MeshLinks | None = None
        self._by_device: dict[str, Links] = {}

    @property
    def engine(self) -> str:
        """The name of the engine that sums; empty if this is the only member."""
        return self._engine

    def form(self, device: str, timeout_s: float) -> None:
        """Connect to all other members, in another thread; wait for it.

        Raises:
            GroupLost: it took too long, failed, or was ended.
        """
        if self.size == 1:
            self._is_formed = True
            return
        Thread(target=self._form, args=(device, timeout_s), name="form-group", daemon=True).start()
        if not self._settled.wait(timeout_s + _GRACE_S):
            self.end(f"group {self.version} cannot be formed: it took longer than {timeout_s:.1f} s")
        self.check()

    def check(self) -> None:
        """Raise GroupLost if the group has ended, once nothing writes to the calling thread's memory any more."""
        if self._lost is not None:
            self._let_go()
            raise GroupLost(self._lost.what, self._lost.rank)

    def begin(self, tensor: Tensor, start: Callable[[Links], PendingCollective]) -> PendingCollective:
        """Start a collective, on the engine for the tensor's memory.

        Raises:
            GroupLost: the group has ended.
        """
        self.check()
        kind = tensor.device.type
        links = self._by_device.get(kind)
        if links is None:
            self.check()
            raise ValueError(f"this group was made for the devices {sorted(self._by_device)}, not for {kind}")
        try:
            work = start(links)
        except RuntimeError as error:
            raise self._failed(error) from None
        self._on_their_way.append(work)
        return work

    def moves_whole(self, tensor: Tensor) -> bool:
        """Return whether NCCL moves the tensor in all members: it must not be split, which slows NCCL down."""
        return isinstance(self._by_device.get(tensor.device.type), nccl.NcclLinks)

    def finish(self, work: PendingCollective) -> None:
        """Wait for a collective.

        Raises:
            GroupLost: the group has ended.
        """
        mesh = self._mesh
        with self._waiting():
            try:
                while mesh is not None and not work.wait(_LOOK_EVERY_S):
                    self.check()
                    mesh.check()
            except RuntimeError as error:
                raise self._failed(error) from None
        self._on_their_way.remove(work)
        if mesh is None:
            self.check()

    def end(self, what: str, rank: int | None = None) -> None:
        """Mark the group as lost: operations in flight fail at once, here and at the peers.  Thread-safe."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = GroupLost(what, rank)
            is_formed = self._is_formed
        self._settled.set()
        for one in (self._meeting, *(self._by_device.values() or (self._mesh,))):
            if one is not None:
                one.interrupt()
        if is_formed:
            self._free()

    def leave(self) -> None:
        """Leave a group without collectives in flight."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = GroupLost(f"this process has left group {self.version}")
        if self._is_formed:
            self._free()
        else:
            self._settled.set()

    def wait_until_freed(self, timeout_s: float) -> bool:
        """Wait until an ended group is freed; return whether it was in time."""
        return self.size == 1 or self._freed.wait(timeout_s)

    def _form(self, device: str, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        what, rank = "", None
        try:
            self._connect(device, end)
        except GroupLost:  # the group has ended meanwhile
            pass
        except TimeoutError:
            what = f"group {self.version} cannot be formed: not all came within {timeout_s:.1f} s"
        except (RuntimeError, OSError) as error:
            what = f"group {self.version} cannot be formed: {_in_short(error)}"
            rank = _rank_in(what)
        except Exception as error:  # noqa: BLE001  an engine raises what it likes, and must not end a healthy member
            _log.exception("Group %d cannot be formed", self.version)
            what = f"group {self.version} cannot be formed: {type(error).__name__}: {_in_short(error)}"
        finally:
            with self._lock:
                is_over = self._lost is not None
                self._is_formed = not what and not is_over
            if what:
                self.end(what, rank)
            self._settled.set()
            if not self._is_formed:
                self._free()

    def _connect(self, device: str, end: float) -> None:
        links: dict[int, SecureConnection] = {}
        try:
            for other in range(self.rank):
                self.check()
                links[other] = self._link_to(other, end)
            self.check()
            meeting = self._meeting = Rendezvous(
                self._addresses[0], self._token, self.version, self.rank, _left(end), self._encrypts
            )
            try:
                self.check()
                meeting.publish(f"linked/{self.rank}", b"" if device == "cpu" else nccl.identity(device))
                devices = meeting.wait_for([f"linked/{rank}" for rank in range(self.size)], _left(end))
                links |= self._place.take_links(self.version)
                if len(links) != self.size - 1:
                    raise RuntimeError(f"it has {len(links)} of {self.size - 1} connections")
                self._mesh = mesh = MeshLinks(self.rank, links)
                by_device: dict[str, Links] = {"cpu": mesh}
                self._engine = "the native mesh"
                if device != "cpu" and not self._encrypts and nccl.can_join(devices):
                    store = store_of(meeting, _left(end))
                    nccl.use_family_of(self._addresses[self.rank])
                    by_device["cuda"] = nccl.NcclLinks(store, self.rank, self.size, device)
                    self._engine = f"NCCL {nccl.version()}"
                elif device != "cpu":
                    by_device["cuda"] = nccl.StagedLinks(mesh)
                    why = "which --encrypt needs" if self._encrypts else "as not every worker has a GPU of its own"
                    self._engine += f", through main memory, {why}"
                self._by_device = by_device
            finally:
                self._meeting = None
                meeting.close(farewell=bool(self._by_device))
        finally:
            for connection in links.values():
                connection.socket.close()  # sockets that the mesh has taken are detached

    def _link_to(self, other: int, end: float) -> SecureConnection:
        try:
            return link(self._addresses[other], self._token, self.version, self.rank, _left(end), self._encrypts)
        except TimeoutError:
            raise
        except OSError as error:
            raise RuntimeError(f"rank {other} cannot be reached: {error}") from error

    def _failed(self, error: RuntimeError) -> GroupLost:
        """End the group at once, so that peers that wait for another member are released, too."""
        message = _in_short(error)
        rank = _rank_in(message)
        named = message if rank is None or "rank" in message else f"{message} (rank {rank})"
        self.end(f"group {self.version} is broken: {named}", rank)
        self._let_go()
        assert self._lost is not None
        return GroupLost(self._lost.what, self._lost.rank)

    def _let_go(self) -> None:
        """Wait until no collective writes to the caller's memory any more."""
        end = time.monotonic() + _FREED_WITHIN_S
        while self._on_their_way:
            with suppress(RuntimeError):
                self._on_their_way.pop().wait(max(0.0, end - time.monotonic()))

    def _free(self) -> None:
        links, self._by_device, mesh, self._mesh = [*self._by_device.values()], {}, self._mesh, None
        if mesh is not None and mesh not in links:
            links.append(mesh)

        def free() -> None:
            while links:
                links.pop().close()
            self._freed.set()

        Thread(target=free, name="free-group", daemon=True).start()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.waiting_since = time.monotonic()
        try:
            yield
        finally:
            self.waiting_since = None


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise RuntimeError("it took too long")
    return left


def _rank_in(message: str) -> int | None:
    """Return the rank of the peer that an error names."""
    named = _RANK.search(message)
    return int(named[1]) if named else None


def _in_short(error: Exception) -> str:
    """Return the first sentence of an engine's error, without its source location; for NCCL, the reason."""
    lines = str(error).partition("Last error:")[2].split("\n", 1)[-1].splitlines() or str(error).splitlines()
    first = lines[0] if lines else type(error).__name__
    without_place = first.rpartition(".cc:")[2].partition("] ")[2] or first
    return without_place.partition(". ")[0][:_LONGEST_MESSAGE]


class MeshLinks:
    """Collectives of arrays in main memory, in native code, over a connection between every two members.

    Each connection has begun with the handshake that proves the job's token, and may be encrypted; this class takes it
    over.  A collective fails only by an error of a connection, never by a time-out: it waits for a slow peer.

    Args:
        rank: Rank of this member.
        connections: Connections to the other members, by rank.
    """

    def __init__(self, rank: int, connections: Mapping[int, SecureConnection]) -> None:
        descriptors = [-1] * (len(connections) + 1)
        layers: list[RecordLayer | None] = [None] * len(descriptors)
        for other, (connection, records) in connections.items():
            if connection.family == socket.AF_UNIX:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_BYTES)
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            descriptors[other] = connection.detach()
            layers[other] = records
        self._mesh = Mesh(rank, descriptors, layers)

    def all_reduce(self, tensor: Tensor) -> PendingCollective:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return self._mesh.all_reduce(tensor.data_ptr(), tensor.numel(), dtype, tensor)

    def all_gather(self, into: list[Tensor], tensor: Tensor) -> PendingCollective:
        places = [one.data_ptr() for one in into]
        return self._mesh.all_gather(tensor.data_ptr(), tensor.nbytes, places, (into, tensor))

    def broadcast(self, tensor: Tensor, source: int) -> PendingCollective:
        return self._mesh.broadcast(tensor.data_ptr(), tensor.nbytes, source, tensor)

    def check(self) -> None:
        """Raise RuntimeError if a member has closed its connections without leaving."""
        rank = self._mesh.gone()
        if rank >= 0:
            raise RuntimeError(f"rank {rank} has gone")

    def interrupt(self) -> None:
        self._mesh.interrupt()

    def close(self) -> None:
        self._mesh.close()
