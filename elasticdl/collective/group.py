"""`ElasticGroup`: the collectives of a worker in a group that changes, in one living process.

One thread calls the collectives; `abandon`, `waiting_seconds` and `address` are for any thread.  All members call the
same collectives in the same order, with arrays of the same shapes.

`shared_tensor` and `tensor_of_bytes` see arrays as tensors of torch on the same memory; `pieces_of` cuts them to send.

Large arrays are cut into pieces, small ones are put together into one.
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
_FIRST_MESSAGE_BYTES = 4096  # of bytes sent to all: their number and the first of them


@dataclass(frozen=True, slots=True)
class Peer:
    """A member of a group.

    Attributes:
        id: of the worker.
        address: `host:port` of its meeting place (`ElasticGroup.address`).
    """

    id: int
    address: str


class Reduction:
    """A sum or a copy on its way (`ElasticGroup.begin_reduce`, `ElasticGroup.begin_copy`), piece by piece."""

    def __init__(self, formed: FormedGroup, works: Iterable[PendingCollective], tensor: Tensor) -> None:
        self._formed = formed
        self._works = deque(works)
        self._tensor = tensor  # and with it the caller's memory

    def wait(self) -> None:
        """Returns when the result is in the buffer.

        Raises:
            GroupLost: there will be none; the buffer holds anything.
        """
        while self._works:
            self._formed.finish(self._works[0])
            self._works.popleft()


class ElasticGroup:
    """A process's place in one group after another.

    Args:
        host: an address of this machine at which the other members reach it; everything listens there, at any port.
        token: of the job; every member proves it to the others.
        device: `cpu`, or `cuda` or `cuda:N`: buffers in the memory of that GPU can be summed, too.
        encrypts: the traffic on the network; arrays on GPUs come to main memory for it, because NCCL does not encrypt.

    Attributes:
        device: as given.
        address: `host:port` of this process's own meeting place, open from now on; that of rank 0 serves its group.

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
        self._ended: list[FormedGroup] = []  # those that are perhaps not freed yet
        self.address = self._place.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def waiting_seconds(self) -> float:
        """For how long the calling thread has been inside one collective; 0 outside."""
        formed = self._formed
        since = formed.waiting_since if formed is not None else None
        return 0.0 if since is None else time.monotonic() - since

    @property
    def engine(self) -> str:
        """The name of the engine that sums, for people: NCCL with its version, or the native mesh; empty: none."""
        formed = self._formed
        return formed.engine if formed is not None else ""

    def form(self, version: int, peers: Sequence[Peer], rank: int, timeout_s: float) -> None:
        """Becomes a member of a group, leaving the one before.  All its members call this.

        Args:
            version: higher than that of any group before.
            peers: all members by rank, this process among them.
            rank: this process's own.
            timeout_s: for how long it waits for the others.

        Raises:
            GroupLost: they did not all come in time, one of them died, or this was abandoned meanwhile.
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
        """The values of all members by rank: [n] → [group, n]; n is the same for all.

        Raises:
            GroupLost: the group is over.
        """
        formed = self._current()
        mine = np.array(values, np.int64, ndmin=1)  # a copy, as the caller may change its own meanwhile
        result = np.empty((formed.size, *mine.shape), np.int64)
        if formed.size == 1 or mine.size == 0:
            result[:] = mine
            return result
        into = [shared_tensor(row) for row in result]
        sent = shared_tensor(mine)
        formed.finish(formed.begin(sent, lambda links: links.all_gather(into, sent)))
        return result

    def reduce(self, buffers: Sequence[Any]) -> None:
        """Sums every buffer over all members, in place.

        Args:
            buffers: writable and contiguous: numpy arrays, tensors, or anything with `__dlpack__`; not copied.

        Raises:
            GroupLost: the group is over; the buffers hold anything.
            ValueError: a buffer cannot be summed in place.
        """
        on_their_way = [self.begin_reduce(buffer) for buffer in buffers]
        for reduction in on_their_way:
            reduction.wait()

    def begin_reduce(self, buffer: Any) -> Reduction:
        """Begins to sum a buffer as `reduce` does; it must not be touched before `wait` has returned.

        Raises:
            GroupLost: the group is over.
            ValueError: the buffer cannot be summed in place.
        """
        return self._begin(buffer, lambda tensor, links: links.all_reduce(tensor))

    def begin_copy(self, buffer: Any, source: int) -> Reduction:
        """Begin to copy the source's buffer into that of every member; as `begin_reduce`.

        Raises:
            GroupLost: the group is over.
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
        """Gives the source's arrays to all.  Names, types and shapes travel with them.

        Args:
            arrays: of the source; of the others None, or anything, which is not read.
            source: rank of the member that gives.

        Returns:
            The arrays, in the source's order; at the source its own.

        Raises:
            GroupLost: the group is over.
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
        """Gives the source's bytes to all.

        Raises:
            GroupLost: the group is over.
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
        """End membership between two steps, with no collective in flight.  All remaining members do the same."""
        with self._lock:
            formed, self._formed = self._formed, None
            if formed is not None:
                self._ended.append(formed)
        if formed is not None:
            formed.leave()

    def abandon(self, reason: str, older_than: int | None = None) -> None:
        """Any thread: calls that wait in the group, or to form it, raise GroupLost at once, also at the peers.

        Args:
            reason: the message of GroupLost.
            older_than: only a group of a lower version; one that is formed later than this call counts, too.
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
        """Leaves, and waits a little until everything is freed; nothing works afterwards.

        A process must not end before: a thread that comes back from the engine then would abort it.
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
    """A tensor on the memory of a buffer: writes to it show in the buffer.

    Args:
        buffer: a writable numpy array, a tensor of torch, or anything with `__dlpack__`; contiguous.

    Raises:
        ValueError: it cannot be summed in place.
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
    """Parts that a slow network, too, moves within seconds: a wait for one of them says that nothing moves.

    By the size alone: of members that sum by the mesh some may have a GPU, and all must make the same calls.
    """
    if tensor.nbytes <= PIECE_BYTES:
        return [tensor]
    pieces: Sequence[Tensor] = tensor.view(-1).split(PIECE_BYTES // tensor.element_size())
    return pieces


def readable_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of an array for sending: a view, or a copy if it is not contiguous."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat if flat.flags.writeable else np.asarray(_Unlocked(flat))


def tensor_of_bytes(piece: NDArray[np.uint8]) -> Tensor:
    import torch

    return torch.from_numpy(piece)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """A name that `named_dtype` knows.

    Raises:
        ValueError: elements of that type are not plain bytes.
    """
    if dtype.hasobject or dtype.fields:
        raise ValueError(f"elements of type {dtype} cannot be sent")
    return dtype.name if dtype.kind == "V" else dtype.str


def named_dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:  # bfloat16 and the like, which frameworks bring with them
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found


class _Unlocked:
    """A read-only array as one that torch takes without a warning.  It is read only, by the sender."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


@dataclass(frozen=True, slots=True)
class ArraySlice:
    """Bytes [start, end) of the array of that number."""

    array: int
    start: int
    end: int


Piece = Sequence[ArraySlice]


def pieces_of(sizes: Sequence[int]) -> Iterator[Piece]:
    """All bytes of arrays of these sizes, each once and in order; the same pieces in every member."""
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
