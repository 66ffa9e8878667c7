"""Random schedules of everything that can happen to the worker's own code: every record is in the model once, it ends.

A failure names its seed: `python -m tests.engine SEED` replays it with its log.
"""

from __future__ import annotations

import pytest

from tests.engine.schedules import play

_AT_ONCE = 8  # schedules of a test: the suite runs in several processes


@pytest.mark.parametrize("first", range(0, 64, _AT_ONCE))
def test_whatever_happens_to_members_every_record_is_in_the_model_once(first: int) -> None:
    for seed in range(first, first + _AT_ONCE):
        play(seed)


@pytest.mark.full  # six minutes: what 64 schedules do not meet
@pytest.mark.timeout(1800)
def test_whatever_happens_to_members_for_long_every_record_is_in_the_model_once() -> None:
    for seed in range(1000, 3400):
        play(seed)


def test_a_seed_replays_its_schedule() -> None:
    assert [play(7).log, play(7).scheduler.now] == [play(7).log, play(7).scheduler.now]
