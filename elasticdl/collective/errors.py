"""The exception of a group's members when their world is over, for any reason."""

from __future__ import annotations


class GroupLost(Exception):
    """The world cannot continue: a peer is gone, it could not be formed, or a member abandoned it.

    Attributes:
        what: a description of what happened.
        rank: of the peer at which it was seen first, if known.  It need not be the one that failed: a member that has
            lost the group closes its own connections.
    """

    def __init__(self, what: str, rank: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.rank = rank
