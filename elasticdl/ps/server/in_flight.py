"""How updates enter the state: names are claimed, their updates are applied, then the names are added; and the counts.

A name is *claimed* under the lock, its update is applied without the lock, then the name is added.  So no name is
applied twice, updates of several names run in parallel, and a repeated push of a name in flight waits for the first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

from elasticdl.ps.applied import AppliedSet, MinibatchName, common_task
from elasticdl.ps.partition import Buckets, Piece, joined_buckets
from elasticdl.ps.server.model import ModelPart, is_empty
from elasticdl.ps.server.rounds import mean
from elasticdl.ps.wire import PushCall
from elasticdl.rpc import elasticdl_pb2 as pb

_log = logging.getLogger(__name__)


class StateDamagedError(RuntimeError):
    """An update was applied only in part: the state is unusable, and the process must end."""


@dataclass(frozen=True, slots=True)
class InFlightUpdate:
    """Names that are applied together, each to the pieces that lack it.

    Attributes:
        groups: Names, and the pieces that lack exactly these, each with the number of this update there (0 if the
            update is empty: then there is none).
        staleness: By name, the updates that the push's gradient misses.
    """

    pushes: Mapping[MinibatchName, PushCall]
    groups: tuple[tuple[tuple[MinibatchName, ...], tuple[tuple[LivePiece, int], ...]], ...]
    staleness: Mapping[MinibatchName, int]


class InFlightUpdates:
    """The pieces of a model, and the updates in flight.

    Attributes:
        lock: Must be held for everything here but `carry_out`; the users of this class guard their own state with it.
    """

    def __init__(
        self, model: ModelPart, pieces: StatePartition, lock: threading.Lock, load: PsCounters, modulated: bool
    ) -> None:
        """
        Args:
            modulated: Divide the learning rate, or the gradients of Ftrl, by the staleness.
        """
        self.lock = lock
        self.model = model
        self.pieces = pieces
        self._load = load
        self._modulated = modulated
        self._settled = threading.Condition(lock)
        self._under_way: set[MinibatchName] = set()
        self._frozen = False
        self._damaged = False

    @property
    def is_damaged(self) -> bool:
        """Whether an update was applied only in part."""
        return self._damaged

    def check(self) -> None:
        """Raise if the state is damaged.

        Raises:
            StateDamagedError: an update was applied only in part.
        """
        if self._damaged:
            raise StateDamagedError("an earlier update failed in its middle")

    def staleness(self, push: PushCall) -> int:
        """Return how many updates the gradient of a push misses."""
        return max(0, self.pieces.version - push.header.pulled_version)

    def wait_for(self, names: Set[MinibatchName]) -> None:
        """Wait until names can be claimed.

        Raises:
            StateDamagedError: an update was applied only in part.
        """
        self._settled.wait_for(lambda: self._damaged or not (self._frozen or self._under_way & names))
        self.check()

    def claim(self, pushes: Mapping[MinibatchName, PushCall]) -> InFlightUpdate:
        """Claim names after `wait_for`; each must be missing in some piece."""
        groups = []
        for names, pieces in self.pieces.lacking_alike(pushes):
            is_update = not all(is_empty(pushes[name]) for name in names)
            for piece in pieces:
                piece.begun += is_update
            groups.append((names, tuple((piece, piece.begun if is_update else 0) for piece in pieces)))
        self._under_way |= pushes.keys()
        return InFlightUpdate(pushes, tuple(groups), {name: self.staleness(push) for name, push in pushes.items()})

    def carry_out(self, claim: InFlightUpdate) -> None:
        """Apply the updates, then add the names.  Called without the lock.

        Raises:
            StateDamagedError: an update was applied only in part.
        """
        try:
            divisor = max(claim.staleness.values()) if self._modulated else 1
            for names, pieces in claim.groups:
                update = mean({name: claim.pushes[name] for name in names})
                if update is not None:
                    self.model.apply(update, [(piece.buckets, number) for piece, number in pieces], divisor)
        except BaseException as error:
            with self.lock:
                self._damaged = True
                self._settled.notify_all()
            _log.exception("An update failed in its middle")
            raise StateDamagedError("an update failed in its middle") from error
        with self.lock:
            for names, pieces in claim.groups:
                for piece, number in pieces:
                    piece.version += number > 0
                    piece.applied.num_applies += len(names)
                    for name in names:
                        piece.applied.add(name, is_empty(claim.pushes[name]))
            self._under_way -= claim.pushes.keys()
            if not self._under_way:
                self.pieces.merge()
            self._settled.notify_all()
        for name, push in claim.pushes.items():
            self._load.pushed(sum(len(ids) for _, ids, _ in push.rows), claim.staleness[name])

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Wait until no update is in flight; none begins in the block.  Called with the lock held."""
        self._settled.wait_for(lambda: self._damaged or not self._frozen)
        self._frozen = True
        try:
            self._settled.wait_for(lambda: self._damaged or not self._under_way)
            self.check()
            self.pieces.merge()
            yield
        finally:
            self._frozen = False
            self._settled.notify_all()


@dataclass(slots=True, eq=False)
class LivePiece:
    """A piece of a PS's state: buckets whose values have one history, and the names in them.

    Attributes:
        version: Updates applied.
        begun: Updates applied or in flight: the step number of the newest.
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
    """The pieces of one PS.  Callers must hold a lock around every call.

    Normally there is one.  If a checkpoint is restored by another number of PS, a PS may get pieces that were written
    at different times: a push then changes only those that lack its name.  Pieces that have become equal are merged.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = [LivePiece.of(piece) for piece in pieces]
        self.merge()

    @property
    def version(self) -> int:
        """Updates applied, in the piece with the most."""
        return max(piece.version for piece in self._pieces)

    def lacks(self, name: MinibatchName) -> bool:
        """Return whether a piece lacks a name."""
        return any(name not in piece.applied for piece in self._pieces)

    def lacking_alike(
        self, names: Iterable[MinibatchName]
    ) -> list[tuple[tuple[MinibatchName, ...], tuple[LivePiece, ...]]]:
        """Return the pieces that lack some of the names, grouped by the names that they lack."""
        alike: dict[tuple[MinibatchName, ...], list[LivePiece]] = {}
        for piece in self._pieces:
            lacked = tuple(name for name in names if name not in piece.applied)
            if lacked:
                alike.setdefault(lacked, []).append(piece)
        return [(lacked, tuple(pieces)) for lacked, pieces in alike.items()]

    def of_task(self, epoch: int, task: int) -> pb.AppliedTask:
        """Return the minibatches of a task that are in all pieces."""
        return common_task([piece.applied.of_task(epoch, task) for piece in self._pieces])

    def copy(self) -> list[LivePiece]:
        """Return copies of the pieces, to make messages of them without the lock."""
        return [piece.copy() for piece in self._pieces]

    def merge(self) -> None:
        """Merge pieces that have become equal.  No update may be in flight."""
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


def staleness_bin(staleness: int) -> int:
    """Return the bin of a staleness: 0, 1, 2, then 3-4, 5-8, 9-16 and so on."""
    return 0 if staleness <= 0 else (staleness - 1).bit_length() + 1


class PsCounters:
    """The counters of a PS.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted = pb.PsLoad()
        self._staleness: list[int] = []

    @contextmanager
    def call(self, bytes_received: int) -> Iterator[None]:
        """Count the bytes and the time of a call, in the block."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begun
            with self._lock:
                self._counted.bytes_received += bytes_received
                self._counted.busy_seconds += seconds

    def sent(self, num_bytes: int) -> None:
        with self._lock:
            self._counted.bytes_sent += num_bytes

    def pushed(self, num_rows: int, staleness: int) -> None:
        """Count an applied push."""
        place = staleness_bin(staleness)
        with self._lock:
            self._counted.pushes += 1
            self._counted.rows_pushed += num_rows
            self._staleness += [0] * (place + 1 - len(self._staleness))
            self._staleness[place] += 1

    def pulled(self, num_rows: int) -> None:
        with self._lock:
            self._counted.pulls += 1
            self._counted.rows_pulled += num_rows

    def refused(self) -> None:
        """Count a push that was too stale or too late."""
        with self._lock:
            self._counted.refused += 1

    def message(self, table_rows: int, table_bytes: int) -> pb.PsLoad:
        """Return all counters, and the current size of the tables."""
        with self._lock:
            message = pb.PsLoad()
            message.CopyFrom(self._counted)
            message.staleness.extend(self._staleness)
        message.table_rows, message.table_bytes = table_rows, table_bytes
        return message
