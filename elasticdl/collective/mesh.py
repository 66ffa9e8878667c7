"""Collectives of arrays in main memory: a connection between every two members, moved by native code.

Each connection began with the handshake that proves the job's token, and may be encrypted.  A collective ends by
an error of a connection, never by a clock: it waits for a slow peer.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from elasticdl.collective.engine import PendingCollective, Tensor
from elasticdl.kernels._native import Mesh, RecordLayer
from elasticdl.rpc.handshake import SecureConnection

_LOCAL_BUFFER_BYTES = 1 << 20  # of a Unix socket, which does not grow it as TCP does


class MeshLinks:
    """The connections to all others of a world, which belong to this from now on.

    Args:
        connections: by rank.
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
        """Raise RuntimeError if a member has gone without leaving."""
        rank = self._mesh.gone()
        if rank >= 0:
            raise RuntimeError(f"rank {rank} has gone")

    def interrupt(self) -> None:
        self._mesh.interrupt()

    def close(self) -> None:
        self._mesh.close()
