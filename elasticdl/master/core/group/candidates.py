"""Candidates: the processes that a group can be made of, their calls that wait for it, and those that it excludes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BAR = 10.0  # seconds
MAX_BAR = 600.0
MAX_SPARED = 3  # attempts, each of about --collective_timeout: a fault that passes is over by then


@dataclass(slots=True)
class Candidate:
    """A process that has said where it can be reached.

    Attributes:
        ready_at: since when it stands outside of every group; None: it has not said so.
        told: version of the group with it that was sent to it since then; 0: none, so it still waits.
    """

    id: int
    incarnation: int
    address: str
    ready_at: float | None = None
    told: int = 0

    @property
    def is_ready(self) -> bool:
        return self.ready_at is not None and not self.told


@dataclass(frozen=True, slots=True)
class Watch:
    """A call of a worker that waits for a group newer than one."""

    call: int
    since: float
    known_version: int


def together(ready: list[Candidate], joiners: list[Candidate]) -> list[Candidate]:
    """Both, each process once."""
    names = {one.id for one in ready}
    return ready + [one for one in joiners if one.id not in names]


class Suspects:
    """Workers that the next group excludes, when one could not form although all its members live, and until when.

    Joiners first: members of the last group work without them.  Then one after another, the youngest first.  An
    excluded worker is tried again later, each time after twice the time.
    """

    def __init__(self) -> None:
        self._num_tries = 0  # of leaving one member out, since a group formed last
        self._num_spared = 0  # attempts with the same members, since then
        self._num_bars: dict[int, int] = {}
        self._until: dict[int, float] = {}

    def spares(self) -> bool:
        """Count an attempt at a group whose members may each hold what no other does.

        Returns:
            Whether it is made with the same members; after some it is not, so that the job does not wait without end.
        """
        self._num_spared += 1
        return self._num_spared <= MAX_SPARED

    def of_failed_group(self, members: Sequence[tuple[int, bool]], clock: float) -> set[int]:
        """Return the workers that the next group excludes.

        Args:
            members: of the group that could not form, in order of rank: worker, and whether it was in the last one.
            clock: now.
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
        """These have formed a group: they are trusted again."""
        self._num_tries = self._num_spared = 0
        for worker_id in members:
            self._num_bars.pop(worker_id, None)
            self._until.pop(worker_id, None)
