"""`ElasticGroup`: the collectives of a worker in a group whose members change while the process lives.

One thread calls the collectives; `abandon`, `waiting_seconds` and `address` are thread-safe.  All members must call the
same collectives in the same order, with arrays of the same shapes.

`shared_tensor` and `tensor_of_bytes` return torch tensors on the memory of arrays; `pieces_of` cuts arrays into pieces:
large arrays are split, small ones are joined.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from elasticdl.collective.engine import GroupLost, PendingCollective, Tensor
from elasticdl.collective.formed_group import FormedGroup
from elasticdl.collective.nccl import check_device
from elasticdl.collective.rendezvous import RendezvousServer

_FREED_WITHIN_S = 5.0
_FIRST_MESSAGE_BYTES = 4096  # of a broadcast of bytes: the size, and the first bytes


@dataclass(frozen=True, slots=True)
class Peer:
    """A member of a group.

    Attributes:
        id: Id of the worker.
        address: `host:port` of its rendezvous server (`ElasticGroup.address`).
    """

    id: int
    address: str


class Reduction:
    """A sum or a copy in flight (`ElasticGroup.begin_reduce`, `ElasticGroup.begin_copy`), piece by piece."""

    def __init__(self, formed: FormedGroup, works: Iterable[PendingCollective], tensor: Tensor) -> None:
        self._formed = formed
        self._works = deque(works)
        self._tensor = tensor  # keeps the caller's memory alive

    def wait(self) -> None:
        """Wait until the result is in the buffer.

        Raises:
            GroupLost: the group has ended; the content of the buffer is undefined.
        """
        while self._works:
            self._formed.finish(self._works[0])
            self._works.popleft()


class ElasticGroup:
    """The membership of a process in one group after another.

    Args:
        host: An address of this machine that the other members can reach; ports are chosen freely.
        token: The token of the job, which members prove to each other.
        device: `cpu`, or `cuda` or `cuda:N`: buffers in the memory of that GPU can be summed, too.
        encrypts: Encrypt the network traffic.  Arrays on GPUs go through main memory then: NCCL cannot encrypt.

    Attributes:
        device: The argument.
        address: `host:port` of this process's rendezvous server, open from now on; a group uses the one of its rank 0.

    Raises:
        ElasticDLError: torch is missing or has no such device, or the host is not an address of this machine.
    """

    def __init__(self, host: str, token: str, device: str = "cpu", encrypts: bool = False) -> None:
        self._token = token
        self.device = device
        self._encrypts = encrypts
        check_device(device)
        self._place = RendezvousServer(host, token, encrypts)
        self._lock = Lock()
        self._oldest = 0
        self._formed: FormedGroup | None = None
        self._ended: list[FormedGroup] = []  # groups that may not be freed yet
        self.address = self._place.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def waiting_seconds(self) -> float:
        """Seconds that the calling thread has been inside one collective; 0 outside."""
        formed = self._formed
        since = formed.waiting_since if formed is not None else None
        return 0.0 if since is None else time.monotonic() - since

    @property
    def engine(self) -> str:
        """The name of the engine that sums, for logs: NCCL with its version, or the native mesh; empty: none."""
        formed = self._formed
        return formed.engine if formed is not None else ""

    def form(self, version: int, peers: Sequence[Peer], rank: int, timeout_s: float) -> None:
        """Leave the current group, and become a member of a new one.  All its members must call this.

        Args:
            version: Version of the group; higher than that of any earlier group.
            peers: All members by rank, with this process.
            rank: Rank of this process.
            timeout_s: How long to wait for the other members.

        Raises:
            GroupLost: not all members came in time, one of them died, or `abandon` was called meanwhile.
        """
        if not 0 <= rank < len(peers) or peers[rank].address != self.address:
            raise ValueError(f"rank {rank} of the group {list(peers)} is not this process, {self.address}")
        self.leave()
        with self._lock:
            if version < self._oldest:
                raise GroupLost(f"group {version} has been given up before it was formed")
            self._oldest = version + 1
            formed = self._formed = FormedGroup(
                version, [peer.address for peer in peers], rank, self._token, self._place, self._encrypts
            )
            self._ended = [one for one in self._ended if not one.wait_until_freed(0.0)]
        self._place.drop_links(older_than=version)
        formed.form(self.device, timeout_s)

    def gather(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the values of all members by rank: [n] → [group, n]; n must be the same in all.

        Raises:
            GroupLost: the group has ended.
        """
        formed = self._current()
        mine = np.array(values, np.int64, ndmin=1)  # a copy, since the caller may change its array meanwhile
        result = np.empty((formed.size, *mine.shape), np.int64)
        if formed.size == 1 or mine.size == 0:
            result[:] = mine
            return result
        into = [shared_tensor(row) for row in result]
        sent = shared_tensor(mine)
        formed.finish(formed.begin(sent, lambda links: links.all_gather(into, sent)))
        return result

    def reduce(self, buffers: Sequence[Any]) -> None:
        """Sum every buffer over all members, in place.

        Args:
            buffers: Writable, contiguous numpy arrays, tensors, or objects with `__dlpack__`; not copied.

        Raises:
            GroupLost: the group has ended; the content of the buffers is undefined.
            ValueError: a buffer cannot be summed in place.
        """
        on_their_way = [self.begin_reduce(buffer) for buffer in buffers]
        for reduction in on_their_way:
            reduction.wait()

    def begin_reduce(self, buffer: Any) -> Reduction:
        """Start to sum a buffer as `reduce` does; it must not be touched before `wait` has returned.

        Raises:
            GroupLost: the group has ended.
            ValueError: the buffer cannot be summed in place.
        """
        return self._begin(buffer, lambda tensor, links: links.all_reduce(tensor))

    def begin_copy(self, buffer: Any, source: int) -> Reduction:
        """Start to copy the source's buffer into that of every member; see `begin_reduce`.

        Raises:
            GroupLost: the group has ended.
            ValueError: the buffer cannot be written in place.
        """
        return self._begin(buffer, lambda tensor, links: links.broadcast(tensor, source))

    def _begin(self, buffer: Any, operation: Callable[[Any, Any], Any]) -> Reduction:
        formed = self._current()
        tensor = shared_tensor(buffer)
        if formed.size == 1 or tensor.numel() == 0:
            return Reduction(formed, (), tensor)
        pieces = [tensor] if formed.moves_whole(tensor) else _pieces(tensor)
        return Reduction(formed, [formed.begin(one, partial(operation, one)) for one in pieces], tensor)

    def broadcast(self, arrays: Mapping[str, NDArray[Any]] | None, source: int) -> dict[str, NDArray[Any]]:
        """Send the source's arrays to all members, with their names, types and shapes.

        Args:
            arrays: The arrays to send, in the source; ignored in other members.
            source: Rank of the sender.

        Returns:
            The arrays, in the source's order; in the source, its own.

        Raises:
            GroupLost: the group has ended.
        """
        formed = self._current()
        if formed.rank == source:
            assert arrays is not None, "the source has nothing to give"
            own = {name: np.asarray(array) for name, array in arrays.items()}
            names = [[name, dtype_name(array.dtype), array.shape] for name, array in own.items()]
            self.broadcast_bytes(json.dumps(names).encode(), source)
            flat = [readable_bytes(array) for array in own.values()] if formed.size > 1 else []
        else:
            given = json.loads(self.broadcast_bytes(None, source))
            own = {name: np.empty(shape, named_dtype(dtype)) for name, dtype, shape in given}
            flat = [array.reshape(-1).view(np.uint8) for array in own.values()]
        for piece in pieces_of([part.nbytes for part in flat]):
            self._send(formed, piece, flat, source)
        return own

    def broadcast_bytes(self, data: bytes | None, source: int) -> bytes:
        """Send the source's bytes to all members, and return them.

        Raises:
            GroupLost: the group has ended.
        """
        formed = self._current()
        if formed.size == 1:
            assert data is not None, "the source has nothing to give"
            return data
        first = np.zeros(_FIRST_MESSAGE_BYTES, np.uint8)
        if formed.rank == source:
            assert data is not None, "the source has nothing to give"
            sent = np.frombuffer(data, np.uint8)
            first[:8] = np.frombuffer(len(data).to_bytes(8, "little"), np.uint8)
            first[8 : 8 + len(data)] = sent[: len(first) - 8]
        self._copy(formed, first, source)
        size = int.from_bytes(first[:8].tobytes(), "little")
        if formed.rank != source:
            sent = np.empty(size, np.uint8)
            sent[: len(first) - 8] = first[8 : 8 + size]
        rest = readable_bytes(sent[len(first) - 8 :])
        for piece in pieces_of([rest.nbytes]):
            self._send(formed, piece, [rest], source)
        return data if formed.rank == source and data is not None else sent.tobytes()

    def leave(self) -> None:
        """Leave the group between two steps, without collectives in flight.  All members do the same."""
        with self._lock:
            formed, self._formed = self._formed, None
            if formed is not None:
                self._ended.append(formed)
        if formed is not None:
            formed.leave()

    def abandon(self, reason: str, older_than: int | None = None) -> None:
        """Make calls that wait in the group, or form it, raise GroupLost at once, also at the peers.  Thread-safe.

        Args:
            reason: The message of GroupLost.
            older_than: End only a group of a lower version, also one that is formed after this call.
        """
        with self._lock:
            formed = self._formed
            if older_than is not None:
                self._oldest = max(self._oldest, older_than)
                if formed is not None and formed.version >= older_than:
                    return
        if formed is not None:
            formed.end(reason)

    def close(self) -> None:
        """Leave the group, and wait briefly until all groups are freed; nothing works afterwards.

        A process must call this before it ends: a thread that returns from the engine during the exit would abort it.
        """
        self.leave()
        end = time.monotonic() + _FREED_WITHIN_S
        for formed in self._ended:
            formed.wait_until_freed(max(0.0, end - time.monotonic()))
        self._place.close()

    def _current(self) -> FormedGroup:
        formed = self._formed
        if formed is None:
            raise GroupLost("this process is in no group")
        formed.check()
        return formed

    def _send(self, formed: FormedGroup, piece: Piece, flat: Sequence[NDArray[np.uint8]], source: int) -> None:
        """Copy one piece of the source's bytes to every member."""
        parts = [flat[part.array][part.start : part.end] for part in piece]
        if len(parts) == 1:
            self._copy(formed, parts[0], source)
            return
        together = np.concatenate(parts)
        self._copy(formed, together, source)
        if formed.rank != source:
            for part in parts:
                part[:] = together[: len(part)]
                together = together[len(part) :]

    def _copy(self, formed: FormedGroup, data: NDArray[np.uint8], source: int) -> None:
        tensor = tensor_of_bytes(data)
        formed.finish(formed.begin(tensor, lambda links: links.broadcast(tensor, source)))


SUMMED = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
PIECE_BYTES = 16 << 20
SMALL_BYTES = 256 << 10  # an array below it is copied into a piece with its neighbours


def shared_tensor(buffer: Any) -> Tensor:
    """Return a tensor that shares the memory of a buffer.

    Args:
        buffer: A writable, contiguous numpy array, tensor of torch, or object with `__dlpack__`.

    Raises:
        ValueError: the buffer cannot be summed in place.
    """
    import torch

    if isinstance(buffer, np.ndarray):
        if not buffer.flags.writeable:
            raise ValueError("cannot sum in place: the array is read-only")
        tensor = torch.from_numpy(buffer)
    elif isinstance(buffer, torch.Tensor):
        tensor = buffer.detach()
    elif hasattr(buffer, "__dlpack_device__"):
        tensor = torch.from_dlpack(buffer)
    elif hasattr(buffer, "__dlpack__"):
        tensor = torch.utils.dlpack.from_dlpack(buffer.__dlpack__())
    else:
        raise ValueError(f"cannot sum in place: a {type(buffer).__name__} is no array and has no __dlpack__")
    if not tensor.is_contiguous():
        raise ValueError("cannot sum in place: the array is not contiguous")
    if str(tensor.dtype).removeprefix("torch.") not in SUMMED:
        raise ValueError(f"cannot sum in place: elements of {tensor.dtype}")
    return tensor


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Return parts that even a slow network moves within seconds, so that a long wait for one means no progress.

    The cut depends on the size alone: some members of a mesh may have a GPU, and all must make the same calls.
    """
    if tensor.nbytes <= PIECE_BYTES:
        return [tensor]
    pieces: Sequence[Tensor] = tensor.view(-1).split(PIECE_BYTES // tensor.element_size())
    return pieces


def readable_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of an array for sending: a view, or a copy if it is not contiguous."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat if flat.flags.writeable else np.asarray(_Unlocked(flat))


def tensor_of_bytes(piece: NDArray[np.uint8]) -> Tensor:
    import torch

    return torch.from_numpy(piece)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return a name that `named_dtype` can parse.

    Raises:
        ValueError: elements of that type are not plain bytes.
    """
    if dtype.hasobject or dtype.fields:
        raise ValueError(f"elements of type {dtype} cannot be sent")
    return dtype.name if dtype.kind == "V" else dtype.str


def named_dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:  # bfloat16 and similar types of the frameworks
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found


class _Unlocked:
    """Passes a read-only array to torch without a warning.  The sender only reads it."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


@dataclass(frozen=True, slots=True)
class ArraySlice:
    """Bytes [start, end) of one of the arrays, by number."""

    array: int
    start: int
    end: int


Piece = Sequence[ArraySlice]


def pieces_of(sizes: Sequence[int]) -> Iterator[Piece]:
    """Yield pieces with all bytes of arrays of these sizes, each once and in order; equal in all members."""
    together: list[ArraySlice] = []
    size_together = 0
    for number, size in enumerate(sizes):
        if size == 0:
            continue
        if together and (size >= SMALL_BYTES or size_together + size > PIECE_BYTES):
            yield together
            together, size_together = [], 0
        if size < SMALL_BYTES:
            together.append(ArraySlice(number, 0, size))
            size_together += size
        else:
            for start in range(0, size, PIECE_BYTES):
                yield [ArraySlice(number, start, min(start + PIECE_BYTES, size))]
    if together:
        yield together
