"""Which PS holds what: slices of the flat dense vectors, buckets of the id space.

Everything that a client needs is the partition message and the model's sizes; nothing here talks to anybody.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elasticdl.frameworks.framework import Ids
from elasticdl.ps.hashing import mix64
from elasticdl.rpc import elasticdl_pb2 as pb

NUM_BUCKETS = 1024
_BUCKET_SHIFT = np.uint64(54)  # the top ten bits; tables of rows use the lowest


@dataclass(frozen=True, slots=True)
class PsServer:
    """One life of one PS."""

    address: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Partition:
    """Who holds what.

    Attributes:
        version: grows with every change; 0: not every PS is ready yet.
        servers: by PS id.
    """

    version: int
    servers: tuple[PsServer, ...]

    @classmethod
    def from_message(cls, message: pb.Partition) -> Partition:
        ordered = sorted(message.ps, key=lambda ps: ps.ps_id)
        return cls(message.version, tuple(PsServer(ps.address, ps.incarnation) for ps in ordered))

    @property
    def num_ps(self) -> int:
        return len(self.servers)

    def dense_slice(self, ps_id: int, size: int) -> slice:
        """The part of a flat vector of `size` floats that a PS holds."""
        return dense_slice(ps_id, self.num_ps, size)

    def split(self, ids: Ids) -> list[npt.NDArray[np.intp] | None]:
        """For each PS the positions in `ids` of those that it owns, in order; None: all of them."""
        if self.num_ps == 1:
            return [None]
        owners = bucket_owners(self.num_ps)[buckets(ids)]
        return [np.flatnonzero(owners == ps_id) for ps_id in range(self.num_ps)]


def dense_slice(ps_id: int, num_ps: int, size: int) -> slice:
    """PS k of M holds [k·size // M, (k + 1)·size // M)."""
    return slice(ps_id * size // num_ps, (ps_id + 1) * size // num_ps)


def buckets(ids: Ids) -> npt.NDArray[np.int64]:
    """The bucket, 0 … 1023, of each id."""
    return (mix64(ids) >> _BUCKET_SHIFT).view(np.int64)


def bucket_owners(num_ps: int) -> npt.NDArray[np.int64]:
    """The PS that owns each bucket."""
    return np.arange(NUM_BUCKETS, dtype=np.int64) * num_ps // NUM_BUCKETS
