"""How long the rest of a job takes, asked of jobs that have run: four workers that pause for 0.01 s a record.

recorded_paces.json holds (seconds since the start, records done, workers) once a second to the end of each job.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elasticdl.master.core.overview import MAX_SAMPLES, Pace

JOBS: dict[str, list[tuple[float, int, int]]] = json.loads(
    Path(__file__).with_name("recorded_paces.json").read_text(encoding="utf-8")
)
TOLERANCE = 0.2
LAST_LOOK_S = 2.0  # the end itself is seen once a second


def misses(job: str, begin: float = 0.0, share: float = 0.0) -> list[str]:
    """Errors of the estimate from a time of a job on, and from a share of its records on."""
    samples = JOBS[job]
    total = max(records for _, records, _ in samples)
    end = next(at for at, records, _ in samples if records == total)
    pace, found = Pace(), []
    for at, records, num_workers in samples:
        pace.sample(at, records, num_workers)
        foretold, left = pace.seconds_for(total - records), end - at
        if at < begin or records < share * total:
            continue
        if foretold is None or abs(foretold - left) > max(TOLERANCE * left, LAST_LOOK_S):
            found.append(f"after {at} s of {end}: {foretold}, but it were {left:.1f}")
    return found


@pytest.mark.parametrize("job", ["steady", "four_workers_killed"])
def test_the_rest_is_foretold_within_a_fifth_from_a_tenth_of_the_job_on(job: str) -> None:
    assert len(JOBS[job]) > 40
    assert not misses(job, share=0.1)


def test_three_seconds_after_a_job_has_grown_its_pace_is_the_new_one() -> None:
    samples = JOBS["from_two_workers_to_four"]
    grown_at = next(at for at, _, num_workers in samples if num_workers == 4)
    assert misses("from_two_workers_to_four", begin=grown_at - 1)
    assert not misses("from_two_workers_to_four", begin=grown_at + 4)


def test_a_model_that_is_lost_makes_more_to_do_and_no_other_pace() -> None:
    samples = JOBS["model_lost"]
    lost_at = next(at for (at, now, _), (_, before, _) in zip(samples[1:], samples, strict=False) if now < before)
    assert not misses("model_lost", begin=lost_at + 1)


def test_nothing_is_foretold_before_there_is_a_pace() -> None:
    pace = Pace()
    assert pace.seconds_for(100) is None
    pace.sample(0.0, 0, 2)
    pace.sample(60.0, 0, 2)  # start-up
    assert pace.seconds_for(100) is None
    pace.sample(61.0, 10, 2)
    assert pace.seconds_for(90) is None
    pace.sample(62.0, 20, 2)
    assert pace.seconds_for(80) is None
    pace.sample(63.0, 30, 2)
    assert pace.seconds_for(70) == pytest.approx(7.0)
    assert pace.seconds_for(0) == 0.0


def test_what_an_earlier_life_of_the_master_has_counted_is_no_pace_of_this_one() -> None:
    pace = Pace()
    for second in range(5):
        pace.sample(float(second), 1_000_000 + 10 * second, 2)
    assert pace.seconds_for(100) == pytest.approx(10.0)


def test_nothing_is_foretold_once_all_workers_are_gone_for_long() -> None:
    pace = Pace()
    for second in range(60):
        pace.sample(float(second), 10 * min(second, 30), 2 if second <= 30 else 0)
    assert pace.seconds_for(100) is None


def test_a_job_of_days_costs_no_more_memory_and_keeps_its_pace() -> None:
    pace = Pace()
    for second in range(0, 500_000, 10):
        pace.sample(float(second), 7 * second, 3)
    assert len(pace._times) == len(pace._taken) <= MAX_SAMPLES
    assert pace.seconds_for(70_000) == pytest.approx(10_000, rel=0.01)


def test_the_throughput_is_that_of_the_last_half_minute() -> None:
    pace = Pace()
    for second in range(100):
        pace.sample(float(second), 5 * min(second, 50) + 20 * max(0, second - 50), 1)
    assert pace.records_per_second() == pytest.approx(20.0)
