"""Synchronous mode in one PS: gradients are held until a round names them; PS 0 closes rounds.

See `rounds` for why this is exact.  Gradients under an outdated lease are dropped: the new holder of the task pushes
its minibatches again.

`UpdateSettings`: how a PS applies updates, from the job's flags.
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
    """The result of a confirmation: with OK, the rounds that the worker must pass on, or a request to ask again."""

    status: pb.PsStatus
    wait: bool = False
    rounds: tuple[pb.Round, ...] = ()


class Synchronous:
    """Held gradients and rounds.  Methods are called with the lock held, unless they say otherwise."""

    def __init__(self, updates: UpdateSettings, lock: threading.Lock, load: PsCounters) -> None:
        self._tolerance = updates.sync_version_tolerance
        self._lock = lock
        self._load = load
        self._order = threading.Lock()  # rounds are applied one at a time; taken before the other lock
        self._closed = threading.Condition(lock)
        self._held: dict[MinibatchName, PushCall] = {}
        self._rounds = RoundsOfPs0(updates.grads_to_wait)
        self._coordinator = 0
        self._followed = 0

    @property
    def is_waiting(self) -> bool:
        """Whether names wait for a round that may close when fewer workers push."""
        return self._rounds.is_waiting

    @property
    def applied_round(self) -> int:
        """The newest round that this PS has applied."""
        return max(self._followed, self._rounds.newest)

    def hold(self, name: MinibatchName, push: PushCall) -> None:
        """Hold a push, replacing an earlier one with its name."""
        self._held[name] = push

    def let_go(self, lease: int, epoch: int, task: int) -> None:
        """Drop the held pushes of older leases of a task."""
        names = [
            name
            for name, push in self._held.items()
            if (name.epoch, name.task) == (epoch, task) and push.header.lease < lease
        ]
        for name in names:
            del self._held[name]
        self._rounds.withdraw(names)

    def confirm(self, claims: InFlightUpdates, name: MinibatchName, pulled_version: int) -> pb.PsStatus:
        """Confirm, in PS 0, a push that every PS holds; TOO_STALE: it must be computed again.

        `pulled_version` is the version of the values it was computed on.  A skipped minibatch cannot be too late.
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
        """Wait, in PS 0, until the round of a confirmed name is closed, maybe by this call.  Without the lock.

        Args:
            known_round: Rounds after this one are returned, too.
            num_pushing: Returns the number of workers that push; None: unknown.  Call `wake` when it changes.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._close_if_due(claims, num_pushing)
            with self._lock:
                claims.check()
                if self._rounds.is_closed(name):
                    return Confirmed(pb.OK, False, tuple(self._rounds.rounds_since(name, known_round)))
                if not self._rounds.is_confirmed(name):
                    return Confirmed(pb.OK, True)
                if self._rounds.due(num_pushing()):
                    continue
                if not self._closed.wait(deadline - time.monotonic()):
                    return Confirmed(pb.OK, True)

    def wake(self) -> None:
        """Make `wait` check its conditions again."""
        self._closed.notify_all()

    def accept_coordinator(self, incarnation: int) -> None:
        """Set the PS that closes rounds, from a new partition; withdraw confirmations: a PS may lack the names."""
        self._rounds.withdraw()
        if incarnation != self._coordinator:  # the earlier coordinator's rounds are void
            self._coordinator, self._followed = incarnation, 0
        self._closed.notify_all()

    def follow(self, claims: InFlightUpdates, rounds: pb.Rounds) -> None:
        """Apply the held part of rounds, unless they are of an earlier coordinator.  Without the lock."""
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
                claims.wait_for(set())  # not later: no name may be dropped between its choice and its claim
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
        """Claim the held pushes of some names, after `wait_for`; None if none is held."""
        held = {name: self._held.pop(name) for name in names if name in self._held}
        return claims.claim(held) if held else None

    def _note_coordinator(self, incarnation: int) -> None:
        if incarnation > self._coordinator:
            self._coordinator, self._followed = incarnation, 0


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """How a PS applies updates; the attributes are flags of the same names.

    Attributes:
        use_async: Apply each gradient when it comes; otherwise in rounds.
        grads_to_wait: Gradients in a round.
        sync_version_tolerance: Rounds that a gradient may be late.
        max_staleness: Updates that a gradient may miss; 0: any number.
        lr_staleness_modulation: Divide the learning rate (with Ftrl, the gradient) by the updates that it misses.
    """

    use_async: bool = True
    grads_to_wait: int = 1
    sync_version_tolerance: int = 0
    max_staleness: int = 0
    lr_staleness_modulation: bool = False
