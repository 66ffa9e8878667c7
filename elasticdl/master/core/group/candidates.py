"""Candidates: the processes available for a group, their calls that wait for it, and the excluded suspects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BAR = 10.0  # seconds for which a suspect is excluded first
MAX_BAR = 600.0
MAX_SPARED = 3  # attempts, each of about --collective_timeout: a passing fault is over by then


@dataclass(slots=True)
class Candidate:
    """A process that has reported its address.

    Attributes:
        ready_at: Since when it is in no group; None if it has not reported that.
        sent_version: Newest version sent to it of a group that it is in; 0 if none, so it still waits.
    """

    id: int
    incarnation: int
    address: str
    ready_at: float | None = None
    sent_version: int = 0

    @property
    def is_ready(self) -> bool:
        return self.ready_at is not None and not self.sent_version


@dataclass(frozen=True, slots=True)
class Watch:
    """A worker's call that waits for a newer group than the one it knows."""

    call: int
    since: float
    known_version: int


def together(ready: list[Candidate], joiners: list[Candidate]) -> list[Candidate]:
    """Return both, each process once."""
    names = {one.id for one in ready}
    return ready + [one for one in joiners if one.id not in names]


class Suspects:
    """Workers that the next group excludes after a group of live members could not form, and until when.

    Joiners are excluded first: members of the last group worked without them.  Then one after another, the youngest
    first.  An excluded worker is tried again later, each time after twice the time.
    """

    def __init__(self) -> None:
        self._num_tries = 0  # attempts without one member, since a group formed last
        self._num_spared = 0  # attempts with the same members, since a group formed last
        self._num_bars: dict[int, int] = {}
        self._until: dict[int, float] = {}

    def spares(self) -> bool:
        """Count an attempt at a group whose members may each hold a part of the model alone.

        Returns:
            Whether to repeat it with the same members; False after some attempts, so that the wait is limited.
        """
        self._num_spared += 1
        return self._num_spared <= MAX_SPARED

    def of_failed_group(self, members: Sequence[tuple[int, bool]], clock: float) -> set[int]:
        """Return the workers that the next group excludes.

        Args:
            members: Members of the group that could not form, by rank: worker, and whether it was in the last one.
            clock: The present time.
        """
        joiners = {worker_id for worker_id, is_source in members if not is_source}
        if 0 < len(joiners) < len(members):
            found = joiners
        elif len(members) > 1:
            self._num_tries += 1
            found = {members[-1 - (self._num_tries - 1) % len(members)][0]}
        else:
            found = set()
        for worker_id in found:
            bars = self._num_bars[worker_id] = self._num_bars.get(worker_id, 0) + 1
            self._until[worker_id] = clock + min(MAX_BAR, BAR * 2.0 ** min(10, bars - 1))
        return found

    def is_barred(self, worker_id: int, clock: float) -> bool:
        return clock < self._until.get(worker_id, 0.0)

    def has_formed(self, members: Iterable[int]) -> None:
        """Trust these workers again: they have formed a group."""
        self._num_tries = self._num_spared = 0
        for worker_id in members:
            self._num_bars.pop(worker_id, None)
            self._until.pop(worker_id, None)
