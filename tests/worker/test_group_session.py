"""A worker's life in groups: the state at entry, the proof of a step, and the loss when one ends."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.allreduce.group_session import GroupEnded
from elasticdl.worker.allreduce.step_header import StepFlag
from elasticdl.worker.ledger import Ledger, RestoredModel
from elasticdl_client.errors import ModelDefinitionError
from tests.worker.group_master import (
    ANSWER_S,
    GroupMaster,
    SessionMember,
    all_do,
    ended,
    enter,
    entered,
    name_of,
    session_members,
    step,
    summed,
)


@pytest.fixture
def master() -> Iterator[GroupMaster]:
    scripted = GroupMaster()
    yield scripted
    scripted.stop()


@pytest.fixture
def three(master: GroupMaster) -> Iterator[list[SessionMember]]:
    with session_members(master, 3) as made:
        yield made


def values(members: list[SessionMember]) -> list[float]:
    return [float(member.state.value[0]) for member in members]


def step_together(first: SessionMember, second: SessionMember, one: int, other: int) -> None:
    begun = [first.does(step, one), second.does(step, other)]
    for each in begun:
        each.result(ANSWER_S)


def test_without_a_model_all_begin_with_the_one_that_rank_0_restores(
    master: GroupMaster, three: list[SessionMember]
) -> None:
    restored = Ledger(steps=7, num_records=70)
    restored.applied.add(name_of(4))
    three[1].state.restored = RestoredModel(restored, "checkpoints/7")
    version = entered(master, [three[1], three[0]])
    assert [(three[n].session.rank, three[n].session.size) for n in (1, 0)] == [(0, 2), (1, 2)]
    assert values(three[:2]) == [0.0, 0.0]
    for member in three[:2]:
        ledger = member.session.ledger
        assert (ledger.steps, ledger.num_records, name_of(4) in ledger.applied) == (7, 70, True)
    (told,) = master.hears("GroupFormed")
    assert (told.worker_id, told.version, told.steps, told.restored_from) == (1, version, 7, "checkpoints/7")
    assert told.engine == "the native mesh"
    assert [(task.task, list(task.extras)) for task in told.applied.tasks] == [(0, [4])]


def test_a_member_whose_model_sums_up_something_else_is_refused_by_name(
    master: GroupMaster, three: list[SessionMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers of its steps would be of another length.  However late it is, the others wait until it knows why."""
    three[2].state.summed.append("the change of scale (8,)")
    broadcast = three[2].group.broadcast_bytes

    def late(data: bytes | None, source: int) -> bytes:
        assert not master.are_outside_within(1.0, 0)
        return broadcast(data, source)

    monkeypatch.setattr(three[2].group, "broadcast_bytes", late)
    begun = [member.does(enter) for member in three]
    master.plan(0, 1, 2)
    with pytest.raises(ModelDefinitionError, match=r"sums up the change of scale \(8,\) here, and nothing more there"):
        begun[2].result(ANSWER_S)
    master.plan(0, 1)
    assert [one.result(ANSWER_S) for one in begun[:2]] == [True, True]
    step_together(three[0], three[1], 1, 2)
    assert values(three[:2]) == [3.0, 3.0]


def test_a_step_is_proven_by_the_headers_of_the_next(master: GroupMaster, three: list[SessionMember]) -> None:
    entered(master, three)
    begun = [three[0].does(step, 1, 2), three[1].does(step), three[2].does(step, 5)]
    plans = [one.result(ANSWER_S) for one in begun]
    assert [[part.name.n for part in plan.own] for plan in plans] == [[1, 2], [], [5]]
    assert all([part.name.n for part in plan.all_parts] == [1, 2, 5] for plan in plans)
    assert values(three) == [8.0] * 3
    assert [member.session.take_confirmed() for member in three] == [[]] * 3
    all_do(three, step)
    assert [member.session.take_confirmed() for member in three] == [[name_of(1), name_of(2)], [], [name_of(5)]]
    assert [member.session.take_confirmed() for member in three] == [[]] * 3
    assert [member.session.ledger.num_records for member in three] == [30] * 3


def test_a_joiner_gets_model_and_ledger_from_the_members(master: GroupMaster, three: list[SessionMember]) -> None:
    entered(master, three[:2])
    step_together(three[0], three[1], 3, 4)
    joins = three[2].does(enter)
    begun = [member.does(ended) for member in three[:2]]
    master.plan(0, 1, 2, sources=[0, 1])
    assert [one.result(ANSWER_S) for one in begun] == ["a newer group is planned"] * 2
    assert all_do(three[:2], enter) == [True, True]
    assert joins.result(ANSWER_S)
    assert values(three) == [7.0] * 3
    assert len({member.session.digest() for member in three}) == 1
    assert [member.session.ledger.steps for member in three] == [1] * 3
    assert all(name_of(number) in three[2].session.ledger.applied for number in (3, 4))


def test_a_member_that_is_a_step_ahead_gives_its_model_to_the_others(
    master: GroupMaster, three: list[SessionMember]
) -> None:
    entered(master, three[:2])
    begun: list[Future[Any]] = [three[0].does(summed, 3), three[1].does(step, 4)]
    for one in begun:
        one.result(ANSWER_S)
    assert values(three[:2]) == [0.0, 7.0]
    assert isinstance(three[0].does(lambda member: member.session.abandon("user code raised")).result(), GroupEnded)
    assert three[1].does(ended).result(ANSWER_S).startswith("it has lost")
    entered(master, three[:2], sources=[0, 1])
    assert values(three[:2]) == [7.0, 7.0]
    assert [member.session.ledger.steps for member in three[:2]] == [1, 1]
    assert three[1].session.take_confirmed() == [name_of(4)]
    assert [told.steps for told in master.hears("GroupFormed", 2)] == [0, 1]
    reasons = {(told.worker_id, told.reason) for told in master.hears("ReadyForGroup", 4) if told.left}
    assert reasons == {(0, "user code raised"), (1, "it has lost worker 0")}


def test_what_is_of_an_older_group_never_comes_back(master: GroupMaster, three: list[SessionMember]) -> None:
    entered(master, three)
    begun: list[Future[Any]] = [three[0].does(summed, 1), three[1].does(summed, 1), three[2].does(step, 6)]
    for one in begun:
        one.result(ANSWER_S)
    three[2].does(lambda member: member.session.abandon("it was cut off")).result()
    for member in three[:2]:
        assert member.does(ended).result(ANSWER_S).startswith("it has lost")
    entered(master, three[:2], sources=[0, 1])  # the step of worker 2 is lost with it
    step_together(three[0], three[1], 1, 2)
    begun_anew = [member.does(ended) for member in three[:2]]
    joins = three[2].does(enter)
    master.plan(0, 1, 2, sources=[0, 1])
    for one_more in begun_anew:
        one_more.result(ANSWER_S)
    assert all_do(three[:2], enter) == [True, True]
    assert joins.result(ANSWER_S)
    assert values(three) == [3.0] * 3
    assert name_of(6) not in three[2].session.ledger.applied
    assert three[2].session.take_confirmed() == []


def test_an_incomplete_model_is_given_to_no_member(master: GroupMaster, three: list[SessionMember]) -> None:
    entered(master, three[:2])
    step_together(three[0], three[1], 1, 2)
    three[0].state.value += np.float32(100)  # the half of an update
    three[0].does(lambda member: member.session.abandon("the update raised", is_model_whole=False)).result()
    assert three[1].does(ended).result(ANSWER_S).startswith("it has lost")
    entered(master, three[:2], sources=[0, 1])
    assert values(three[:2]) == [3.0, 3.0]


def test_a_member_that_leaves_is_named_and_costs_no_step(master: GroupMaster, three: list[SessionMember]) -> None:
    entered(master, three)
    begun = [three[0].does(step, 1), three[1].does(step, 2), three[2].does(step, 3)]
    for one in begun:
        one.result(ANSWER_S)
    wishes = (StepFlag.NOTHING, StepFlag.LEAVING, StepFlag.NOTHING)
    ends = [member.does(ended, wish) for member, wish in zip(three, wishes, strict=True)]
    assert [one.result(ANSWER_S) for one in ends] == ["a member leaves"] * 3
    assert three[2].session.take_confirmed() == [name_of(3)]
    entered(master, [three[0], three[2]], sources=[0, 2])
    assert values([three[0], three[2]]) == [6.0, 6.0]
    reasons = {told.reason for told in master.hears("ReadyForGroup", 5) if told.left}
    assert reasons == {"worker 1 leaves"}


def test_a_member_that_waits_for_a_former_one_is_freed(master: GroupMaster, three: list[SessionMember]) -> None:
    version = entered(master, three[:2])
    master.deaf.add(1)  # it would leave, and worker 0 could see that before it hears of the plan
    waits = three[0].does(ended)  # worker 1 does not come
    with master.changed:  # woken by anything; only the group's own clock counts
        while three[0].session.standing()[1] == 0.0:
            master.changed.wait(0.01)
    assert three[0].session.standing()[0] == version
    master.plan(0, sources=[0])
    assert waits.result(ANSWER_S) == "a newer group without worker 1 is planned"
    assert three[0].session.standing() == (0, 0.0)
    assert three[0].does(enter).result(ANSWER_S)
    assert three[0].session.size == 1


def test_a_group_that_the_master_does_not_want_is_left_for_the_next(
    master: GroupMaster, three: list[SessionMember]
) -> None:
    def refuse(method: str) -> None:
        master.accepts = method != "GroupFormed"

    master.on_call = refuse
    begun = [member.does(enter) for member in three[:2]]
    refused = master.plan(0, 1)
    master.hears("GroupFormed")
    assert begun[1].result(ANSWER_S)  # it hears of it when it waits for worker 0
    assert three[1].does(ended).result(ANSWER_S).startswith("it has lost")
    again = three[1].does(enter)
    master.await_outside(0, 1)
    told = [one for one in master.hears("ReadyForGroup") if one.left == refused and one.worker_id == 0]
    assert told[0].reason == "the master rejected it: as the test wants"
    master.on_call = lambda method: setattr(master, "accepts", True)
    master.plan(0, 1)
    assert [one.result(ANSWER_S) for one in (begun[0], again)] == [True, True]


def test_a_group_that_a_member_is_shut_out_of_as_it_has_formed_does_not_hold_the_others(
    master: GroupMaster, three: list[SessionMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, form = three[1].session, three[1].session._form
    outside = []

    def form_and_be_asked_to_end(group: pb.Group) -> None:
        form(group)
        outside.append(session.shut_out())

    monkeypatch.setattr(session, "_form", form_and_be_asked_to_end)
    begun = [member.does(enter) for member in three[:2]]
    master.plan(0, 1)
    assert begun[1].result(ANSWER_S) is False
    assert outside == [True]
    master.await_outside(0)
    master.plan(0)
    assert begun[0].result(ANSWER_S)


def test_all_hear_numbers_and_words_of_each_other(master: GroupMaster, three: list[SessionMember]) -> None:
    entered(master, three)
    numbers = [member.does(lambda one: one.session.gather(np.array([one.session.rank, 7]))) for member in three]
    assert [found.result(ANSWER_S).tolist() for found in numbers] == [[[0, 7], [1, 7], [2, 7]]] * 3
    words = all_do(three, lambda one: one.session.share(b"of rank 2" if one.session.rank == 2 else None, 2))
    assert words == [b"of rank 2"] * 3


def test_when_the_job_is_over_no_member_waits_for_a_group(master: GroupMaster, three: list[SessionMember]) -> None:
    entered(master, three[:2])
    outside, inside = three[2].does(enter), three[0].does(ended)
    master.hears("ReadyForGroup", 3)
    master.end()
    assert outside.result(ANSWER_S) is False
    assert inside.result(ANSWER_S).startswith(("the job is over", "it has lost"))  # which of both hears it first
    assert three[0].does(enter).result(ANSWER_S) is False


def test_minibatches_confirmed_before_the_model_became_an_older_one_are_not_said_to_be_in_it(
    master: GroupMaster, three: list[SessionMember]
) -> None:
    entered(master, three[:2])
    step_together(three[0], three[1], 1, 2)
    ends = [three[0].does(ended), three[1].does(ended, StepFlag.LEAVING)]
    for one in ends:
        one.result(ANSWER_S)
    three[0].state.restored = RestoredModel(Ledger())
    entered(master, three[:2])  # no member is a source
    assert [member.session.ledger.steps for member in three[:2]] == [0, 0]
    assert [member.session.take_confirmed() for member in three[:2]] == [[], []]


def test_a_restored_model_of_which_the_master_was_not_told_is_restored_again(
    master: GroupMaster, three: list[SessionMember]
) -> None:
    entered(master, three[:2])
    step_together(three[0], three[1], 1, 2)
    step_together(three[0], three[1], 3, 4)
    three[0].state.restored = RestoredModel(Ledger(steps=1), "checkpoints/1")
    for member in three[:2]:
        member.does(lambda one: one.session.abandon("the update raised", is_model_whole=False)).result()
    master.on_call = lambda method: setattr(master, "accepts", method != "GroupFormed")
    begun = [member.does(enter) for member in three[:2]]
    master.await_outside(0, 1)
    master.plan(0, 1, sources=[0, 1])
    assert begun[1].result(ANSWER_S)  # with the restored model
    assert three[1].does(ended).result(ANSWER_S).startswith("it has lost")
    again = three[1].does(enter)
    master.await_outside(0, 1)
    master.on_call = lambda method: setattr(master, "accepts", True)
    master.plan(0, 1, sources=[0, 1])
    assert [one.result(ANSWER_S) for one in (begun[0], again)] == [True, True]
    assert master.hears("GroupFormed", 3)[-1].restored_from == "checkpoints/1"  # it lacks minibatches of the old model
