"""What a member of a group sees when its world is over, whatever ended it."""

from __future__ import annotations


class GroupLost(Exception):
    """The world cannot go on: a peer is gone, it could not be formed, or somebody abandoned it.

    Attributes:
        what: what happened, in words.
        rank: of the peer at which it was seen first, where that is known.  It need not be the one that failed: who has
            lost the group closes its own connections.
    """

    def __init__(self, what: str, rank: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.rank = rank
