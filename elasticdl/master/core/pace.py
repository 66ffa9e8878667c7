"""Pace: how fast a job takes records in, and how long what is left of it takes.  It decides nothing.

The time before the first record is start-up and in neither number.  A record that is computed again counts again: what
the job has lost it does not lose every minute, so its pace is what it computes, and what is left is what it has not.
"""

from __future__ import annotations

from bisect import bisect_left

RATE_WINDOW = 30.0  # seconds over which the throughput is taken
MIN_WINDOW = 20.0  # seconds over which the pace is taken at least, as far as they are there
MIN_MEASURED = 2.0  # seconds of work before anything is foretold
MIN_SETTLED, MAX_SETTLED = 3.0, 30.0  # seconds after which another number of workers is no passing loss
MAX_SAMPLES = 512  # of a whole job; of a long one they are further apart


class Pace:
    """Records by time.  Times are seconds on any clock that only grows."""

    def __init__(self) -> None:
        self._recent: list[tuple[float, int]] = []  # records done, within `RATE_WINDOW`
        self._times: list[float] = []  # from the first record of this life of the master on
        self._taken: list[int] = []  # records taken in until then
        self._spacing = 0.0
        self._records = 0
        self._num_workers = 0
        self._differs_since: float | None = None
        self._steady_since = 0.0

    def sample(self, now: float, records: int, num_workers: int) -> None:
        """Take the state of the job in; once a tick.

        Args:
            now: when.
            records: done, over all epochs; fewer than before where the model has lost some.
            num_workers: that have joined.
        """
        self._recent.append((now, records))
        while now - self._recent[0][0] > RATE_WINDOW:
            self._recent.pop(0)
        taken, self._records = max(0, records - self._records), records
        if not self._times:
            if not taken:
                return
            self._steady_since, self._num_workers = now, num_workers
            taken = 0  # what an earlier life of the master has counted took no time of this one
        self._follow(now, num_workers)
        self._append(now, taken)

    def records_per_second(self) -> float:
        """Return the throughput of the last seconds."""
        if len(self._recent) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._recent[0], self._recent[-1]
        return max(0, last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def seconds_for(self, records: int) -> float | None:
        """Return how long the job takes for a number of further records; None while that is unknown."""
        if records <= 0:
            return 0.0
        if not self._times or not self._num_workers:
            return None
        now = self._times[-1]
        begin = max(self._steady_since, now - max(MIN_WINDOW, (now - self._steady_since) / 2))
        first = max(0, bisect_left(self._times, begin))
        measured, taken = now - self._times[first], self._taken[-1] - self._taken[first]
        return records * measured / taken if measured >= MIN_MEASURED and taken else None

    def _follow(self, now: float, num_workers: int) -> None:
        """Begin the measuring anew when another number of workers has come to stay."""
        if num_workers == self._num_workers:
            self._differs_since = None
        elif self._differs_since is None:
            self._differs_since = now
        elif now - self._differs_since >= min(MAX_SETTLED, max(MIN_SETTLED, (now - self._steady_since) / 10)):
            self._num_workers, self._steady_since, self._differs_since = num_workers, self._differs_since, None

    def _append(self, now: float, taken: int) -> None:
        total = (self._taken[-1] if self._taken else 0) + taken
        if len(self._times) > 1 and now - self._times[-2] < self._spacing:
            self._times[-1], self._taken[-1] = now, total
            return
        self._times.append(now)
        self._taken.append(total)
        if len(self._times) > MAX_SAMPLES:
            self._spacing = 2 * (self._times[-1] - self._times[0]) / MAX_SAMPLES
            self._times[:-1], self._taken[:-1] = self._times[:-1:2], self._taken[:-1:2]
