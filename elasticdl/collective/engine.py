"""The port of the engines that run collectives: the native mesh, and NCCL.

Every member calls the same methods in the same order.  Tensors are torch's and contiguous; the caller must not touch
them until the collective has ended.  All methods but `interrupt` are called by one thread.  When the group ends, for
any reason, its members get a `GroupLost`.
"""

from __future__ import annotations

from typing import Any, Protocol

Tensor = Any  # torch is imported lazily, in the engines


class PendingCollective(Protocol):
    """A collective in flight."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the collective; return whether it came in time.

        Raises:
            RuntimeError: the collective failed.
        """
        ...


class Links(Protocol):
    """The connections of a member to all others of its group."""

    def all_reduce(self, tensor: Tensor) -> PendingCollective:
        """Start to sum a tensor over all members, in place."""
        ...

    def all_gather(self, into: list[Tensor], tensor: Tensor) -> PendingCollective:
        """Start to collect a tensor of each member, by rank; all have the same shape."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> PendingCollective:
        """Start to copy the tensor of rank `source` into that of every member."""
        ...

    def interrupt(self) -> None:
        """Make all collectives in flight fail at once, here and, if the engine can, at the peers.  Thread-safe."""
        ...

    def close(self) -> None:
        """Free all resources.  May wait until interrupted collectives have ended."""
        ...


class GroupLost(Exception):
    """The group cannot continue: a peer is gone, it could not be formed, or a member abandoned it.

    Attributes:
        what: What happened.
        rank: Rank of the peer that failed first, as seen here, if known.  It need not be the cause: a member that has
            lost the group closes its own connections.
    """

    def __init__(self, what: str, rank: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.rank = rank
