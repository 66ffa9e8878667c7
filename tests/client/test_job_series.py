"""A job's numbers over its life: bounded, whole, and the same after the journal."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl_client.job_series import MAX_METRICS, MAX_POINTS, JobJournal, JobSeries, SeriesPoint, joined


def points(*times: float) -> list[SeriesPoint]:
    return [SeriesPoint(at, step=int(at)) for at in times]


@given(st.lists(st.floats(0.01, 100), max_size=400), st.sampled_from([4, 10, 60]))
def test_any_life_fits_and_has_its_first_and_newest_points_in_order(gaps: list[float], limit: int) -> None:
    series, at, first = JobSeries(limit=limit), 0.0, None
    for gap in gaps:
        at += gap
        first = first if first is not None else at
        series.add(SeriesPoint(at))
        found = [point.at for point in series.points]
        assert len(found) <= limit
        assert (found[0], found[-1]) == (first, at)
        assert found == sorted(set(found))


def test_a_long_life_is_covered_evenly() -> None:
    series = JobSeries()
    for at in range(100_000):
        series.add(SeriesPoint(float(at)))
    found = [point.at for point in series.points]
    assert MAX_POINTS / 4 <= len(found) <= MAX_POINTS
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert max(gaps) <= 100_000 / (MAX_POINTS / 4)


def test_points_nearer_than_a_second_are_one_and_an_older_one_is_left_out() -> None:
    series = JobSeries(points(1.0, 2.0, 2.4, 2.9, 2.5))
    assert [point.at for point in series.points] == [1.0, 2.0, 2.9]


def test_the_journal_holds_all_of_it_and_no_others() -> None:
    first = SeriesPoint(1.0, 3, 96, None, 2, 1, 0.25, {}, 0, {"starting": 4.0})
    second = SeriesPoint(9.0, 30, 960, 0.5, 3, 1, 0.75, {"accuracy": 0.9}, 25, {"starting": 4.0, "useful": 8.0})
    series = JobSeries([first, second])
    saved = json.loads(json.dumps(series.to_journal()))
    again = JobSeries.from_journal(saved)
    assert again.points == (SeriesPoint(1.0, 3, 96, None, 2, 1, 0.25, {}, 0, {"starting": 4.0, "useful": 0.0}), second)
    assert again.gap_s == series.gap_s
    assert again.to_journal() == saved


def test_a_full_series_takes_little_of_the_journal() -> None:
    states = {f"state{i}": 1234.5 for i in range(14)}
    full = JobSeries(
        SeriesPoint(1.79e9 + 60 * i, i, i, 0.123456, 8, 2, 0.5, {"a": 0.5}, i, states) for i in range(5000)
    )
    assert len(json.dumps(full.to_journal(), separators=(",", ":"))) < 50_000


def test_a_journal_without_a_series_has_an_empty_one_and_what_is_none_is_an_error() -> None:
    assert JobJournal.read(b'{"format":2,"snapshot":{"core":{}}}').series.points == ()
    for wrong in (b'{"snapshot":{"core":{"series":{"points":[[1]]}}}}', b'{"snapshot":1}', b"[]", b"{"):
        with pytest.raises(ValueError):
            JobJournal.read(wrong)
    with pytest.raises(ValueError):
        JobSeries.from_journal(
            {"gap_s": 1, "metrics": [], "states": ["a"], "points": [[1, 1, 1, None, 1, 1, 1, 0, [], []]]}
        )


def test_own_points_take_the_place_of_the_journals_from_their_first_on() -> None:
    assert [point.at for point in joined(points(1, 2, 3, 4), points(3.5, 4.5))] == [1, 2, 3, 3.5, 4.5]
    assert [point.at for point in joined(points(1, 2), [])] == [1, 2]


def test_of_hundreds_of_metrics_some_are_kept() -> None:
    series = JobSeries()
    for k in range(2 * MAX_POINTS):
        series.add(SeriesPoint(float(2 * k), metrics={f"accuracy_{name:03}": k / 7 + name for name in range(500)}))
    kept = JobSeries.from_journal(json.loads(json.dumps(series.to_journal())))
    assert sorted(kept.points[-1].metrics) == [f"accuracy_{name:03}" for name in range(MAX_METRICS)]
    assert len(json.dumps(series.to_journal())) < 300_000
