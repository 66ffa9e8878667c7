"""Suspects: workers that the next world excludes, when one could not form although all its members live.

Joiners first: members of the last world work without them.  Then one after another, the youngest first.  An excluded
worker is tried again later, each time after twice the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BAR = 10.0  # seconds
MAX_BAR = 600.0


class Suspects:
    """The excluded workers, and until when."""

    def __init__(self) -> None:
        self._num_tries = 0  # of leaving one member out, since a world formed last
        self._num_bars: dict[int, int] = {}
        self._until: dict[int, float] = {}

    def of_failed_world(self, members: Sequence[tuple[int, bool]], clock: float) -> set[int]:
        """Return the workers that the next world excludes.

        Args:
            members: of the world that could not form, in order of rank: worker, and whether it was in the last one.
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
        """These have formed a world: they are trusted again."""
        self._num_tries = 0
        for worker_id in members:
            self._num_bars.pop(worker_id, None)
            self._until.pop(worker_id, None)
