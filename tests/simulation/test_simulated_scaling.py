"""Scaling by marginal gain with the master's real core, in simulated clusters: one job alone, and two that compete."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from elasticdl.master.core import events as e
from elasticdl.master.core.settings import JobSettings
from elasticdl.protocol import Role, Shard
from elasticdl.simulation.cluster import SimulatedCluster, Timeline
from elasticdl.simulation.job import SimulatedJob, Workload
from elasticdl.simulation.scenario import NodePool, Scenario
from elasticdl_client.job_events import EventKind
from elasticdl_client.job_status import ScalingStatus

CPU = {"cpu": 1.0}
STEP_S = 1.0
Curve = Callable[[int], float]
"""The rate of a number of workers, in workers that nothing holds up."""
SETTINGS = JobSettings(
    "j",
    num_workers=1,
    max_workers=24,
    num_ps=1,
    minibatch_size=10,
    num_minibatches_per_task=8,
    num_epochs=0,
    scaling_window=30.0,
)
WORKLOAD = Workload(
    SETTINGS, (Shard("records", 0, 500_000),), STEP_S, {Role.PS: CPU, Role.WORKER: CPU}, heartbeat_s=4.0
)


def workload(name: str, curve: Curve, waits_for: str = "compute") -> Workload:
    settings = replace(SETTINGS, job_name=name)
    return replace(WORKLOAD, settings=settings, speed=lambda _, n: curve(n) / n, waits_for=waits_for)


def slots(number: int) -> Scenario:
    """A cluster with room for a number of pods."""
    return Scenario(nodes=(NodePool("n", {"cpu": float(number)}, 1),), image_pull=0.0, start=10.0)


def flat_from(knee: float) -> Curve:
    return lambda n: min(float(n), knee)


def amdahl(serial: float) -> Curve:
    return lambda n: n / (1.0 + serial * (n - 1))


def run(seconds: float, *workloads: Workload, room: int = 100) -> tuple[Timeline, list[SimulatedJob]]:
    """Jobs on one cluster, each submitted a minute after the one before."""
    timeline, scenario = Timeline(), slots(room)
    cluster = SimulatedCluster(scenario, timeline, 0)
    jobs = [SimulatedJob(one, scenario, cluster, timeline) for one in workloads]
    for number, job in enumerate(jobs):
        timeline.at(60.0 * number, job.begin)
    timeline.run_until(lambda: False, seconds)
    for job in jobs:
        job.core.validate_state()
    return timeline, jobs


def wanted(job: SimulatedJob) -> int:
    return job.core.status().workers_wanted


def scaled(job: SimulatedJob, subject: str = "master") -> list[int]:
    """The numbers that the job was to have, one after another."""
    events = [one for one in job.core.events.events if one.kind is EventKind.JOB_SCALED and one.subject == subject]
    return [int(one.details["after"]) for one in events]


def scaling(job: SimulatedJob) -> ScalingStatus:
    found = job.core.status().scaling
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("first", "second", "waits_for"),
    [(flat_from(6), flat_from(24), "ps"), (amdahl(0.1), amdahl(0.02), "compute")],
    ids=["bound and free", "bent"],
)
def test_of_two_jobs_the_sum_of_the_rates_is_near_that_of_the_best_split(
    first: Curve, second: Curve, waits_for: str
) -> None:
    curves = (first, second)
    jobs = run(1300.0, workload("a", first, waits_for), workload("b", second, waits_for), room=24 + 2)[1]
    reached = sum(curve(job.core.status().workers_alive) for curve, job in zip(curves, jobs, strict=True))
    best = max(first(number) + second(24 - number) for number in range(1, 24))
    assert reached >= 0.95 * best
    alone = first(23) + second(1)  # a first job that takes all that there is
    assert reached > 1.2 * alone


def test_a_job_that_its_parameter_server_holds_up_says_so_and_the_number_survives_its_master() -> None:
    timeline, (job,) = run(400.0, workload("j", flat_from(4), "ps"))
    assert scaled(job) == [2, 4, 8, 4]
    assert scaling(job) == ScalingStatus("1:24", "settled", scaling(job).gain, "parameter servers")
    assert scaling(job).gain == pytest.approx(0.0, abs=0.25)  # of two samples
    snapshot = json.loads(json.dumps(job.core.snapshot()))
    again = job.core.restore(job.settings, snapshot, 2, timeline.now)
    again.validate_state()
    again.handle(e.Tick(), timeline.now + 1.0)
    assert again.status().workers_wanted == 4
    assert again.status().scaling == scaling(job)
    curves = [one["autoscaler"]["curve"]["points"] for one in (snapshot, again.snapshot())]
    assert curves[0] == curves[1]


def test_a_bottleneck_that_appears_while_the_job_runs_makes_it_smaller_at_once() -> None:
    bound = replace(workload("j", flat_from(24), "ps"), speed=lambda at, n: min(1.0, (8 if at < 500 else 3) / n))
    bound = replace(bound, settings=replace(bound.settings, max_workers=8))
    timeline, (job,) = run(500.0, bound)
    assert (wanted(job), scaling(job).state) == (8, "settled")
    timeline.run_until(lambda: False, 560.0)
    assert wanted(job) == pytest.approx(3, abs=1)
    assert scaling(job).bottleneck == "parameter servers"
    timeline.run_until(lambda: False, 1000.0)
    assert (wanted(job), scaling(job).state) == (3, "settled")


def test_rates_that_vary_by_a_third_from_task_to_task_change_nothing_but_the_time_that_it_takes() -> None:
    rng, curve = Random(1), flat_from(5)
    noisy = workload("j", curve, "ps")
    noisy = replace(noisy, speed=lambda at, n: min(1.0, max(0.2, curve(n) / n * rng.gauss(0.8, 0.25))))
    timeline, (job,) = run(1200.0, noisy)
    number, changes = wanted(job), scaled(job)
    assert number in (4, 5, 6)
    assert scaling(job).state == "settled"
    timeline.run_until(lambda: False, 2400.0)
    assert scaled(job) == changes


def test_a_number_by_hand_ends_the_scaling_by_gain_until_there_is_a_range_again() -> None:
    timeline, (job,) = run(100.0, workload("j", flat_from(24)))
    before = scaled(job)
    assert before
    job.tell(e.ScaleRequested(3))
    timeline.run_until(lambda: False, 300.0)
    assert wanted(job) == 3
    assert (scaled(job), scaled(job, "user")) == (before, [3])
    assert job.core.status().scaling is None
    job.tell(e.ScaleRequested(2, 6))
    timeline.run_until(lambda: False, 600.0)
    assert wanted(job) == 6
    assert scaling(job).workers == "2:6"
    assert scaled(job, "user") == [3]  # the current number is in the range: it begins from there
    job.tell(e.ScaleRequested(1, 2))
    assert wanted(job) == 2
    assert scaled(job, "user") == [3, 2]


def test_a_job_with_other_flags_is_resumed_with_a_number_within_them() -> None:
    timeline, (job,) = run(400.0, workload("j", flat_from(24)))
    assert wanted(job) > 4
    settings = replace(job.settings, num_workers=2, max_workers=4)
    again = job.core.restore(settings, json.loads(json.dumps(job.core.snapshot())), 2, timeline.now)
    again.handle(e.PodsListed(()), timeline.now)
    again.handle(e.Tick(), timeline.now + 1.0)
    assert again.status().workers_wanted == 4
