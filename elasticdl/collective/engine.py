"""The port to the engines: the requirements of a group.  Above it nothing knows the mesh or NCCL.

Every member calls the same verbs in the same order.  Tensors are torch's, contiguous, and belong to the collective
until its work has ended.  Every verb but `interrupt` is called by one thread.  When the group is over, for any reason,
its members get a `GroupLost`.
"""

from __future__ import annotations

from typing import Any, Protocol

Tensor = Any  # torch is imported lazily, in the engines


class PendingCollective(Protocol):
    """A collective on its way."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within the time.

        Raises:
            RuntimeError: it failed.
        """
        ...


class Links(Protocol):
    """The connections of a member to all others of its group."""

    def all_reduce(self, tensor: Tensor) -> PendingCollective:
        """Begins to sum in place."""
        ...

    def all_gather(self, into: list[Tensor], tensor: Tensor) -> PendingCollective:
        """Begins to collect a tensor of each member, by rank; all have the same shape."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> PendingCollective:
        """Begin to copy the source's tensor into that of every member."""
        ...

    def interrupt(self) -> None:
        """Any thread, at once: makes everything on its way fail, here and, where the engine can, at the peers."""
        ...

    def close(self) -> None:
        """Frees everything.  May wait until what was interrupted has ended."""
        ...


class GroupLost(Exception):
    """The group cannot continue: a peer is gone, it could not be formed, or a member abandoned it.

    Attributes:
        what: a description of what happened.
        rank: of the peer at which it was seen first, if known.  It need not be the one that failed: a member that has
            lost the group closes its own connections.
    """

    def __init__(self, what: str, rank: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.rank = rank
