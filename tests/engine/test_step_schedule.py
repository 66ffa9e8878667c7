"""The order of steps with --fixed_global_batch, decided without any member."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticdl.ps.applied import AppliedSet, MinibatchName
from elasticdl.worker.allreduce.schedule import NO_EPOCH, StepSchedule

Schedule = StepSchedule[MinibatchName]


def names(epoch: int, count: int) -> list[MinibatchName]:
    return [MinibatchName(epoch, 0, n) for n in range(count)]


def schedule(num_per_step: int, *queued: MinibatchName, num_per_epoch: int = 0) -> Schedule:
    made: Schedule = StepSchedule(num_per_step, num_per_epoch, lambda name: name)
    made.add(queued, AppliedSet())
    return made


def applied(*found: MinibatchName) -> AppliedSet:
    held = AppliedSet()
    for name in found:
        held.add(name)
    return held


@given(count=st.integers(1, 30), num_per_step=st.integers(1, 9), size=st.integers(1, 9))
def test_pieces_of_all_ranks_are_every_minibatch_once_in_order(count: int, num_per_step: int, size: int) -> None:
    made = schedule(num_per_step, *names(0, count))
    made.close(0)
    steps = list(made.steps())
    assert [len(step) for step in steps[:-1]] == [num_per_step] * (len(steps) - 1)
    pieces = [made.piece(step, rank, size) for step in steps for rank in range(size)]
    assert [name for piece in pieces for name in piece] == names(0, count)
    assert max(map(len, pieces)) <= -(-num_per_step // size)


def test_the_rest_of_an_epoch_is_a_step_once_it_is_closed_or_the_next_epoch_begins() -> None:
    made = schedule(3, *names(0, 5))
    assert list(made.steps()) == [names(0, 3)]
    made.close(0)
    assert list(made.steps()) == [names(0, 3), names(0, 5)[3:]]
    other = schedule(3, *names(0, 2), *names(1, 3))
    assert list(other.steps()) == [names(0, 2), names(1, 3)]


def test_a_minibatch_is_queued_once_and_never_if_the_model_holds_it() -> None:
    made = schedule(3, *names(0, 2))
    assert made.add(names(0, 4), applied(MinibatchName(0, 0, 3))) == [MinibatchName(0, 0, 2)]
    assert list(made) == names(0, 3)


def test_applied_minibatches_leave_at_the_head_alone() -> None:
    made = schedule(2, *names(0, 4))
    assert made.take_applied(applied(*names(0, 1), MinibatchName(0, 0, 2))) == names(0, 1)
    assert list(made) == names(0, 4)[1:]


def test_an_epoch_is_closed_by_the_plan_or_by_what_the_master_says() -> None:
    planned = schedule(3, *names(0, 5)[3:], num_per_epoch=5)
    assert planned.epoch_to_close(applied(*names(0, 3)), lambda epoch: False) == 0
    assert planned.epoch_to_close(applied(*names(0, 2)), lambda epoch: False) == NO_EPOCH
    assert planned.epoch_to_close(applied(*names(0, 2)), lambda epoch: True) == 0
    planned.close(0)
    assert planned.epoch_to_close(applied(*names(0, 3)), lambda epoch: True) == NO_EPOCH


def test_an_epoch_with_a_whole_step_left_is_not_closed_yet() -> None:
    assert schedule(3, *names(0, 3)).epoch_to_close(AppliedSet(), lambda epoch: True) == NO_EPOCH
    assert schedule(3).epoch_to_close(AppliedSet(), lambda epoch: True) == NO_EPOCH


def test_a_group_that_was_just_entered_knows_of_no_closed_epoch() -> None:
    made = schedule(3, *names(0, 2))
    made.close(0)
    made.clear()
    made.add(names(0, 2), AppliedSet())
    assert made.next() == []


def test_a_failed_task_leaves_the_order() -> None:
    made = schedule(2, MinibatchName(0, 1, 0), *names(0, 2))
    made.remove(lambda name: name.task == 1)
    assert made.next() == names(0, 2)
