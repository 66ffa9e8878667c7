"""ScalingPolicy: chooses a job's number of workers by how much another worker adds to its rate.

Pure: observations in, decisions out; no clock and no thread.  The rate is measured in samples at each number of workers
that the job has had, a `RatePoint` each.  The *gain* between two numbers is the difference of their rates per
additional worker, as a share of what one worker computes alone.  The job grows while the gain is above `min_gain`, by
doubling; between a number that gains and one that does not, the middle is tried.

A difference counts when Student's test finds it significant.  Waits of workers show a bottleneck sooner than the
rate does: then two samples are enough.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from elasticdl_client.goodput import SlotState
from elasticdl_client.worker_range import Bottleneck, WorkerRange

SAMPLES = 10  # per window
QUICK_SAMPLES = 2  # enough to show what workers wait for
MAX_SAMPLES = 4 * SAMPLES  # with so many, the sign of a difference decides
PATIENCE_WINDOWS = 10  # how long to wait for room for workers that are needed only for a measurement
MEMORY_WINDOWS = 120  # after these a measurement is repeated: an hour with windows of 30 s
MINIBATCHES = 2  # of each worker in a sample, at least
_QUANTILE = 3.0  # of the normal distribution: noise alone exceeds it in 0.3 % of tests, and each sample is a test
_CHANGE_QUANTILE = 5.0  # for the rate at one number, which is tested again and again, for hours
_CHANGE = 0.2  # of the rate; a smaller change does not mean another curve
_DISTURBED = 0.1  # of the workers' time: a sample with more time in start or recovery is dropped
_RISE = 0.1  # of the workers' time: waiting that has grown by less is not the bottleneck
_SUDDEN_RISE = 0.25  # of the workers' time: the same while the number of workers stays
_MOST_LIKENESS = 0.9  # bound of the autocorrelation of samples, with which a window is worth half a sample
_STEADY = 0.1  # of the workers' time: waiting that grows faster from sample to sample has not reached its full extent
_PRECISION = 8  # numbers of workers are distinguished to an eighth

_WAITS = {
    SlotState.WAITING_PS: Bottleneck.PARAMETER_SERVERS,
    SlotState.INPUT: Bottleneck.INPUT,
    SlotState.WAITING_GROUP: Bottleneck.GROUP,
    SlotState.IDLE: Bottleneck.TASKS,
}
_SUDDEN = (Bottleneck.PARAMETER_SERVERS, Bottleneck.INPUT)
"""An epoch's last tasks are no reason to shrink at once, and a group that forms is none."""
_DISTURBANCES = (
    SlotState.STARTING,
    SlotState.RECOVERING,
    SlotState.EVALUATING,
    SlotState.SAVING,
    SlotState.MASTER_AWAY,
)


class Verdict(StrEnum):
    """The state of the search for the number of workers."""

    MEASURING = "measuring"
    GROWING = "growing"  # each worker so far has gained enough
    REFINING = "refining"  # a number between two others is tried
    SHRINKING = "shrinking"  # the last workers gain too little
    SETTLED = "settled"
    WAITING = "waiting for room"
    ENDING = "ending"  # the job ends before another worker would help


@dataclass(frozen=True, slots=True)
class Observation:
    """A job at one moment.

    Attributes:
        at: Seconds of any clock that only grows.
        records: Number of records computed so far; decreases if the model loses some.
        num_working: Number of registered workers.
        num_wanted: Number of workers that the job is to have.
        seconds: Seconds of all workers so far, by `goodput.SlotState`.
        seconds_left: Seconds until the job's end at the present rate; None if unknown.
    """

    at: float
    records: int
    num_working: int
    num_wanted: int
    seconds: Mapping[str, float]
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of workers that a job is to have, and the reason.

    Attributes:
        gain: Gain of each worker beyond `num_workers`, or of each of the last ones if that is unknown; as a share of
            what one worker computes alone; None before the first measurement.
        bottleneck: Why another worker would add little; None if unknown.
    """

    num_workers: int
    verdict: Verdict
    gain: float | None = None
    bottleneck: Bottleneck | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Records per second, and the shares of their time that workers wait, by bottleneck."""

    rate: float
    waits: tuple[float, ...]

    @property
    def busy(self) -> float:
        """Share of their time that workers compute."""
        return max(0.0, 1.0 - sum(self.waits))


@dataclass(slots=True)
class RatePoint:
    """The newest samples at one number of workers.

    Attributes:
        is_bound: The waits of workers have shown that the last of them gain too little.
    """

    num_workers: int
    samples: deque[Sample]
    is_bound: bool = False

    @property
    def rate(self) -> float:
        return _mean([one.rate for one in self.samples])

    @property
    def waits(self) -> tuple[float, ...]:
        return _mean_waits(self.samples)

    @property
    def has_window(self) -> bool:
        """Whether there are enough samples for a test."""
        return len(self.samples) >= SAMPLES

    @property
    def is_known(self) -> bool:
        return self.has_window or self.is_bound


class RateCurve:
    """A job's measured rate by its number of workers; the state on which a `ScalingPolicy` decides.

    Attributes:
        is_new: No step with too little gain was found yet: the job grows by doubling.
        changed_at: When the policy last changed the number.
        has_grown: The present number of workers is greater than the previous one.
        settled: Result of a finished search; None while it runs.
    """

    def __init__(self) -> None:
        self.points: dict[int, RatePoint] = {}
        self.is_new = True
        self.changed_at = -math.inf
        self.has_grown = False
        self.settled: Decision | None = None
        self._settled_at = -math.inf
        self._num_working = 0
        self._begin: Observation | None = None
        self._measured_from = -math.inf
        self._saved: list[Any] | None = None  # the points for the journal, which is written more often than they change

    def observe(self, now: Observation, policy: ScalingPolicy) -> bool:
        """Add an observation; return whether a sample is complete."""
        begin = self._begin
        if now.num_working != self._num_working:
            self.has_grown, self._num_working = now.num_working > self._num_working, now.num_working
        if begin is None or now.num_working != begin.num_working or now.records < begin.records:
            self._begin, self._measured_from = now, now.at + policy.settle_s
            return False
        if now.at < self._measured_from:
            self._begin = now
            return False
        length, records, num_working = now.at - begin.at, now.records - begin.records, now.num_working
        if length < policy.sample_s or not num_working or records < policy.sample_records * num_working:
            return False
        spent = {state: now.seconds.get(state, 0.0) - begin.seconds.get(state, 0.0) for state in SlotState}
        self._begin = now
        whole = length * num_working
        if sum(spent[state] for state in _DISTURBANCES) > _DISTURBED * whole:
            return False
        waits = tuple(min(1.0, max(0.0, spent[state] / whole)) for state in _WAITS)
        self._add(num_working, Sample(records / length, waits))
        if self.settled is not None and now.at > self._settled_at + policy.memory_s:
            self.restart(num_working, SAMPLES)
        return True

    def _add(self, num_workers: int, sample: Sample) -> None:
        point = self.points.setdefault(num_workers, RatePoint(num_workers, deque(maxlen=MAX_SAMPLES)))
        point.samples.append(sample)
        self._saved = None
        samples = list(point.samples)
        if len(samples) >= 2 * SAMPLES and _is_other_rate(samples[:-SAMPLES], samples[-SAMPLES:]):
            self.restart(num_workers, QUICK_SAMPLES)  # older samples may be from before the change

    def restart(self, num_workers: int, num_samples: int) -> None:
        """Restart the search; keep only the newest samples at one number, since the curve may have changed."""
        samples = list(self.points[num_workers].samples)[-num_samples:]
        self.points = {num_workers: RatePoint(num_workers, deque(samples, MAX_SAMPLES))}
        self.is_new, self.settled, self._saved = False, None, None

    def settle(self, decision: Decision, at: float) -> None:
        """End the search with a result."""
        self.settled, self._settled_at = decision, at

    def interrupt(self) -> None:
        """Restart the present sample, because no tasks are handed out."""
        self._begin = None

    def to_journal(self, now: float) -> dict[str, Any]:
        """Return what the next master must know, in JSON types only; the caller must not change it.

        Args:
            now: See `Observation.at`.
        """
        if self._saved is None:
            self._saved = [
                [one.num_workers, one.is_bound, [[_short(each.rate), *map(_short, each.waits)] for each in one.samples]]
                for one in self.points.values()
            ]
        one = self.settled
        settled = None if one is None else [round(now - self._settled_at, 1), one.num_workers, one.gain, one.bottleneck]
        changed = None if math.isinf(self.changed_at) else round(now - self.changed_at, 1)
        return {"is_new": self.is_new, "changed": changed, "settled": settled, "points": self._saved}

    @classmethod
    def from_journal(cls, saved: Mapping[str, Any], now: float) -> RateCurve:
        """Return the curve of a result of `to_journal`; `now` may be of another clock."""
        curve = cls()
        curve.is_new = bool(saved["is_new"])
        if (age := saved.get("changed")) is not None:  # journals of older versions lack it
            curve.changed_at = now - age
        if saved["settled"] is not None:
            age, number, gain, bottleneck = saved["settled"]
            reason = None if bottleneck is None else Bottleneck(bottleneck)
            curve.settle(Decision(number, Verdict.SETTLED, gain, reason), now - age)
        for num_workers, is_bound, samples in saved["points"]:
            kept = deque((Sample(rate, tuple(waits)) for rate, *waits in samples), MAX_SAMPLES)
            curve.points[num_workers] = RatePoint(num_workers, kept, is_bound)
        return curve


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """Decides the number of workers of a job.

    Attributes:
        min_gain: The least that another worker must add, as a share of what one computes alone.
        window_s: Seconds over which a rate is measured; a change of the number rests on at least this much.
        sample_records: Least number of records of each worker in a sample; below, whole minibatches round the rate.
    """

    min_gain: float = 0.3
    window_s: float = 30.0
    sample_records: int = 0

    @property
    def sample_s(self) -> float:
        """Least duration of a sample, in seconds."""
        return self.window_s / SAMPLES

    @property
    def settle_s(self) -> float:
        """Seconds after a change of the number of workers that belong to no sample."""
        return 2 * self.sample_s

    @property
    def memory_s(self) -> float:
        """Seconds after which a finished search is repeated."""
        return MEMORY_WINDOWS * self.window_s

    def decide(self, curve: RateCurve, now: Observation, bounds: WorkerRange) -> Decision:
        """Return the number of workers that the job is to have now; call it when a sample is complete.

        Args:
            curve: All samples; what a sudden bottleneck has made wrong is dropped from it.
            now: The state of the job.
            bounds: Bounds of the number of workers.
        """
        point = curve.points.get(now.num_working)
        if point is None or now.num_working > now.num_wanted:
            return Decision(now.num_wanted, Verdict.MEASURING)
        if (sudden := self._sudden(curve, point, now, bounds)) is not None:
            return sudden
        if curve.settled is not None and curve.settled.num_workers == now.num_wanted:
            return curve.settled
        is_late = now.num_working < now.num_wanted and now.at >= curve.changed_at + 2 * self.window_s
        found = self._search(curve, point, bounds, can_grow=not is_late)
        if found is None:
            return Decision(now.num_wanted, Verdict.MEASURING)
        is_growth = found.num_workers > now.num_wanted
        if now.num_working < now.num_wanted and found.num_workers >= now.num_working:
            if not is_late:
                return Decision(now.num_wanted, Verdict.MEASURING, found.gain)
            if found.verdict is not Verdict.REFINING or now.at < curve.changed_at + PATIENCE_WINDOWS * self.window_s:
                return Decision(now.num_wanted, Verdict.WAITING, found.gain, Bottleneck.ROOM)
            found = Decision(now.num_working, Verdict.SETTLED, found.gain, found.bottleneck)  # it grew only to measure
        if is_growth and now.seconds_left is not None and now.seconds_left < 2 * self.window_s:
            return Decision(now.num_wanted, Verdict.ENDING, found.gain, found.bottleneck)
        is_urgent = found.num_workers < now.num_wanted and found.bottleneck in _SUDDEN
        if found.num_workers != now.num_wanted and not is_urgent and now.at < curve.changed_at + self.window_s:
            return Decision(now.num_wanted, Verdict.MEASURING, found.gain, found.bottleneck)
        if found.verdict is Verdict.SETTLED:
            curve.settle(found, now.at)
        return found

    def _sudden(self, curve: RateCurve, point: RatePoint, now: Observation, bounds: WorkerRange) -> Decision | None:
        """Shrink to the number of busy workers if workers wait for something that they did not wait for before."""
        samples = list(point.samples)
        before, newest = samples[:-QUICK_SAMPLES], samples[-QUICK_SAMPLES:]
        if len(before) < SAMPLES or now.num_working < now.num_wanted:
            return None
        waits = _mean_waits(before)
        rise, bottleneck = min((_greatest_rise(waits, one.waits) for one in newest), key=lambda found: found[0])
        was_busy, is_busy = _mean([one.busy for one in before]), newest[-1].busy
        is_faster = _mean([one.rate for one in newest]) > _mean([one.rate for one in before])
        is_sinking = is_busy < newest[0].busy - _STEADY
        least_rise = max(_SUDDEN_RISE, _CHANGE_QUANTILE * _noise_of_waits(before))
        if rise < least_rise or bottleneck not in _SUDDEN or is_busy >= was_busy or is_faster or is_sinking:
            return None
        number = bounds.nearest(_at_least(now.num_working * is_busy / was_busy))
        if number >= now.num_wanted:
            return None
        curve.restart(now.num_working, QUICK_SAMPLES)
        return Decision(number, Verdict.SHRINKING, 0.0, bottleneck)

    def _search(self, curve: RateCurve, present: RatePoint, bounds: WorkerRange, can_grow: bool) -> Decision | None:
        """Find the greatest number whose steps all gain, and the next one to try; None: measure longer."""
        points = [curve.points[n] for n in sorted(curve.points) if bounds.least <= n <= bounds.most]
        if curve.has_grown and not present.is_bound:  # after a shrink, workers still wait for a while
            present.is_bound = self._shows_bottleneck(points, present)
        known = [one for one in points if one.is_known]
        if present not in known:
            return None
        unit = max(one.rate / one.num_workers for one in known)
        last: _Step | None = None  # the last one that gains
        for low, high in pairwise(known):
            step = _Step.between(low, high, unit, before=1.0 if last is None else last.gain)
            is_enough = self._is_enough(step, present)
            if is_enough is None:
                return None
            if not is_enough:
                return self._refine(curve, step, last, bounds, present)
            last = step
        best, gain = known[-1], None if last is None else last.gain
        if not can_grow or best.num_workers >= bounds.most:
            return self._settle(best, last, gain, None, bounds, present)
        more = best.num_workers if curve.is_new else max(1, best.num_workers // 4)
        return Decision(bounds.nearest(best.num_workers + more), Verdict.GROWING, gain)

    def _refine(
        self, curve: RateCurve, lost: _Step, last: _Step | None, bounds: WorkerRange, present: RatePoint
    ) -> Decision:
        """Choose a number near one after which workers gain too little.

        Args:
            lost: The first step that gains too little.
            last: The step before it; None if there is none.
        """
        curve.is_new = False
        best, above = lost.low, lost.high
        number, bottleneck = best.num_workers, _bottleneck(best, above)
        middle = (number + above.num_workers) // 2
        if bottleneck is not Bottleneck.PROCESSORS:
            middle = min(middle, _at_least(above.num_workers * _busy(above, best)))
        if above.num_workers - number > _precision(number) and middle > number:
            verdict = Verdict.SHRINKING if middle < present.num_workers else Verdict.REFINING
            return Decision(middle, verdict, lost.gain, bottleneck)
        return self._settle(best, last, lost.gain, bottleneck, bounds, present)

    def _settle(
        self,
        best: RatePoint,
        last: _Step | None,
        gain: float | None,
        bottleneck: Bottleneck | None,
        bounds: WorkerRange,
        present: RatePoint,
    ) -> Decision:
        """Stay at a number, unless a smaller one may suffice."""
        number = best.num_workers
        if last is None and number > bounds.least:
            return Decision(bounds.nearest(number - max(1, number // 4)), Verdict.REFINING, gain, bottleneck)
        if last is not None and last.length > _precision(number) and last.gain_at_end < self.min_gain:
            return Decision(number - last.length // 2, Verdict.REFINING, gain, bottleneck)
        verdict = Verdict.SHRINKING if number < present.num_workers else Verdict.SETTLED
        return Decision(number, verdict, gain, bottleneck)

    def _is_enough(self, step: _Step, present: RatePoint) -> bool | None:
        """Return whether the workers of a step gain enough; None if more samples are needed."""
        difference = step.gain - self.min_gain
        can_wait = present in (step.low, step.high) and len(present.samples) < MAX_SAMPLES
        if can_wait and step.low.has_window and step.high.has_window:
            num_samples = len(step.low.samples) + len(step.high.samples)
            if abs(difference) <= _student(_QUANTILE, num_samples - 2) * step.error:
                return None
        return difference > 0

    def _shows_bottleneck(self, points: Sequence[RatePoint], high: RatePoint) -> bool:
        """Return whether the newest workers wait, so that few samples show their gain."""
        lower = [one for one in points if one.num_workers < high.num_workers and one.is_known]
        if not lower or len(high.samples) < QUICK_SAMPLES:
            return False
        low, unit = lower[-1], max(one.rate / one.num_workers for one in lower)
        rise, _ = _greatest_rise(low.waits, high.waits)
        step = _Step.between(low, high, unit)
        by_time = (high.num_workers * _busy(high, low) - low.num_workers) / step.length
        least_rise = max(_RISE, _QUANTILE * _noise_of_waits(low.samples))
        return rise >= least_rise and max(by_time, step.gain) < self.min_gain


@dataclass(frozen=True, slots=True)
class _Step:
    """Two consecutive measured numbers of workers.

    Attributes:
        gain: Gain of each worker between them.
        error: Standard error of `gain`.
        before: Gain of the step before; for the first step that of a worker alone.
    """

    low: RatePoint
    high: RatePoint
    gain: float
    error: float
    before: float

    @classmethod
    def between(cls, low: RatePoint, high: RatePoint, unit: float, before: float = 1.0) -> _Step:
        """Return the step between two points.

        Args:
            low: The smaller number.
            high: The greater number.
            unit: Records per second of a worker alone.
            before: As in the class.
        """
        linear = (high.num_workers - low.num_workers) * unit
        if linear <= 0:
            return cls(low, high, 0.0, 0.0, before)
        error = _standard_error(low.samples, high.samples) / linear
        return cls(low, high, (high.rate - low.rate) / linear, error, before)

    @property
    def gain_at_end(self) -> float:
        """Gain of its last worker, if gains fall evenly within the step."""
        return 2 * self.gain - self.before

    @property
    def length(self) -> int:
        """Number of workers of the step."""
        return self.high.num_workers - self.low.num_workers


def _precision(num_workers: int) -> int:
    return max(1, num_workers // _PRECISION)


def _at_least(num_workers: float) -> int:
    """Return the next whole number; tolerate rounding errors."""
    return math.ceil(num_workers - 0.05)


def _busy(one: RatePoint, other: RatePoint) -> float:
    """Return how busy workers are at one number, relative to another."""
    busy, before = 1.0 - sum(one.waits), 1.0 - sum(other.waits)
    return max(0.0, busy) / before if before > 0 else 1.0


def _bottleneck(low: RatePoint, high: RatePoint) -> Bottleneck:
    """Return the reason why workers between two numbers gain little."""
    rise, found = _greatest_rise(low.waits, high.waits)
    return found if rise >= _RISE else Bottleneck.PROCESSORS


def _greatest_rise(before: Sequence[float], after: Sequence[float]) -> tuple[float, Bottleneck]:
    rises = [now - then for then, now in zip(before, after, strict=True)]
    return max(zip(rises, _WAITS.values(), strict=True), key=lambda one: one[0])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _mean_waits(samples: Iterable[Sample]) -> tuple[float, ...]:
    return tuple(_mean(column) for column in zip(*(one.waits for one in samples), strict=True))


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1) if len(values) > 1 else 0.0


def _noise_of_waits(samples: Iterable[Sample]) -> float:
    """Return the standard deviation of a few consecutive samples; more, maybe of the same tasks, do not lower it."""
    return math.sqrt(_variance([one.busy for one in samples]))


def _standard_error(some: Collection[Sample], others: Collection[Sample]) -> float:
    """Return the standard error of the difference of two means (Welch), corrected for autocorrelation."""
    return math.sqrt(sum(_variance_of_mean([one.rate for one in samples]) for samples in (some, others)))


def _variance_of_mean(values: Sequence[float]) -> float:
    """Return the variance of the mean; consecutive rates are alike if a task is longer than a sample (lag 1, AR(1))."""
    variance = _variance(values)
    if len(values) < SAMPLES or not variance:
        return variance / max(1, len(values))
    mean = _mean(values)
    products = [(early - mean) * (late - mean) for early, late in pairwise(values)]
    likeness = min(_MOST_LIKENESS, max(0.0, _mean(products) / variance))
    return variance * (1 + likeness) / (1 - likeness) / len(values)


def _student(quantile: float, degrees: int) -> float:
    """Return a quantile of Student's distribution from the normal one (first term of Cornish and Fisher)."""
    return quantile + (quantile**3 + quantile) / (4 * degrees)


def _is_other_rate(before: Sequence[Sample], after: Sequence[Sample]) -> bool:
    then, now = _mean([one.rate for one in before]), _mean([one.rate for one in after])
    quantile = _student(_CHANGE_QUANTILE, len(before) + len(after) - 2)
    return abs(now - then) > max(_CHANGE * then, quantile * _standard_error(before, after))


def _short(value: float) -> float:
    return float(f"{value:.4g}")
