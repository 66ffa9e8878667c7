"""The headers that members of a group exchange before a step."""

from __future__ import annotations

import pytest

from elasticdl.ps.applied import MinibatchName
from elasticdl.worker.allreduce.step_header import BatchRef, StepFlag, StepPlan, StepProposal


def part(n: int, num_records: int = 10) -> BatchRef:
    return BatchRef(MinibatchName(2, 3, n), num_records)


@pytest.mark.parametrize("parts", [(), (part(0),), (part(4), part(5, 7))])
def test_a_header_survives_its_line(parts: tuple[BatchRef, ...]) -> None:
    header = StepProposal(5 << 32 | 7, StepFlag.LEAVING | StepFlag.EVALUATION, parts)
    line = header.numbers(most_parts=2)
    assert line.shape == StepProposal(1).numbers(2).shape
    assert StepProposal.of(line) == header


def test_a_part_weighs_its_records() -> None:
    plan = StepPlan.of(
        [StepProposal(1, parts=(part(0, 30),)), StepProposal(1), StepProposal(1, parts=(part(1, 10),))], rank=2
    )
    assert plan.own == (part(1, 10),)
    assert plan.num_records == 40
    assert [plan.scale(one) for one in plan.all_parts] == [0.75, 0.25]
    assert plan.wishes is StepFlag.NOTHING


def test_a_minibatch_that_two_bring_counts_once() -> None:
    plan = StepPlan.of([StepProposal(1, parts=(part(0),)), StepProposal(1, parts=(part(0),))], rank=1)
    assert plan.own == ()
    assert plan.all_parts == [part(0)]


def test_minibatches_without_records_weigh_nothing() -> None:
    plan = StepPlan.of([StepProposal(1, parts=(part(0, 0),))], rank=0)
    assert plan.scale(plan.own[0]) == 0.0


def test_the_lowest_rank_with_a_wish_is_found() -> None:
    plan = StepPlan.of(
        [StepProposal(1), StepProposal(1, StepFlag.FAILED), StepProposal(1, StepFlag.FAILED | StepFlag.SHARING)], rank=0
    )
    assert plan.first_with(StepFlag.FAILED) == 1
    assert plan.wishes == StepFlag.FAILED | StepFlag.SHARING
