"""Synchronous mode in one PS: gradients are held until a round names them; PS 0 closes rounds.

`rounds` says why that is exact.  A gradient of a lease that has a successor is let go: the new holder of the task
pushes its names again.

`UpdateSettings`: how a PS takes updates, by the job's flags.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elasticdl.ps.applied import MinibatchName
from elasticdl.ps.server.in_flight import InFlightUpdate, InFlightUpdates, PsCounters
from elasticdl.ps.server.model import is_empty
from elasticdl.ps.server.rounds import RoundsOfPs0
from elasticdl.ps.wire import PushCall
from elasticdl.rpc import elasticdl_pb2 as pb

NumPushing = Callable[[], int | None]


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The outcome of a confirmation: with OK the rounds that the worker must carry on, unless it is to ask again."""

    status: pb.PsStatus
    wait: bool = False
    rounds: tuple[pb.Round, ...] = ()


class Synchronous:
    """Held gradients and rounds.  Methods whose text does not say otherwise are called with the lock held."""

    def __init__(self, updates: UpdateSettings, lock: threading.Lock, load: PsCounters) -> None:
        self._tolerance = updates.sync_version_tolerance
        self._lock = lock
        self._load = load
        self._order = threading.Lock()  # rounds are applied one after the other; taken before the other lock
        self._closed = threading.Condition(lock)
        self._held: dict[MinibatchName, PushCall] = {}
        self._rounds = RoundsOfPs0(updates.grads_to_wait)
        self._coordinator = 0
        self._followed = 0

    @property
    def is_waiting(self) -> bool:
        """Whether names wait for a round that may close as soon as fewer workers push."""
        return self._rounds.is_waiting

    @property
    def applied_round(self) -> int:
        """The newest round that this PS has applied."""
        return max(self._followed, self._rounds.newest)

    def hold(self, name: MinibatchName, push: PushCall) -> None:
        """Instead of what is held of the name."""
        self._held[name] = push

    def let_go(self, lease: int, epoch: int, task: int) -> None:
        """Drops what older leases of a task have brought."""
        names = [
            name
            for name, push in self._held.items()
            if (name.epoch, name.task) == (epoch, task) and push.header.lease < lease
        ]
        for name in names:
            del self._held[name]
        self._rounds.withdraw(names)

    def confirm(self, claims: InFlightUpdates, name: MinibatchName, pulled_version: int) -> pb.PsStatus:
        """PS 0: every PS holds a gradient, computed on a pull of `pulled_version`; TOO_STALE: it must be made again.

        A skipped minibatch has no gradient to be late.
        """
        if self._rounds.is_closed(name) or self._rounds.is_confirmed(name):
            return pb.OK
        held = self._held.get(name)
        is_skipped = held is not None and is_empty(held)
        late = not is_skipped and claims.pieces.version - pulled_version > self._tolerance
        if late or (held is None and claims.pieces.lacks(name)):
            self._held.pop(name, None)
            self._load.refused()
            return pb.TOO_STALE
        self._rounds.confirm(name)
        return pb.OK

    def wait(
        self, claims: InFlightUpdates, name: MinibatchName, known_round: int, num_pushing: NumPushing, timeout_s: float
    ) -> Confirmed:
        """PS 0, without the lock: until the round of a confirmed name is closed, by this call if need be.

        Args:
            known_round: rounds after this one are returned, too.
            num_pushing: workers that push; None: unknown.  `wake` says that it has changed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._close_if_due(claims, num_pushing)
            with self._lock:
                claims.check()
                if self._rounds.is_closed(name):
                    return Confirmed(pb.OK, False, tuple(self._rounds.told(name, known_round)))
                if not self._rounds.is_confirmed(name):
                    return Confirmed(pb.OK, True)
                if self._rounds.due(num_pushing()):
                    continue
                if not self._closed.wait(deadline - time.monotonic()):
                    return Confirmed(pb.OK, True)

    def wake(self) -> None:
        """Something that `wait` waits for has changed."""
        self._closed.notify_all()

    def accept_coordinator(self, incarnation: int) -> None:
        """The partition has changed: set the PS that closes rounds.  Confirmed names may be missing elsewhere."""
        self._rounds.withdraw()
        if incarnation != self._coordinator:  # earlier messages of callers no longer count
            self._coordinator, self._followed = incarnation, 0
        self._closed.notify_all()

    def follow(self, claims: InFlightUpdates, rounds: pb.Rounds) -> None:
        """Without the lock: applies what is held of rounds, but not of those that died with an earlier coordinator."""
        with self._order:
            with self._lock:
                self._note_coordinator(rounds.coordinator)
                if rounds.coordinator < self._coordinator:
                    return
            for one in rounds.rounds:
                self._apply(claims, [MinibatchName(name.epoch, name.task, name.n) for name in one.names])
                with self._lock:
                    self._followed = max(self._followed, one.number)

    def _close_if_due(self, claims: InFlightUpdates, num_pushing: NumPushing) -> None:
        with self._order:
            with self._lock:
                claims.wait_for(set())  # here, not later: between its choice and its claim no name may be let go
                names = self._rounds.due(num_pushing())
                claim = self._claim(claims, names)
            if claim is not None:
                claims.carry_out(claim)
            if names:
                with self._lock:
                    self._rounds.close(names)
                    self._closed.notify_all()

    def _apply(self, claims: InFlightUpdates, names: Sequence[MinibatchName]) -> None:
        with self._lock:
            claims.wait_for(set(names))
            claim = self._claim(claims, names)
        if claim is not None:
            claims.carry_out(claim)

    def _claim(self, claims: InFlightUpdates, names: Sequence[MinibatchName]) -> InFlightUpdate | None:
        """Return the held part of some names, after `wait_for`; None: none is held."""
        held = {name: self._held.pop(name) for name in names if name in self._held}
        return claims.claim(held) if held else None

    def _note_coordinator(self, incarnation: int) -> None:
        if incarnation > self._coordinator:
            self._coordinator, self._followed = incarnation, 0


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Flags of the same names.

    Attributes:
        use_async: each gradient is applied as it comes; otherwise in rounds.
        grads_to_wait: gradients in a round.
        sync_version_tolerance: rounds that a gradient may be late.
        max_staleness: updates that a gradient may miss; 0: any number.
        lr_staleness_modulation: the learning rate, with Ftrl the gradient, is divided by the updates that it misses.
    """

    use_async: bool = True
    grads_to_wait: int = 1
    sync_version_tolerance: int = 0
    max_staleness: int = 0
    lr_staleness_modulation: bool = False
