"""The pieces of a PS's state that lives: buckets whose values have one history, and the names in them.

Normally there is one.  Parts of a checkpoint that were written at different times give a PS several, when their
number was another: a push then changes only those that lack its name.  Pieces that have become alike are one again.
Callers hold a lock around every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elasticdl.ps.applied import AppliedSet, MinibatchName, common_task
from elasticdl.ps.partition import joined_buckets
from elasticdl.ps.snapshot import Buckets, Piece
from elasticdl.rpc import elasticdl_pb2 as pb


@dataclass(slots=True, eq=False)
class LivePiece:
    """Buckets with one history.

    Attributes:
        version: updates applied.
        begun: updates applied or under way: the step number of the newest.
    """

    buckets: Buckets
    version: int
    applied: AppliedSet
    begun: int

    @classmethod
    def of(cls, piece: Piece) -> LivePiece:
        return cls(piece.buckets, piece.version, AppliedSet.from_message(piece.applied), piece.version)

    def copy(self) -> LivePiece:
        return LivePiece(self.buckets, self.version, self.applied.copy(), self.begun)

    def frozen(self) -> Piece:
        return Piece(self.buckets, self.version, self.applied.to_message())


class StatePartition:
    """All pieces of one PS."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = [LivePiece.of(piece) for piece in pieces]
        self.merge()

    @property
    def version(self) -> int:
        """Updates applied: of the piece that has most."""
        return max(piece.version for piece in self._pieces)

    def lacks(self, name: MinibatchName) -> bool:
        """Whether some piece does not hold a name."""
        return any(name not in piece.applied for piece in self._pieces)

    def lacking_alike(
        self, names: Iterable[MinibatchName]
    ) -> list[tuple[tuple[MinibatchName, ...], tuple[LivePiece, ...]]]:
        """The pieces that lack some of the names, by what they lack."""
        alike: dict[tuple[MinibatchName, ...], list[LivePiece]] = {}
        for piece in self._pieces:
            lacked = tuple(name for name in names if name not in piece.applied)
            if lacked:
                alike.setdefault(lacked, []).append(piece)
        return [(lacked, tuple(pieces)) for lacked, pieces in alike.items()]

    def of_task(self, epoch: int, task: int) -> pb.AppliedTask:
        """Return the part of a task that all pieces hold."""
        return common_task([piece.applied.of_task(epoch, task) for piece in self._pieces])

    def copy(self) -> list[LivePiece]:
        """As they are now: messages of them can be made without the lock."""
        return [piece.copy() for piece in self._pieces]

    def merge(self) -> None:
        """Joins those that have become alike.  No update may be under way."""
        merged: list[LivePiece] = []
        for piece in self._pieces:
            twin = next((known for known in merged if _are_alike(known, piece)), None)
            if twin is None:
                merged.append(piece)
            else:
                twin.buckets = joined_buckets((*twin.buckets, *piece.buckets))
                twin.applied.num_applies += piece.applied.num_applies - piece.applied.num_names
        self._pieces = merged


def _are_alike(one: LivePiece, other: LivePiece) -> bool:
    return one.version == other.version and one.applied.has_same_names(other.applied)
