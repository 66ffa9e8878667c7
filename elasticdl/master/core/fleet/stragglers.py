"""Stragglers: workers whose own computing takes much longer than the others', and the evidence of the cause.

The comparison uses the time in `compute` per minibatch, over a window: waits (for input, parameter servers, other
members) do not count.  A worker that computes for a small part of its time delays no others, however slow it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from elasticdl.activities import Activity
from elasticdl.master.core.events import HeartbeatReceived
from elasticdl.master.core.state import JobState
from elasticdl.master.core.values import CpuUse, Level
from elasticdl.master.core.workers import Worker
from elasticdl_client.choices import Remedy
from elasticdl_client.job_events import EventKind

RATIO = 1.5  # to the median of the others; below that, differences of data and processors are usual
END_RATIO = 1.2  # an episode ends below this ratio, so that a worker near the border does not log many events
SAMPLES = 12  # per window
MIN_MINIBATCHES = 3  # per window: fewer prove little
MIN_SHARE = 0.2  # least share of its time that a worker must compute
REPLACE_EVERY = 600.0  # seconds between two replacements in a job: a start costs a minute or more
MAX_MEDIAN_CHANGE = 1.25  # of the others within a window; beyond it, all workers have changed: the cause is common
NOTABLE = 0.05  # share of the window, throttled or stolen


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    compute: float  # seconds, cumulative
    minibatches: float  # cumulative
    cpu: CpuUse | None


@dataclass(slots=True)
class _Series:
    """The samples of one process, the oldest first; `slow`: it is in an episode."""

    incarnation: int
    samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES + 1))
    slow: bool = False

    def seconds_per_minibatch(self, first: int = 0, last: int = -1) -> float | None:
        """Return the seconds per minibatch between two samples; None for too few minibatches."""
        begin, end = self.samples[first], self.samples[last]
        count = end.minibatches - begin.minibatches
        return (end.compute - begin.compute) / count if count >= MIN_MINIBATCHES else None

    @property
    def share(self) -> float:
        """Share of the window spent in computing."""
        begin, end = self.samples[0], self.samples[-1]
        return (end.compute - begin.compute) / (end.at - begin.at)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A worker to be replaced, and the reason."""

    worker_id: int
    why: str


class Stragglers:
    """Compares the workers of a job."""

    def __init__(self, state: JobState) -> None:
        self._settings, self._workers, self._out = state.settings, state.workers, state.out
        # An earlier generation of the master may have replaced one just before its end; negative: none was replaced.
        self._replaced_at = -1.0 if state.generation == 1 else 0.0
        self._series: dict[int, _Series] = {}

    def on_heartbeat(self, worker: Worker, event: HeartbeatReceived, clock: float) -> None:
        """Add a sample from a heartbeat."""
        series = self._series.get(worker.id)
        if series is None or series.incarnation != worker.incarnation:
            series = self._series[worker.id] = _Series(worker.incarnation)
        every = self._settings.straggler_window / SAMPLES
        if not series.samples or clock - series.samples[-1].at >= every:
            compute = event.seconds.get(Activity.COMPUTE, 0.0)
            series.samples.append(_Sample(clock, compute, worker.num_minibatches, event.cpu))

    def find(self, clock: float) -> Straggler | None:
        """Compare the workers; return one to be replaced, or None."""
        known = {worker.id for worker in self._workers.staying()}
        self._series = {worker_id: series for worker_id, series in self._series.items() if worker_id in known}
        whole = {worker_id: one for worker_id, one in self._series.items() if self._is_whole(one, clock)}
        rates = {worker_id: rate for worker_id, one in whole.items() if (rate := one.seconds_per_minibatch())}
        found, in_order = None, sorted(rates.values())
        for worker_id, rate in rates.items() if len(rates) > 1 else ():
            usual, series = _median_of_others(in_order, rate), whole[worker_id]
            if series.slow and rate < END_RATIO * usual:
                series.slow = False
                self._out.log(f"Worker {self._settings.name_of(worker_id)} computes as fast as the others again")
            if rate > RATIO * usual and series.share >= MIN_SHARE:
                if not series.slow:
                    series.slow = True
                    self._add(worker_id, series, rate, usual)
                others = (whole[other] for other in rates if other != worker_id)
                if found is None and self._may_replace(clock, others):
                    found = Straggler(worker_id, f"it computes {rate / usual:.1f} times as long as the others")
        if found is not None:
            self._replaced_at = clock
        return found

    def _is_whole(self, series: _Series, clock: float) -> bool:
        """Return whether the samples cover a window that ends now."""
        every = self._settings.straggler_window / SAMPLES
        return len(series.samples) == SAMPLES + 1 and clock - series.samples[-1].at < 2 * every

    def _may_replace(self, clock: float, others: Iterable[_Series]) -> bool:
        if self._settings.straggler_action is not Remedy.REPLACE:
            return False
        if self._replaced_at >= 0 and clock - self._replaced_at < REPLACE_EVERY:
            return False
        half = SAMPLES // 2
        halves = [(one.seconds_per_minibatch(0, half), one.seconds_per_minibatch(half)) for one in others]
        known = [(before, after) for before, after in halves if before and after]
        if not known:
            return False
        before, after = median(one for one, _ in known), median(one for _, one in known)
        return max(before, after) <= MAX_MEDIAN_CHANGE * min(before, after)

    def _add(self, worker_id: int, series: _Series, rate: float, usual: float) -> None:
        begin, end = series.samples[0], series.samples[-1]
        window, ratio = end.at - begin.at, rate / usual
        throttled = stolen = load = cores = 0.0
        if begin.cpu is not None and end.cpu is not None:
            throttled = max(0.0, end.cpu.throttled_seconds - begin.cpu.throttled_seconds) / window
            stolen = max(0.0, end.cpu.steal_seconds - begin.cpu.steal_seconds) / window
            load, cores = end.cpu.load, end.cpu.cores
        reasons = [f"its CPU limit throttled it for {100 * throttled:.0f} % of the time"] if throttled > NOTABLE else []
        reasons += [f"the hypervisor took {100 * stolen:.0f} % of the processors"] if stolen > NOTABLE else []
        reasons += [f"the machine has a load of {load:.1f} on {cores:.0f} processors"] if 0 < cores < load else []
        text = f"computes a minibatch in {rate:.3g} s, the others in {usual:.3g} s (median): {ratio:.1f} times as long"
        text += f"; {'; '.join(reasons)}" if reasons else ""
        process = self._settings.process_of(worker_id)
        self._out.events.add(
            EventKind.WORKER_SLOW,
            self._settings.subject_of(worker_id),
            f"{process}: {text}" if process else text,
            0,
            ratio=round(ratio, 2),
            seconds=rate,
            median=usual,
            window=round(window, 1),
            throttled=round(throttled, 3),
            steal=round(stolen, 3),
            load=load,
            cores=cores,
            action=self._settings.straggler_action.value,
        )
        self._out.persist()
        self._out.log(f"Worker {self._settings.name_of(worker_id)} {text}", Level.WARNING)


def _median_of_others(in_order: Sequence[float], one: float) -> float:
    """Return the median of sorted numbers, two or more, without one of them."""
    place, count = bisect_left(in_order, one), len(in_order) - 1
    low, high = ((count - 1) // 2, count // 2)
    return (in_order[low + (low >= place)] + in_order[high + (high >= place)]) / 2
