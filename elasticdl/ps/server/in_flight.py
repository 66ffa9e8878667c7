"""How names enter the state: claimed, applied, added.

A name is *claimed* under the lock, its update is applied without it, then the name is added: so none is applied twice,
updates of several names run side by side, and a repetition of one that is under way waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass

from elasticdl.ps.applied import MinibatchName
from elasticdl.ps.server.metrics import PsCounters
from elasticdl.ps.server.model import ModelPart, is_empty
from elasticdl.ps.server.rounds import mean
from elasticdl.ps.server.state_partition import LivePiece, StatePartition
from elasticdl.ps.transport.wire import PushCall

_log = logging.getLogger(__name__)


class StateDamagedError(RuntimeError):
    """An update failed in its middle: the state is worth nothing any more, and the process must end."""


@dataclass(frozen=True, slots=True)
class InFlightUpdate:
    """Names that are being applied together, each to the pieces that lack it.

    Attributes:
        groups: names, and the pieces that lack just these, each with the number that this update has there (0: all
            are empty, there is none).
        staleness: updates that each push misses.
    """

    pushes: Mapping[MinibatchName, PushCall]
    groups: tuple[tuple[tuple[MinibatchName, ...], tuple[tuple[LivePiece, int], ...]], ...]
    staleness: Mapping[MinibatchName, int]


class InFlightUpdates:
    """The pieces of a model, and what is under way.

    Attributes:
        lock: around everything here but `carry_out`, and around what its users guard with it.
    """

    def __init__(
        self, model: ModelPart, pieces: StatePartition, lock: threading.Lock, load: PsCounters, modulated: bool
    ) -> None:
        """
        Args:
            modulated: staleness divides the learning rate.
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
        """Whether an update failed in its middle."""
        return self._damaged

    def check(self) -> None:
        """
        Raises:
            StateDamagedError: an update failed in its middle.
        """
        if self._damaged:
            raise StateDamagedError("an earlier update failed in its middle")

    def staleness(self, push: PushCall) -> int:
        """Updates that its gradient misses."""
        return max(0, self.pieces.version - push.header.pulled_version)

    def wait_for(self, names: Set[MinibatchName]) -> None:
        """Until they can be claimed.

        Raises:
            StateDamagedError: an update failed in its middle.
        """
        self._settled.wait_for(lambda: self._damaged or not (self._frozen or self._under_way & names))
        self.check()

    def claim(self, pushes: Mapping[MinibatchName, PushCall]) -> InFlightUpdate:
        """After `wait_for`; some piece lacks each of the names."""
        groups = []
        for names, pieces in self.pieces.lacking_alike(pushes):
            is_update = not all(is_empty(pushes[name]) for name in names)
            for piece in pieces:
                piece.begun += is_update
            groups.append((names, tuple((piece, piece.begun if is_update else 0) for piece in pieces)))
        self._under_way |= pushes.keys()
        return InFlightUpdate(pushes, tuple(groups), {name: self.staleness(push) for name, push in pushes.items()})

    def carry_out(self, claim: InFlightUpdate) -> None:
        """Applies, then adds the names.  Called without the lock.

        Raises:
            StateDamagedError: it failed in its middle.
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
                        piece.applied.add(name)
            self._under_way -= claim.pushes.keys()
            if not self._under_way:
                self.pieces.merge()
            self._settled.notify_all()
        for name, push in claim.pushes.items():
            self._load.pushed(sum(len(ids) for _, ids, _ in push.rows), claim.staleness[name])

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """With the lock held: nothing is under way, and nothing begins."""
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
