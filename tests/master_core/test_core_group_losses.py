"""Members that a group loses: by death, silence, a farewell, a lost lease; awaited ones, and excluded ones."""

from __future__ import annotations

import pytest
from group_script import GroupScript, standing

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.values import Member
from elasticdl.protocol import Role
from elasticdl_client.job_events import EventKind


def test_a_lost_worker_costs_a_moment_when_all_others_are_ready() -> None:
    script = standing(3)
    script.kill(1)
    assert not script.stands
    assert script.request(0) is None
    script.all_leave(0, 2)
    assert script.members == (0, 2)
    script.moment()
    script.forms()
    line = next(line for line in script.log() if line.startswith("Group 2"))
    assert line.startswith("Group 2 of 2 workers has formed in 0.25 s: worker 0, 2 (worker 1 was lost (Killed)")


def test_the_status_says_what_sums_in_the_group_that_stands_and_the_log_when_that_changes() -> None:
    script = standing(4)
    for lost, left in ((3, (0, 1, 2)), (2, (0, 1))):
        script.kill(lost)
        assert script.job.status().engine == ""
        script.all_leave(*left)
        script.moment()
        script.forms(engine="NCCL 2.28.9")
        assert script.job.status().engine == "NCCL 2.28.9"
    formed = [line for line in script.log() if line.startswith("Group ")]
    assert [line.endswith("; it sums by NCCL 2.28.9") for line in formed] == [False, True, False]


def test_the_others_of_a_lost_worker_are_called_when_they_do_not_notice() -> None:
    script = standing(3)
    call = script.watch(0, script.version)
    script.kill(1)
    assert script.answer(call) is None
    script.moment()
    assert script.members == (0, 2)
    assert script.answer(call) == c.GroupPlanned(script.planned)


def test_a_slow_survivor_is_not_waited_for_and_joins_later() -> None:
    script = standing(3)
    script.kill(1)
    script.all_leave(0)
    assert script.members == (0, 1, 2)
    script.moment()
    assert script.members == (0,)
    script.forms()
    script.ready(2, script.version - 1, "worker 0 is gone")
    script.moment()
    assert script.members == (0, 2)
    assert not script.planned.members[1].is_source


def test_a_slow_survivor_that_may_alone_hold_a_shard_is_called_with_the_others() -> None:
    script = standing(3, shard_optimizer=True)
    script.kill(1)
    script.all_leave(0)
    assert script.members == (0, 1, 2)
    script.moment()
    assert script.members == (0, 2)
    assert all(member.is_source for member in script.planned.members)


def test_a_joiner_on_its_way_is_not_waited_for_whatever_survivors_hold() -> None:
    script = standing(3, wanted=4, shard_optimizer=True)
    script.successor_starts(3)
    script.moment()
    assert script.members == (0, 1, 2, 3)
    script.watch(3)
    script.kill(1)
    script.all_leave(0, 2)
    script.moment()
    assert script.members == (0, 2)


def test_a_silent_survivor_is_not_called_whatever_it_holds() -> None:
    script = standing(3, shard_optimizer=True)
    script.silence(4, 2)
    script.kill(1)
    script.silence(2, 2)
    script.all_leave(0)
    script.moment()
    assert script.members == (0,)


def test_a_slow_survivor_alone_has_the_model_and_is_waited_for() -> None:
    script = standing(2)
    script.kill(0)
    script.successor_starts(2)
    script.silence(60)
    assert script.planned.members[0] == Member(1, 7, "host-1", True)


def test_silence_is_noticed_after_the_collective_timeout() -> None:
    script = standing(3)
    script.silence(4, 1)
    assert script.stands
    script.silence(2, 1)
    assert script.members == (0, 2)
    script.forms()
    assert "worker 1 was silent for 5 s" in script.log()[-1]


def last_holder() -> GroupScript:
    """Worker 1 alone has the model and is silent for 6 s; then worker 2 comes."""
    script = standing(2)
    script.kill(0)
    script.all_leave(1)
    script.moment()
    assert script.members == (1,)
    script.forms()
    script.silence(6, 1)
    script.successor_starts(2)
    return script


def test_the_last_member_that_has_the_model_may_be_silent_for_longer() -> None:
    script = last_holder()
    script.silence(20, 1)
    assert script.members == (1,)
    assert any("Training waits for worker 1, which is silent" in line for line in script.log())
    script.all_leave(1)
    script.silence(1)
    assert script.members == (1, 2)
    assert script.planned.members[0].is_source
    assert script.forms() == c.Accepted(0)


def test_it_is_given_up_after_three_lease_timeouts() -> None:
    script = last_holder()
    script.silence(23, 1)
    assert script.members == (1,)
    script.silence(2, 1)
    assert script.members == (2,)
    assert not script.planned.members[0].is_source


@pytest.mark.parametrize("silence", [20, 31])
def test_a_restarted_master_waits_as_long_for_the_last_member_that_has_the_model(silence: int) -> None:
    script = standing(1, wanted=2)
    script.worker_starts(1)
    script.restarts(0, 1)
    script.worker_joins(1)
    script.ready(1)
    script.silence(silence, 0)
    assert script.members == ((0,) if silence < 30 else (1,))
    script.worker_joins(0)
    script.ready(0)
    script.silence(1)
    assert script.planned.has(0, 7) is (silence < 30)


def test_its_end_is_not_waited_for() -> None:
    script = last_holder()
    script.silence(8, 1)
    script.kill(1)
    script.moment()
    assert script.members == (2,)


def test_the_end_of_a_silence_is_not_waited_for_until_the_next_tick() -> None:
    script = standing(3)
    script.silence(4, 1)
    assert min(wake.after_s for wake in script.told(c.Wake)) == pytest.approx(1.0)


def test_slowness_is_no_silence() -> None:
    script = standing(3)
    script.silence(300)
    assert script.stands
    assert script.version & 0xFFFFFFFF == 1


def test_a_group_in_which_all_wait_is_called_anew() -> None:
    script = standing(2)
    for worker_id in (0, 1):
        script.beat(worker_id, waiting=5.5)
    script.tell(e.Tick())
    version = script.version
    script.now += 0.3
    script.tell(e.Tick())
    assert script.version > version
    assert script.members == (0, 1)
    script.forms()
    assert "all members waited for 6 s in one collective" in script.log()[-1]
    broken = next(one for one in script.job.events.events if one.kind is EventKind.GROUP_BROKEN)
    assert broken.details == {"waited": 5.5}


def test_a_member_keeps_waiting_for_one_that_computes() -> None:
    script = standing(2)
    script.beat(0, waiting=50.0)
    script.beat(1)
    script.tell(e.Tick())
    assert script.stands


def test_a_member_that_holds_all_others_up_for_step_timeout_is_left_out() -> None:
    script = standing(3, step_timeout=20.0)
    for worker_id in (0, 2):
        script.beat(worker_id, waiting=21.0)
    script.beat(1)
    script.tell(e.Tick())
    assert not script.stands
    script.moment()
    assert script.members == (0, 2)


def test_a_farewell_calls_the_others() -> None:
    script = standing(3)
    script.heartbeat(1, leaving=True)
    script.moment()
    assert script.members == (0, 2)
    script.forms()
    assert "worker 1 was asked to end" in script.log()[-1]


def test_a_lost_lease_of_a_member_puts_the_ledger_in_doubt() -> None:
    script = standing(2, lease_timeout=2.0)
    script.lease(0)
    for _ in range(4):
        script.now += 1.0
        script.heartbeat(0, group_version=script.version)
        script.heartbeat(1, group_version=script.version)
        script.tell(e.Tick())
        if not script.stands:
            break
    assert not script.stands
    script.all_leave(0, 1)
    script.forms()
    assert "worker 0 has lost its lease" in script.log()[-1]


def test_a_process_that_began_anew_is_no_source() -> None:
    script = standing(2)
    script.worker_joins(1, incarnation=8)
    assert not script.stands
    script.ready(1, incarnation=8)
    script.moment()
    assert script.planned.members[0] == Member(0, 7, "host-0", True)
    assert (1, 8, True) not in [(m.worker_id, m.incarnation, m.is_source) for m in script.planned.members]


def test_members_that_cannot_form_a_group_are_left_out_in_turn() -> None:
    script = standing(3)
    script.kill(9)
    for worker_id in (0, 1, 2):
        script.beat(worker_id, waiting=6.0)
    script.tell(e.Tick())
    script.moment(0.3)
    members, version = script.members, script.version
    for worker_id in members:
        script.ready(worker_id, version, "forming took too long")
    assert (members, script.members) == ((0, 1, 2), (0, 1))
    version = script.version
    for worker_id in (0, 1):
        script.ready(worker_id, version, "forming took too long")
    assert script.members == (1, 2)


def test_a_member_that_may_alone_hold_a_shard_is_left_out_after_some_attempts_with_it() -> None:
    script = standing(4, shard_optimizer=True)
    script.kill(3)
    script.all_leave(0, 1, 2)
    tried = []
    for _ in range(4):
        version = script.version
        script.all_leave(0, 1, 2, reason="not all came within 5.0 s")
        script.moment()
        assert script.version == version + 1
        tried.append(script.members)
    assert tried == [(0, 1, 2)] * 3 + [(0, 1)]


def test_one_of_a_group_that_has_lost_no_holder_is_left_out_at_once() -> None:
    script = standing(4, shard_optimizer=True)
    script.beat(0, waiting=6.0)
    for worker_id in (1, 2, 3):
        script.beat(worker_id, waiting=6.0)
    script.tell(e.Tick())
    script.moment(0.3)
    assert script.members == (0, 1, 2, 3)
    script.all_leave(0, 1, 2, 3, reason="not all came within 5.0 s")
    assert script.members == (0, 1, 2)


def test_what_one_member_tells_is_the_work_of_all() -> None:
    script = standing(2, fixed_global_batch=10)
    script.progress(script.lease(0), 0)
    script.kill(1, "Error")
    assert script.job._work.retry_budget.num_faults == 0
    assert [one.index for one in script.told(c.CreatePod) if one.role is Role.WORKER] == [2]
