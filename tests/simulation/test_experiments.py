"""The measurement of the experiments on a cluster."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.elastic_accuracy import at, compare
from benchmarks.experiments import Interval, Panel, draw, ideal_end, share_used


def test_the_second_job_fills_the_places_beside_the_first_and_grows_when_it_has_ended() -> None:
    # The first takes 7 places until 100; the second 5 from 30 to 100 and 7 for what is then left of it.
    assert ideal_end((700, 700), (0, 30), workers=7, places=12) == pytest.approx(100 + (700 - 5 * 70) / 7)


def test_a_second_job_that_ends_first_never_grows() -> None:
    assert ideal_end((700, 100), (0, 30), workers=7, places=12) == 100
    assert ideal_end((700, 340), (0, 30), workers=7, places=12) == 100


def test_two_jobs_that_fit_beside_each_other_do_not_wait() -> None:
    assert ideal_end((400, 400), (0, 10), workers=4, places=12) == 110


def test_a_second_job_after_the_end_of_the_first_begins_when_it_is_submitted() -> None:
    assert ideal_end((70, 70), (0, 30), workers=7, places=12) == 40


def test_places_are_used_within_the_time_that_is_asked_for() -> None:
    used = [Interval(0, 10), Interval(5, 25), Interval(30, 40)]
    assert share_used(used, places=2, began=0, ended=20) == (10 + 15) / 40
    assert share_used([], places=2, began=0, ended=20) == 0


def test_the_picture_tells_how_much_of_the_room_was_used(tmp_path: Path) -> None:
    jobs = {"first job": [Interval(100, 110)] * 6, "second job": [Interval(105, 110)] * 6}
    draw([Panel("Elastic", jobs, began=100, ended=110)], tmp_path / "places.svg")
    assert "Elastic: 75% of 12 places used in 10 s" in (tmp_path / "places.svg").read_text()


def test_curves_of_different_steps_are_compared_at_the_same_steps() -> None:
    assert at({100: 0.5, 210: 0.6, 300: 0.9}, [100, 200, 300]) == pytest.approx([0.5, 0.5 + 0.1 * 100 / 110, 0.9])


@pytest.mark.parametrize(("loss_of_auc", "is_different"), [(0.0, False), (0.02, True)])
def test_a_lower_auc_at_one_step_is_a_difference(loss_of_auc: float, is_different: bool) -> None:
    noise = np.random.default_rng(0).normal(0, 0.001, (9, 4))
    curves = np.array([0.7, 0.8, 0.85, 0.9]) + noise
    curves[6:, 2] -= loss_of_auc
    found = compare(curves[:6], curves[6:])
    assert (found["smallest_p"] < 0.05) == is_different
    assert found["largest_difference"] == pytest.approx(loss_of_auc, abs=0.002)
