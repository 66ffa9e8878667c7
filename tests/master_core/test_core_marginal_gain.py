"""The policy that scales a job by marginal gain, on curves of which the right number of workers is known."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from elasticdl.master.core.marginal_gain import Decision, Observation, RateCurve, ScalingPolicy, Verdict
from elasticdl_client.goodput import SlotState
from elasticdl_client.worker_range import Bottleneck, WorkerRange

START_S = 15.0
WORKER_RATE = 100.0  # records per second of a worker alone
POLICY = ScalingPolicy(sample_records=2)
Curve = Callable[[float, int], float]
"""By time and number of workers: the rate, in workers that nothing holds up."""


@dataclass
class CurvedJob:
    """A job whose rate follows a curve; new workers take a while to start.

    Attributes:
        waits_for: the state that the time goes to which workers do not compute; None: they compute more slowly.
        noise: of the rate of each tick: its standard deviation, as a share.
        room: workers that have a place.
        history: the numbers that the policy has wanted, with the time of each.
    """

    curve: Curve
    bounds: WorkerRange
    waits_for: SlotState | None = SlotState.WAITING_PS
    noise: float = 0.0
    seed: int = 0
    room: int = 1000
    seconds_left: float | None = None
    tick_s: float = 1.0
    policy: ScalingPolicy = POLICY
    rates: RateCurve = field(default_factory=RateCurve)
    now: float = 0.0
    records: float = 0.0
    num_wanted: int = 0
    decision: Decision | None = None
    history: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_wanted = self.num_wanted or self.bounds.least
        self.num_working = self.num_wanted
        self._seconds = dict.fromkeys((state.value for state in SlotState), 0.0)
        self._random = random.Random(self.seed)
        self._arrivals: list[float] = []

    def run(self, seconds: float) -> CurvedJob:
        """Let time pass."""
        end = self.now + seconds
        while self.now < end:
            self._pass(self.tick_s)
            seconds, left = dict(self._seconds), self.seconds_left
            seen = Observation(self.now, int(self.records), self.num_working, self.num_wanted, seconds, left)
            if self.rates.observe(seen, self.policy):
                self._follow(self.policy.decide(self.rates, seen, self.bounds))
        return self

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        while self._arrivals and self._arrivals[0] <= self.now and self.num_working < self.room:
            self._arrivals.pop(0)
            self.num_working += 1
        speed = self.curve(self.now, self.num_working)
        self.records += seconds * WORKER_RATE * speed * max(0.0, self._random.gauss(1.0, self.noise))
        busy = min(1.0, speed / self.num_working) if self.waits_for else 1.0
        self._seconds[SlotState.USEFUL] += seconds * busy * self.num_working
        self._seconds[self.waits_for or SlotState.USEFUL] += seconds * (1.0 - busy) * self.num_working

    def _follow(self, decision: Decision) -> None:
        self.decision = decision
        if decision.num_workers == self.num_wanted:
            return
        self.history.append((self.now, decision.num_workers))
        self.rates.changed_at = self.now
        more = decision.num_workers - self.num_working
        self._arrivals = [self.now + START_S] * max(0, more)
        self.num_working = min(self.num_working, decision.num_workers)
        self.num_wanted = decision.num_workers


def linear(_: float, workers: int) -> float:
    return float(workers)


def flat_from(knee: float) -> Curve:
    return lambda _, workers: min(float(workers), knee)


def amdahl(serial: float) -> Curve:
    return lambda _, workers: workers / (1.0 + serial * (workers - 1))


def gain_of(curve: Curve, number: int) -> float:
    """The gain of the last of these workers, by the definition."""
    return (curve(0.0, number) - curve(0.0, number - 1)) / curve(0.0, 1)


def settled(job: CurvedJob) -> int:
    """The number that a job stays at."""
    assert job.decision is not None
    assert job.decision.verdict is Verdict.SETTLED, job.decision
    assert job.decision.num_workers == job.num_working == job.num_wanted
    return job.num_wanted


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4])
def test_a_job_whose_rate_grows_with_its_workers_gets_the_most(noise: float) -> None:
    job = CurvedJob(linear, WorkerRange(1, 32), noise=noise).run(900)
    assert settled(job) == 32
    assert [number for _, number in job.history] == [2, 4, 8, 16, 32]


def test_on_a_curve_that_gets_steeper_with_each_worker_a_job_gets_the_most() -> None:
    job = CurvedJob(lambda _, workers: workers**1.3, WorkerRange(2, 20), None, 0.1).run(900)
    assert settled(job) == 20


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4])
@pytest.mark.parametrize(
    ("waits_for", "bottleneck"),
    [
        (SlotState.WAITING_PS, Bottleneck.PARAMETER_SERVERS),
        (SlotState.INPUT, Bottleneck.INPUT),
        (SlotState.WAITING_GROUP, Bottleneck.GROUP),
        (SlotState.IDLE, Bottleneck.TASKS),
        (None, Bottleneck.PROCESSORS),
    ],
)
def test_a_job_stops_at_the_bend_of_a_flat_curve_and_says_what_its_workers_would_wait_for(
    waits_for: SlotState | None, bottleneck: Bottleneck, noise: float
) -> None:
    job = CurvedJob(flat_from(5), WorkerRange(1, 32), waits_for, noise).run(1200)
    is_hard = waits_for is None and noise == 0.4  # nothing shows it but the rate
    assert settled(job) == pytest.approx(5, abs=1 if is_hard else 0)
    assert job.decision is not None
    assert job.decision.bottleneck is bottleneck
    assert job.decision.gain == pytest.approx(0.0, abs=0.3 if is_hard else 0.15)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("serial", [0.02, 0.05, 0.1, 0.3])
def test_on_a_bent_curve_a_job_stops_where_another_worker_adds_the_minimum(serial: float, noise: float) -> None:
    curve = amdahl(serial)
    number = settled(CurvedJob(curve, WorkerRange(1, 32), None, noise).run(1800))
    assert number == 1 or gain_of(curve, number) > 0.3 - noise
    assert number == 32 or gain_of(curve, number + max(1, number // 8)) < 0.3 + noise


def test_a_job_never_moves_for_noise_alone() -> None:
    moved = 0
    for seed in range(6):
        job = CurvedJob(flat_from(4), WorkerRange(1, 16), None, 0.3, seed, tick_s=POLICY.sample_s).run(1800)
        before = len(job.history)
        job.run(1800)
        moved += len(job.history) - before
    assert moved == 0  # in three hours


def test_no_change_rests_on_less_than_a_window_unless_a_bottleneck_shows() -> None:
    job = CurvedJob(amdahl(0.1), WorkerRange(1, 32), None, 0.2).run(1800)
    times = [0.0, *(at for at, _ in job.history)]
    assert min(late - early for early, late in pairwise(times)) >= POLICY.window_s


def test_a_bottleneck_that_growth_has_met_is_left_before_a_window_is_over() -> None:
    job = CurvedJob(flat_from(4), WorkerRange(1, 16)).run(600)
    grown = {number: at for at, number in job.history}
    assert [number for _, number in job.history] == [2, 4, 8, 4]
    assert grown[4] - grown[8] - START_S < POLICY.window_s / 2


def test_a_bottleneck_that_appears_later_is_left_at_once_for_the_number_that_is_busy() -> None:
    job = CurvedJob(lambda at, n: min(n, 12.0 if at < 900 else 4.0), WorkerRange(1, 12)).run(900)
    assert settled(job) == 12
    before = len(job.history)
    job.run(900)
    assert job.history[before][1] == 4
    assert job.history[before][0] - 900 < POLICY.window_s / 2
    assert settled(job) == 4
    assert job.decision is not None
    assert job.decision.bottleneck is Bottleneck.PARAMETER_SERVERS


def test_a_curve_that_becomes_steeper_is_found_by_its_rate() -> None:
    job = CurvedJob(lambda at, n: min(n, 4.0 if at < 900 else 12.0), WorkerRange(1, 16), noise=0.05).run(900)
    assert settled(job) == 4
    job.run(3 * 3600)  # the rate at 4 is the same: it is measured again after an hour
    assert settled(job) == 12


def test_a_curve_that_becomes_flatter_without_waiting_is_found_by_its_rate() -> None:
    job = CurvedJob(lambda at, n: min(n, 12.0 if at < 900 else 4.0), WorkerRange(1, 12), None, 0.1).run(900)
    assert settled(job) == 12
    assert settled(job.run(1800)) == 4


def test_while_pods_wait_for_room_the_job_does_not_grow_and_what_comes_counts() -> None:
    job = CurvedJob(linear, WorkerRange(1, 16), room=6).run(900)
    assert job.decision is not None
    assert (job.decision.verdict, job.decision.bottleneck) == (Verdict.WAITING, Bottleneck.ROOM)
    assert (job.num_working, job.num_wanted) == (6, 8)
    job.room = 100
    assert settled(job.run(900)) == 16


def test_workers_without_gain_are_given_up_while_others_still_wait_for_room() -> None:
    job = CurvedJob(flat_from(5), WorkerRange(1, 16), room=7).run(900)
    assert settled(job) == 5


def test_a_pod_that_was_to_be_measured_and_has_no_room_is_given_up() -> None:
    job = CurvedJob(amdahl(0.1), WorkerRange(1, 32), None).run(330)
    assert [number for _, number in job.history] == [2, 4, 8, 16, 12, 10, 9]
    assert job.num_working == 9
    job.room = 6
    assert settled(job.run(600)) == 6


def test_a_job_does_not_grow_just_before_its_end() -> None:
    job = CurvedJob(linear, WorkerRange(2, 16), seconds_left=POLICY.window_s).run(120)
    assert job.decision is not None
    assert (job.decision.num_workers, job.decision.verdict) == (2, Verdict.ENDING)
    assert job.history == []


def test_another_minimum_gives_another_number() -> None:
    numbers = [
        settled(CurvedJob(amdahl(0.1), WorkerRange(1, 32), None, policy=ScalingPolicy(gain)).run(1800))
        for gain in (0.1, 0.3, 0.6)
    ]
    assert numbers == sorted(numbers, reverse=True)
    assert len(set(numbers)) == 3


def test_a_sample_needs_minibatches_of_each_worker_and_an_undisturbed_time() -> None:
    policy, curve = ScalingPolicy(sample_records=100), RateCurve()

    def seen(at: float, records: int, **seconds: float) -> bool:
        return curve.observe(Observation(at, records, 2, 2, seconds), policy)

    assert not seen(0.0, 0)
    assert not seen(policy.settle_s - 1, 0)
    assert not seen(policy.settle_s, 0)
    assert not seen(policy.settle_s + 50, 199)
    assert seen(policy.settle_s + 51, 200)
    assert not seen(policy.settle_s + 60, 900, evaluating=8.0)
    assert not seen(policy.settle_s + 70, 500)  # a model has fallen back: all begins again
    assert len(curve.points[2].samples) == 1


def test_a_curve_survives_the_journal_with_another_clock() -> None:
    job = CurvedJob(flat_from(5), WorkerRange(1, 32), noise=0.2).run(600)
    saved = json.loads(json.dumps(job.rates.to_journal(job.now)))
    again = RateCurve.from_journal(saved, 0.0)
    assert again.to_journal(0.0) == saved
    seen = Observation(0.0, int(job.records), job.num_working, job.num_wanted, {})
    there, here = (POLICY.decide(one, seen, job.bounds) for one in (job.rates, again))
    assert (here.num_workers, here.verdict, here.bottleneck) == (there.num_workers, there.verdict, there.bottleneck)
    assert len(json.dumps(saved)) < 20_000


def test_a_master_that_restarts_while_new_workers_start_waits_for_them_as_long() -> None:
    job = CurvedJob(amdahl(0.1), WorkerRange(1, 32), None)
    while job.num_wanted < 16:
        job.run(1)
    assert job.num_working == 8
    saved = json.loads(json.dumps(job.rates.to_journal(job.now)))
    again = RateCurve.from_journal(saved, 0.0)
    for passed in (0.0, 3 * POLICY.window_s):
        moments = ((job.rates, job.now + passed), (again, passed))
        found = [
            POLICY.decide(rates, Observation(at, int(job.records), 8, 16, {}), job.bounds) for rates, at in moments
        ]
        assert (found[0].num_workers, found[0].verdict) == (found[1].num_workers, found[1].verdict)
