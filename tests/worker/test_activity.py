"""Every second of a worker belongs to one activity."""

from __future__ import annotations

import pytest

from elasticdl.activities import Activity, ActivityClock


def test_a_worker_that_waits_for_input_without_a_task_is_idle() -> None:
    clock = ActivityClock()
    with clock.during(Activity.INPUT):
        assert clock.read()[0] is Activity.INPUT
        with clock.without_task():
            assert clock.read()[0] is Activity.IDLE
        assert clock.read()[0] is Activity.INPUT
    assert set(clock.read()[1]) == {Activity.START, Activity.INPUT, Activity.IDLE}


def test_a_worker_that_waits_for_the_feed_of_an_open_task_is_not_idle() -> None:
    """Though the next task is asked for already, as it is while minibatches are made of this one."""
    clock = ActivityClock()
    clock.add_tasks(1)
    with clock.during(Activity.INPUT), clock.without_task():
        assert clock.read()[0] is Activity.INPUT
        clock.add_tasks(-1)
        assert clock.read()[0] is Activity.IDLE


def test_a_prefetch_that_waits_for_a_task_does_not_make_a_computing_worker_idle() -> None:
    clock = ActivityClock()
    with clock.during(Activity.COMPUTE), clock.without_task():
        assert clock.read()[0] is Activity.COMPUTE


def test_activities_nest() -> None:
    clock = ActivityClock()
    with clock.during(Activity.EVALUATE):
        with clock.during(Activity.PS):
            assert clock.read()[0] is Activity.PS
        assert clock.read()[0] is Activity.EVALUATE
    assert clock.read()[0] is Activity.START


def test_a_block_that_raises_gives_the_time_back() -> None:
    clock = ActivityClock()
    clock.switch(Activity.COMPUTE)
    with pytest.raises(ValueError, match="in the feed"), clock.during(Activity.INPUT):
        raise ValueError("in the feed")
    assert clock.read()[0] is Activity.COMPUTE
