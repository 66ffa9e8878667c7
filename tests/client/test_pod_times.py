"""How the time of pods was split: bounded, whole, and the same after the journal."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl_client.goodput import FIRST_LENGTH_US, MAX_CELLS, PodTimes, SlotState
from elasticdl_client.job_series import JobJournal

SECOND = FIRST_LENGTH_US
USEFUL, INPUT, STARTING, REPEATED = SlotState.USEFUL, SlotState.INPUT, SlotState.STARTING, SlotState.REPEATED


def sums(times: PodTimes, *workers: int) -> dict[SlotState, int]:
    """Microseconds by state, of those that have any."""
    found: dict[SlotState, int] = {}
    for worker in workers:
        for cell in times.cells(worker).values():
            for state, us in cell.items():
                found[state] = found.get(state, 0) + us
    return {state: us for state, us in found.items() if us}


def test_time_is_spread_evenly_over_the_cells_that_it_touches() -> None:
    times = PodTimes()
    times.add(3, SECOND // 2, 5 * SECOND // 2, {USEFUL: 3 * SECOND // 2, INPUT: SECOND // 2})
    assert times.cells(3) == {
        0: {USEFUL: 375_000, INPUT: 125_000},
        1: {USEFUL: 750_000, INPUT: 250_000},
        2: {USEFUL: 375_000, INPUT: 125_000},
    }
    assert times.cells(0) == {}


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40 * SECOND), st.integers(0, 100)), max_size=200),
    st.sampled_from([8, 40, 400]),
)
def test_any_lives_fit_and_no_time_is_lost_while_there_is_room_for_every_pod(
    reports: list[tuple[int, int, int]], limit: int
) -> None:
    times, until, wanted = PodTimes(limit), dict.fromkeys(range(31), 0), dict.fromkeys((USEFUL, INPUT), 0)
    for worker, us, percent in reports:
        useful = us * percent // 100
        times.add(worker, until[worker], until[worker] + us, {USEFUL: useful, INPUT: us - useful})
        until[worker] += us
        wanted[USEFUL] += useful
        wanted[INPUT] += us - useful
        cells = [times.cells(one) for one in until]
        assert sum(len(one) for one in cells) <= limit
        assert all(sum(cell.values()) <= times.length_us for one in cells for cell in one.values())
    if limit // 4 >= 31:
        assert sums(times, *until) == {state: us for state, us in wanted.items() if us}


def test_a_job_of_many_pods_has_coarse_cells_and_of_too_many_the_newest() -> None:
    times = PodTimes()
    for second in range(120):
        for worker in range(200):
            times.add(worker, second * SECOND, (second + 1) * SECOND, {USEFUL: SECOND})
    assert times.length_us == 8 * SECOND
    assert sums(times, *range(200)) == {USEFUL: 200 * 120 * SECOND}
    for worker in range(200, 200 + MAX_CELLS):
        times.add(worker, worker * SECOND, (worker + 1) * SECOND, {USEFUL: SECOND})
    assert times.cells(0) == {}
    assert sums(times, 199 + MAX_CELLS) == {USEFUL: SECOND}


def test_what_was_computed_last_is_what_is_lost() -> None:
    times = PodTimes()
    for second in range(4):
        times.add(0, second * SECOND, (second + 1) * SECOND, {USEFUL: 800_000, INPUT: 200_000})
    times.lose(0, 1_000_000)
    times.lose(7, 1_000_000)
    assert [cell.get(REPEATED, 0) for cell in times.cells(0).values()] == [0, 0, 200_000, 800_000]
    assert sums(times, 0) == {USEFUL: 2_200_000, REPEATED: 1_000_000, INPUT: 800_000}


def test_a_model_that_falls_back_takes_the_newest_computing_of_all_pods() -> None:
    times = PodTimes()
    for worker in (0, 1):
        times.add(worker, 0, 3 * SECOND, {USEFUL: 3 * SECOND})
    times.add(2, 2 * SECOND, 3 * SECOND, {INPUT: SECOND})
    times.fall_back(3 * SECOND)
    for worker in (0, 1):
        assert [cell.get(REPEATED, 0) for cell in times.cells(worker).values()] == [0, SECOND // 2, SECOND]
    assert sums(times, 2) == {INPUT: SECOND}
    times.add(3, 10**9 * SECOND, (10**9 + 1) * SECOND, {INPUT: SECOND})  # years later
    times.fall_back(100 * SECOND)
    assert sums(times, 0, 1) == {REPEATED: 6 * SECOND}


def test_the_journal_holds_shares_to_the_percent_and_takes_no_others() -> None:
    times = PodTimes()
    times.add(0, 2 * SECOND, 3 * SECOND, {USEFUL: 873_000, INPUT: 127_000})
    times.add(0, 5 * SECOND, 5 * SECOND + 400_000, {STARTING: 400_000})
    saved = json.loads(json.dumps(times.to_journal()))
    again = PodTimes.from_journal(saved)
    assert again.cells(0) == {2: {USEFUL: 870_000, INPUT: 130_000}, 5: {STARTING: 400_000}}
    assert again.to_journal() == saved
    again.lose(0, 1_000_000)
    assert again.cells(0)[2] == {USEFUL: 0, REPEATED: 870_000, INPUT: 130_000}
    for wrong in ({}, {**saved, "states": ["rest"]}, {**saved, "pods": {"0": [0, "u87 <b>"]}}, {**saved, "pods": [1]}):
        with pytest.raises(ValueError):
            PodTimes.from_journal(wrong)
    assert JobJournal.read(b'{"format":2,"snapshot":{"core":{"accounting":{}}}}').pod_times().cells(0) == {}
    for journal in (b'{"snapshot":{"core":{"accounting":{"pods":1}}}}', b'{"snapshot":{"core":{"accounting":1}}}'):
        with pytest.raises(ValueError):
            JobJournal.read(journal).pod_times()


def test_full_times_take_little_of_the_journal() -> None:
    times = PodTimes()
    for second in range(MAX_CELLS // 8):
        for worker in range(8):
            times.add(
                worker, second * SECOND, (second + 1) * SECOND, {USEFUL: 867_000, INPUT: 83_000, STARTING: 50_000}
            )
    assert len(json.dumps(times.to_journal(), separators=(",", ":"))) < 50_000


def test_of_more_pods_than_there_is_room_for_those_go_that_have_been_silent_for_longest() -> None:
    times = PodTimes(limit=16)
    for worker_id in range(4):
        times.add(worker_id, 0, 1_000_000, {SlotState.USEFUL: 1_000_000})
    times.add(0, 1_000_000, 2_000_000, {SlotState.USEFUL: 1_000_000})
    for worker_id in (4, 5):
        times.add(worker_id, 2_000_000, 3_000_000, {SlotState.USEFUL: 1_000_000})
    assert [bool(times.cells(worker_id)) for worker_id in range(6)] == [True, False, True, True, True, True]
