"""The members of a group, their order, and when a new one is called."""

from __future__ import annotations

import pytest
from core_script import Like, applied
from group_script import GroupScript, standing

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.values import DataKind, Member, PodState, ScriptPlan
from elasticdl.protocol import Role, Shard


def test_the_first_group_has_all_ready_workers_in_order_of_their_ids() -> None:
    script = GroupScript(num_workers=2)
    for worker_id in (0, 1):
        script.worker_starts(worker_id)
    script.data_is_known()
    script.ready(1)
    assert script.members == ()
    script.ready(0)
    assert script.planned.members == (Member(0, 7, "host-0"), Member(1, 7, "host-1"))
    assert not script.stands


def test_a_worker_that_is_alone_waits_a_moment_for_others_and_no_longer() -> None:
    script = GroupScript(num_workers=3)
    script.worker_starts(0)
    script.ready(0)
    assert script.told(c.Wake)[0].after_s == pytest.approx(0.2)
    assert script.members == ()
    script.moment()
    assert script.members == (0,)


def test_joiners_that_come_one_after_another_delay_a_group_only_briefly() -> None:
    script = GroupScript(num_workers=20)
    for worker_id in range(12):
        script.worker_starts(worker_id)
        script.ready(worker_id)
        script.moment(0.15)
    assert len(script.members) == 7


def test_a_watch_is_answered_at_once_when_a_group_is_planned() -> None:
    script = GroupScript(num_workers=1)
    script.worker_starts(0)
    call = script.watch(0)
    assert script.answer(call) is None
    script.ready(0)
    assert script.answer(call) == c.GroupPlanned(script.planned)
    assert script.answer(script.watch(0)) == c.GroupPlanned(script.planned)
    assert script.answer(script.watch(0, script.version)) is None


def test_a_watch_of_which_nothing_comes_is_answered_in_time() -> None:
    script = standing(1)
    call = script.watch(0, script.version)
    script.silence(16)
    assert script.answer(call) == c.NoLeaseNow()


def test_a_second_watch_ends_the_first_one() -> None:
    script = standing(1)
    first, second = script.watch(0, script.version), script.watch(0, script.version)
    assert (script.answer(first), script.answer(second)) == (c.NoLeaseNow(), None)


def test_a_stranger_is_asked_to_register() -> None:
    script = standing(1)
    assert script.ready(4) == Like(c.UnknownWorker)
    assert script.answer(script.watch(4)) == Like(c.UnknownWorker)
    assert script.ask(e.SampleRequested, 4, 7) == Like(c.UnknownWorker)
    assert script.ask(e.GroupFormed, 0, 8, script.version, applied({})) == Like(c.UnknownWorker)


def test_joiners_enter_behind_the_members_of_a_healthy_group() -> None:
    script = standing(1, wanted=3)
    version = script.version
    script.successor_starts(2)
    script.successor_starts(1)
    script.moment()
    assert [(m.worker_id, m.is_source) for m in script.planned.members] == [(0, True), (1, False), (2, False)]
    assert script.version > version
    assert script.heartbeat(0).group_version == script.version


def test_rank_is_age() -> None:
    script = standing(1, wanted=6)
    script.successor_starts(5)
    script.moment()
    script.forms()
    script.successor_starts(1)
    script.moment()
    assert script.members == (0, 5, 1)
    script.forms()
    script.kill(0)
    script.all_leave(1, 5)
    assert script.members == (5, 1)


def test_a_worker_that_comes_while_a_group_is_being_formed_joins_the_next_one() -> None:
    script = standing(1, wanted=3)
    script.successor_starts(1)
    script.moment()
    version = script.version
    script.successor_starts(2)
    script.moment(1.0)
    assert script.version == version
    script.forms()
    script.moment()
    assert script.members == (0, 1, 2)


def test_a_joiner_that_gives_up_waiting_is_called_again_with_the_slow_ones() -> None:
    script = standing(2, wanted=3)
    script.successor_starts(2)
    script.moment()
    version = script.version
    script.silence(5)
    script.ready(2, version, "forming took too long")
    script.moment()
    assert script.members == (0, 1, 2)
    assert script.version > version


def test_fewer_workers_than_the_flag_are_awaited_once_scripts_have_ended() -> None:
    script = standing(3, min_workers=3, runs_command=True, expects_data=True)
    script.pod(Role.WORKER, 2, PodState.SUCCEEDED, "Completed")
    script.kill(1)
    script.all_leave(0)
    script.moment()
    assert "Training waits for workers: 1 can form a group, 2 must (--min_workers=3)" in script.log()


def test_training_waits_for_min_workers() -> None:
    script = GroupScript(num_workers=3, min_workers=2)
    script.worker_starts(0)
    script.data_is_known()
    script.ready(0)
    script.moment()
    assert script.members == ()
    assert "Training waits for workers: 1 can form a group, 2 must (--min_workers=2)" in script.log()
    script.successor_starts(1)
    script.moment()
    assert script.members == (0, 1)
    script.forms(steps=0)
    script.kill(0)
    script.all_leave(1)
    script.moment()
    assert script.members == (0, 1)
    script.successor_starts(3)
    script.moment()
    assert script.members == (1, 3)


@pytest.mark.parametrize("restarts", [False, True])
def test_workers_whose_scripts_have_ended_are_not_waited_for(restarts: bool) -> None:
    script = GroupScript(num_workers=3, min_workers=3, runs_command=True)
    for worker_id in range(3):
        script.worker_starts(worker_id)
    script.ask(e.ModelReported, 0, 7, shards={DataKind.TRAINING: (Shard("", 0, 40),)}, plan=ScriptPlan(10, 2, 1))
    for worker_id in range(3):
        script.ready(worker_id)
    script.forms(steps=0)
    script.pod(Role.WORKER, 0, PodState.SUCCEEDED, "Completed")
    if restarts:
        script.restarts(1, 2)
        for worker_id in (1, 2):
            script.worker_joins(worker_id)
    script.all_leave(1, 2)
    script.moment()
    assert script.members == (1, 2)
    script.forms()
    script.kill(1)
    script.all_leave(2)
    script.moment()
    assert script.members == (1, 2)  # worker 1 has a successor
    script.successor_starts(3)
    script.moment()
    assert script.members == (2, 3)


def test_workers_that_end_agree_on_the_last_checkpoint_however_few_are_left() -> None:
    script = standing(3, min_workers=3)
    script.kill(1)
    script.all_leave(0, 2)
    script.moment()
    script.beat(0, ending=True)
    script.tell(e.Tick())
    assert script.members == (0, 1, 2)  # worker 2 trains on, and waits for a third one
    script.beat(2, ending=True)
    assert script.members == (0, 2)


def test_a_successor_does_not_keep_workers_that_end_from_the_last_checkpoint() -> None:
    script = standing(3, min_workers=3)
    script.kill(0)
    script.kill(1)
    script.all_leave(2)
    script.successor_starts(3)
    script.moment()
    script.beat(2, ending=True)
    assert script.members == (2,)
    script.forms()
    version = script.version
    script.beat(2, ending=True)
    script.tell(e.Tick())
    assert (script.members, script.version) == ((2,), version)  # it is not called out again


def test_a_group_that_cannot_form_is_tried_without_its_joiners() -> None:
    script = standing(2, wanted=3)
    script.successor_starts(2)
    script.moment()
    version = script.version
    for worker_id in (0, 1, 2):
        script.ready(worker_id, version, "forming took too long")
    assert script.members == (0, 1)
    script.forms()
    script.silence(5)
    assert script.members == (0, 1)
    script.silence(6)
    assert script.members == (0, 1, 2)


def test_a_late_word_of_an_old_group_changes_nothing() -> None:
    script = standing(2, wanted=3)
    version = script.version
    script.successor_starts(2)
    script.moment()
    assert script.ask(e.GroupFormed, 0, 7, version, applied({}), 0) == Like(c.Accepted)  # heard before
    assert not script.stands
    script.forms()
    newest = script.version
    script.ready(1, version, "a newer group is planned")
    assert script.ask(e.GroupFormed, 0, 7, version, applied({}), 0) == Like(c.Refused)
    assert script.version == newest
    assert script.stands


def test_only_rank_0_says_that_a_group_has_formed() -> None:
    script = standing(2, wanted=3)
    script.successor_starts(2)
    script.moment()
    assert script.ask(e.GroupFormed, 1, 7, script.version, applied({}), 0) == Like(c.Refused)


def test_all_watches_see_the_end() -> None:
    script = standing(2)
    call = script.watch(1, script.version)
    for worker_id in (0, 1):
        script.finish(script.lease(worker_id), worker_id)
    assert script.answer(call) == c.JobOver(formed=script.version)
    assert script.answer(script.watch(0)) == script.ask(e.SampleRequested, 0, 7) == c.JobOver(formed=script.version)


def test_the_status_shows_the_group() -> None:
    script = standing(2)
    assert (script.job.status().world, script.job.status().num_worlds) == ((0, 1), 1)
    script.kill(0)
    assert script.job.status().world == ()


def test_a_joiner_whose_group_broke_before_it_knew_it_is_in_the_next_one() -> None:
    script = standing(2, wanted=3)
    script.successor_starts(2)
    script.moment()
    assert script.members == (0, 1, 2)
    script.kill(1)  # no member knows the new group
    script.all_leave(0)
    assert script.members == (0, 2)


def test_a_joiner_that_knows_a_group_is_ready_again_when_it_has_left_it() -> None:
    script = standing(2, wanted=3)
    script.successor_starts(2)
    call = script.watch(2)
    script.moment()
    assert script.answer(call) == c.GroupPlanned(script.planned)
    script.ready(2)  # a late repetition
    script.kill(1)
    script.all_leave(0)
    assert script.members == (0, 1, 2)  # worker 2 may be on its way: it is waited for, not for long
    script.moment()
    assert script.members == (0,)
    script.ready(2, script.version - 1, "worker 1 is gone")
    script.forms()
    script.moment()
    assert script.members == (0, 2)
