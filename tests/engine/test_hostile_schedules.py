"""Hundreds of small jobs with faults at bad moments: members that live lose the model, or come back with an old one.

A failure names its seed: `python -m tests.engine hostile SEED` replays it with its log.
"""

from __future__ import annotations

import pytest

from tests.engine.hostile_schedules import play_hostile

_AT_ONCE = 50


@pytest.mark.parametrize("first", range(0, 300, _AT_ONCE))
def test_whenever_faults_come_every_record_is_in_the_model_once(first: int) -> None:
    for seed in range(first, first + _AT_ONCE):
        play_hostile(seed)


def test_an_initial_model_lacks_minibatches_of_which_the_report_is_under_way() -> None:
    play_hostile(4716)
