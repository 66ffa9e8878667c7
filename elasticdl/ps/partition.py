"""Which PS owns what, and the content of one PS at one moment.  Each PS owns buckets of ids and of flat dense vectors.

A PS's dense values are those of its own buckets, in order: bucket b of a flat vector of n floats contains the elements
b·n // 1024 … (b+1)·n // 1024 - 1.  Rows come in chunks, because a table may be larger than the free memory.

A client needs only the partition message and the sizes of the model; this module communicates with no process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from elasticdl.frameworks.framework import Floats, Ids, Ranges, Table
from elasticdl.kernels import _native
from elasticdl.rpc import elasticdl_pb2 as pb

NUM_BUCKETS = 1024
ALL_BUCKETS: Buckets = ((0, NUM_BUCKETS),)
Owners = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class PsServer:
    """One incarnation of one PS, and its buckets."""

    address: str
    incarnation: int
    buckets: Buckets


@dataclass(frozen=True, slots=True)
class Partition:
    """The owner of each bucket, and so of each part of a dense vector.

    Attributes:
        version: Grows with every change; 0: some PS are not ready yet.
        servers: The servers, by PS id.
        owners: PS id of the owner of each bucket, [1024].
    """

    version: int
    servers: tuple[PsServer, ...]
    owners: Owners = field(repr=False, compare=False)

    @classmethod
    def from_message(cls, message: pb.Partition) -> Partition:
        """Parse a message; one without buckets means that they are divided evenly.

        Raises:
            ValueError: a bucket has no owner, or two.
        """
        ordered = sorted(message.ps, key=lambda ps: ps.ps_id)
        servers = tuple(
            PsServer(
                ps.address,
                ps.incarnation,
                tuple((r.start, r.end) for r in ps.buckets) or even_buckets(ps_id, len(ordered)),
            )
            for ps_id, ps in enumerate(ordered)
        )
        return cls(message.version, servers, owners_of([server.buckets for server in servers]))

    @property
    def num_ps(self) -> int:
        return len(self.servers)

    def dense_slices(self, ps_id: int, size: int) -> tuple[slice, ...]:
        """Return the slices of a flat vector of `size` floats that a PS owns, in order."""
        return dense_slices(self.servers[ps_id].buckets, size)

    def dense_part(self, ps_id: int, vector: Floats) -> Floats:
        """Return the elements of a flat vector that a PS owns; a view if they are consecutive."""
        return joined([vector[part] for part in self.dense_slices(ps_id, len(vector))])

    def ranges_within(self, ps_id: int, ranges: Ranges, size: int) -> Ranges:
        """Return the part of ranges of a flat vector of `size` floats that a PS owns, as indices into its part."""
        found = []
        before = 0
        for part in self.dense_slices(ps_id, size):
            shift = before - part.start
            cut = ((max(start, part.start) + shift, min(end, part.stop) + shift) for start, end in ranges)
            found += [(start, end) for start, end in cut if start < end]
            before += part.stop - part.start
        return tuple(found)

    def dense_whole(self, parts: Sequence[Floats], size: int) -> Floats:
        """Return the flat vector of `size` floats, from the parts of all PS."""
        if len(parts) == 1:
            return parts[0]
        vector = np.empty(size, np.float32)
        for ps_id, part in enumerate(parts):
            taken = 0
            for place in self.dense_slices(ps_id, size):
                vector[place] = part[taken : taken + place.stop - place.start]
                taken += place.stop - place.start
        return vector

    def split(self, ids: Ids) -> list[npt.NDArray[np.int32]]:
        """Return, for each PS, the positions in `ids` of the ids that it owns, in order."""
        return _native.split(ids, self.owners, self.num_ps)


def even_buckets(ps_id: int, num_ps: int) -> Buckets:
    """Return the buckets of PS k of M: [k·1024 // M, (k + 1)·1024 // M)."""
    return ((ps_id * NUM_BUCKETS // num_ps, (ps_id + 1) * NUM_BUCKETS // num_ps),)


def owners_of(shares: Sequence[Buckets]) -> Owners:
    """Return, for each bucket, the position in `shares` of its owner, [1024].

    Raises:
        ValueError: a bucket has no owner, or two.
    """
    owners = np.full(NUM_BUCKETS, len(shares), np.uint16)
    for owner, share in enumerate(shares):
        for start, end in share:
            if not 0 <= start <= end <= NUM_BUCKETS or (owners[start:end] != len(shares)).any():
                raise ValueError(f"the buckets {start} … {end - 1} of PS {owner} are not its own")
            owners[start:end] = owner
    if shares and (owners == len(shares)).any():
        raise ValueError(f"the bucket {int(np.argmax(owners))} has no owner")
    return owners


def dense_slices(share: Buckets, size: int) -> tuple[slice, ...]:
    """Return the slices of a flat vector of `size` floats that are in the buckets of `share`."""
    return tuple(slice(start * size // NUM_BUCKETS, end * size // NUM_BUCKETS) for start, end in share)


def num_floats(share: Buckets, size: int) -> int:
    """Return how many elements of a flat vector of `size` floats are in the buckets of `share`."""
    return sum(part.stop - part.start for part in dense_slices(share, size))


def slices_within(share: Buckets, own: Buckets, size: int) -> tuple[slice, ...]:
    """Return `dense_slices` as indices into the vector of only the elements of `own`, which includes `share`."""
    found = []
    before = 0
    for own_start, own_end in own:
        first = own_start * size // NUM_BUCKETS
        for start, end in share:
            start, end = max(start, own_start), min(end, own_end)
            if start < end:
                shift = before - first
                found.append(slice(start * size // NUM_BUCKETS + shift, end * size // NUM_BUCKETS + shift))
        before += own_end * size // NUM_BUCKETS - first
    return tuple(found)


def slices_outside(parts: Iterable[slice], ranges: Ranges) -> list[slice]:
    """Return the slices without the elements of ascending ranges."""
    found = []
    for part in parts:
        start = part.start
        for first, end in ranges:
            if start < min(first, part.stop):
                found.append(slice(start, min(first, part.stop)))
            start = max(start, end)
        if start < part.stop:
            found.append(slice(start, part.stop))
    return found


def joined_buckets(spans: Iterable[tuple[int, int]]) -> Buckets:
    """Return ranges in order, with adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)


def joined(parts: Sequence[Floats]) -> Floats:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def buckets(ids: Ids) -> npt.NDArray[np.uint16]:
    """Return the bucket, 0 … 1023, of each id."""
    return _native.buckets(ids)


Buckets = tuple[tuple[int, int], ...]  # ranges [start, end), ascending, of 1,024


@dataclass(frozen=True, slots=True)
class Piece:
    """Buckets whose values have one history; a PS has several only after a restore with another number of PS.

    Attributes:
        version: Updates applied: the optimizer's step count.
        applied: The names in these buckets.
    """

    buckets: Buckets
    version: int
    applied: pb.AppliedSet


@dataclass(frozen=True, slots=True)
class TableChunk:
    """Ids [n], rows [n, dim], optimizer slots by name, each [n, dim]."""

    ids: Ids
    rows: Floats
    slots: Mapping[str, Floats]


Chunks = Callable[[], Iterator[TableChunk]]


@dataclass(frozen=True, slots=True)
class PartSnapshot:
    """One PS's part of a model, with everything needed to continue from it.

    Attributes:
        optimizer: Keras config as JSON; empty: the model is only read.
        total_trainable: Floats of the model's whole flat vector of trainable values.
        trainable: Trainable values of this PS's buckets, [t]; slots by name, each [t].
        tables: The tables; `chunks` has one function for each, which starts from the first row at every call.
        num_rows: Approximate number of rows, by table, as far as known.
        close: Releases what the chunks reference; call it when they are no longer needed.
    """

    optimizer: str
    seed: int
    pieces: tuple[Piece, ...]
    total_trainable: int
    total_non_trainable: int
    trainable: Floats
    trainable_slots: Mapping[str, Floats]
    non_trainable: Floats
    tables: tuple[Table, ...] = ()
    chunks: Mapping[str, Chunks] = field(default_factory=dict)
    num_rows: Mapping[str, int] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None
