"""Workers that live and do not move: when that is too long, what is asked of them, and what is done."""

from __future__ import annotations

from typing import Any

import pytest
from core_script import Script, running
from group_script import standing

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.values import Lease, Position, Stacks, TaskType
from elasticdl.protocol import Role
from elasticdl_client.choices import Remedy
from elasticdl_client.job_events import EventKind, JobEvent

STACKS = Stacks("net.py:31 in loss", "thread MainThread:\n  net.py:31 in loss")


def working(**settings: Any) -> tuple[Script, Lease]:
    """A worker that computes, and has finished a minibatch of 4 s and one of 2 s; nothing is asked of it."""
    script = running(**{"step_timeout": 600.0, "hang_timeout": 100.0, **settings})
    lease = script.lease()
    script.heartbeat(0, (lease.id,), activity="compute")
    pause(script, lease, 4, minibatch=0)
    pause(script, lease, 2, minibatch=1)
    script.heartbeat(0, (lease.id,), minibatch=2, activity="compute")
    return script, lease


def pause(
    script: Script,
    lease: Lease,
    duration: int,
    minibatch: int = 2,
    activity: str = "compute",
    also: str = "",
    **fields: Any,
) -> bool:
    """A worker stays in a minibatch, as its heartbeats say; whether the last answer asks for its stacks.

    Args:
        also: the main thread does this, too, in between.
    """
    answer = None
    for _ in range(duration):
        script.now += 1.0
        spent = {activity: script.now} | ({also: script.now} if also else {})
        answer = script.heartbeat(0, (lease.id,), minibatch, activity=activity, seconds=spent, **fields)
        for server in script.job._fleet.servers.all():
            script.ask(e.HeartbeatReceived, Role.PS, server.id, server.incarnation)
        script.tell(e.Tick())
    return answer is not None and answer.wants_stacks


def hung(script: Script) -> list[JobEvent]:
    return [event for event in script.job.events.events if event.kind is EventKind.WORKER_HUNG]


def test_a_worker_hangs_after_hang_timeout_if_its_history_is_quick() -> None:
    script, lease = working()
    pause(script, lease, 100)
    assert not hung(script)
    pause(script, lease, 2)
    (event,) = hung(script)
    assert event.subject == "worker-0"
    assert event.details["threshold"] == 100.0
    assert event.details["seconds"] == pytest.approx(101.0)
    assert event.details["activity"] == "compute"
    assert script.job._work.leases.all() == []


def test_a_history_of_long_minibatches_explains_a_long_one() -> None:
    script, lease = working()
    pause(script, lease, 20)
    pause(script, lease, 399, minibatch=3)
    assert not hung(script)
    pause(script, lease, 30, minibatch=3)
    assert hung(script)[0].details["threshold"] == pytest.approx(20 * 21, abs=20)


def test_step_timeout_is_the_limit_of_every_history() -> None:
    script, lease = working(step_timeout=150.0)
    pause(script, lease, 90)
    pause(script, lease, 152, minibatch=3)
    assert hung(script)[0].details["threshold"] == 150.0


def test_the_first_minibatch_has_step_timeout() -> None:
    script = running(step_timeout=600.0, hang_timeout=100.0)
    lease = script.lease()
    pause(script, lease, 599, minibatch=0)
    assert not hung(script)
    pause(script, lease, 3, minibatch=0)
    assert hung(script)[0].details["threshold"] == 600.0


def test_what_is_compiled_makes_no_history_and_has_step_timeout() -> None:
    script = running(step_timeout=600.0, hang_timeout=100.0)
    lease = script.lease()
    pause(script, lease, 50, minibatch=0, activity="compile")
    pause(script, lease, 2, minibatch=1)
    pause(script, lease, 102, minibatch=2)
    assert hung(script)[0].details["threshold"] == 100.0


def test_the_evaluation_of_a_module_has_minibatches_and_that_of_a_script_has_no_limit() -> None:
    script, lease = working(step_timeout=200.0)
    pause(script, lease, 102, activity="evaluate")
    assert hung(script)[0].details["threshold"] == 100.0
    script, lease = working(step_timeout=200.0, runs_command=True)
    pause(script, lease, 400, activity="evaluate")
    assert not hung(script)
    pause(script, lease, 102, minibatch=3)
    assert hung(script)


@pytest.mark.parametrize("activity", ["compile", "ps", "world", "export", "checkpoint", "idle"])
def test_what_is_not_its_own_minibatch_has_step_timeout(activity: str) -> None:
    script, lease = working()
    pause(script, lease, 500, activity=activity)
    assert not hung(script)


def test_a_kind_of_task_has_its_own_history() -> None:
    script, lease = working(output="/out", records=20)
    script.finish(lease)
    script.sets_are_read({(0, 0): range(2)})
    end = script.lease()
    assert end.type is TaskType.TRAIN_END
    script.heartbeat(0, (end.id,), activity="compute")
    pause(script, end, 500, minibatch=0)
    assert not hung(script)


def test_the_stacks_are_asked_for_before_the_time_is_over_and_are_in_the_event() -> None:
    script, lease = working()
    assert pause(script, lease, 31)  # for the status
    assert not pause(script, lease, 1, stacks=Stacks("net.py:1 in main", "…"))
    assert not pause(script, lease, 56)
    assert pause(script, lease, 4)
    assert not pause(script, lease, 1, stacks=STACKS)
    assert not pause(script, lease, 10)
    (event,) = hung(script)
    assert event.details["where"] == "net.py:31 in loss"
    assert event.details["stacks"] == STACKS.text
    assert "net.py:31 in loss" in event.message
    assert any(STACKS.text in line for line in script.log())


def test_stacks_of_an_earlier_minibatch_say_nothing() -> None:
    script, lease = working()
    pause(script, lease, 95, stacks=STACKS)
    pause(script, lease, 1, minibatch=3)
    assert pause(script, lease, 595, minibatch=3)
    pause(script, lease, 7, minibatch=3)
    assert hung(script)[0].details["where"] == ""


def test_a_worker_of_an_older_version_hangs_without_stacks() -> None:
    script, lease = working()
    pause(script, lease, 102)
    (event,) = hung(script)
    assert (event.details["where"], event.details["stacks"]) == ("", "")


def test_long_stacks_are_shortened_to_whole_lines() -> None:
    script, lease = working()
    text = "\n".join(f"  file.py:{n} in function" for n in range(400))
    pause(script, lease, 102, stacks=Stacks("file.py:0 in function", text))
    stacks = str(hung(script)[0].details["stacks"])
    assert len(stacks) <= 2000
    assert stacks.startswith("  file.py:0 in function\n")
    assert stacks.endswith("in function\n…")


def test_a_worker_that_hangs_is_replaced_and_the_cause_is_written_down() -> None:
    script, lease = working()
    pause(script, lease, 102)
    pause(script, lease, 61)
    assert script.last(c.DeletePod) == c.DeletePod("elasticdl-j-worker-0")
    given_up = next(one for one in script.job.events.events if one.kind is EventKind.POD_GIVEN_UP)
    assert given_up.cause == hung(script)[0].number
    assert len(hung(script)) == 1


def test_a_report_leaves_the_worker_and_its_lease_alone() -> None:
    script, lease = working(hang_action=Remedy.REPORT)
    pause(script, lease, 500)
    (event,) = hung(script)
    assert event.details["action"] == "report"
    assert script.job._work.leases.all() == [lease]
    assert not [one for one in script.history if isinstance(one, c.DeletePod)]
    script.progress(lease, 1)
    assert any("moves again" in line for line in script.log())
    pause(script, lease, 2, minibatch=3)
    assert len(hung(script)) == 1


@pytest.mark.parametrize("phase", [0, 1])
def test_a_worker_whose_feed_hangs_does_not_move_while_its_main_thread_looks_for_input_each_second(phase: int) -> None:
    """Between some two heartbeats the main thread only waits for input; in others it also exchanges headers."""
    script, lease = working()
    for second in range(710):  # idle is none of its own work: it has all of --step_timeout
        script.now += 1.0
        seconds = {"idle": script.now, "world": (second + phase) // 2 * 0.001}
        script.heartbeat(0, (lease.id,), 2, activity="idle", seconds=seconds)
        for server in script.job._fleet.servers.all():
            script.ask(e.HeartbeatReceived, Role.PS, server.id, server.incarnation)
        script.tell(e.Tick())
    assert len(hung(script)) == 1
    assert not any("moves again" in line for line in script.log())
    assert is_replaced(script)


def is_replaced(script: Script) -> bool:
    return c.DeletePod("elasticdl-j-worker-0") in script.history


def test_a_worker_that_hangs_is_replaced_by_the_next_master_if_this_one_ends_first() -> None:
    script, lease = working()
    pause(script, lease, 102)
    script.restart_master()
    script.worker_joins(0)
    for _ in range(70):
        script.now += 1.0
        script.heartbeat(0, activity="compute", seconds={"compute": script.now})
        script.tell(e.Tick())
    assert is_replaced(script)
    assert len(hung(script)) == 1


def test_a_worker_that_moves_again_after_a_restart_of_the_master_is_left_alone() -> None:
    script, lease = working()
    pause(script, lease, 102)
    script.restart_master()
    script.worker_joins(0)
    for idle in (0.0, 0.0, 0.5, 0.5):
        script.now += 1.0
        script.heartbeat(0, activity="compute", seconds={"input": 3.0, "compute": script.now, "idle": idle})
    script.pass_time(70, alive=(0,))
    assert not is_replaced(script)


def start(script: Script, duration: int, activity: str = "start", where: str = "net.py:5 in custom_model") -> bool:
    """A worker has registered and has no task yet; whether its stacks have been asked for."""
    asked = False
    for _ in range(duration):
        script.now += 1.0
        taken = Stacks(where, "thread MainThread:\n  …") if asked else None
        answer = script.heartbeat(0, activity=activity, seconds={activity: script.now}, stacks=taken)
        for server in script.job._fleet.servers.all():
            script.ask(e.HeartbeatReceived, Role.PS, server.id, server.incarnation)
        script.tell(e.Tick())
        asked |= answer is not None and answer.wants_stacks
    return asked


def test_a_model_definition_that_is_never_loaded_hangs_after_step_timeout() -> None:
    script = running(step_timeout=50.0)
    assert start(script, 49)
    assert not hung(script)
    start(script, 5)
    (event,) = hung(script)
    assert (event.details["threshold"], event.details["activity"]) == (50.0, "start")
    assert event.details["where"] == "net.py:5 in custom_model"
    start(script, 61)
    assert is_replaced(script)


def test_stacks_from_before_the_compilation_say_nothing_of_it() -> None:
    script = running(step_timeout=50.0)
    assert start(script, 49)
    script.now += 1.0
    script.heartbeat(0, activity="compile", seconds={"compile": 1.0})
    start(script, 55, "compile", where="")
    assert not hung(script)


@pytest.mark.parametrize(
    ("activity", "where", "settings"),
    [("start", "", {}), ("idle", "net.py:5 in main", {}), ("start", "main.py:5 in main", {"runs_command": True})],
)
def test_a_worker_that_waits_before_its_first_task_does_not_hang(
    activity: str, where: str, settings: dict[str, Any]
) -> None:
    """For a PS, the model of another worker, a task; and the start of a script has no time limit."""
    script = running(step_timeout=50.0, **settings)
    start(script, 120, activity, where)
    assert not hung(script)


def test_requests_for_leases_are_no_sign_of_life_and_are_not_served() -> None:
    """The input pipeline asks in a thread of its own while the main thread hangs."""
    script, lease = working()
    pause(script, lease, 102)
    for _ in range(5):
        assert script.request() is None
        pause(script, lease, 13)
    assert is_replaced(script)


def test_a_worker_that_does_something_else_moves_again_and_gets_work() -> None:
    script, lease = working()
    pause(script, lease, 102)
    assert script.request() is None
    script.heartbeat(0, activity="idle", seconds={"compute": script.now, "idle": 0.1})
    assert script.request() is not None
    script.pass_time(70, alive=(0,))
    assert not is_replaced(script)


def test_waiting_for_a_task_is_no_sign_that_a_feed_moves() -> None:
    script, lease = working()
    pause(script, lease, 102, activity="input")
    pause(script, lease, 61, activity="idle")
    assert is_replaced(script)


def test_a_main_thread_that_goes_round_is_no_sign_that_a_feed_moves() -> None:
    """With AllReduce it takes part in the steps of the others while its own feed hangs."""
    script, lease = working()
    pause(script, lease, 102, activity="input", also="compute")
    assert isinstance(script.progress(lease, 1), c.Refused)
    pause(script, lease, 61, activity="input", also="compute")
    assert is_replaced(script)


def test_a_silent_worker_is_not_judged_by_its_minibatch_and_says_why_it_has_no_stacks() -> None:
    script = running(2, hang_timeout=5.0, step_timeout=5.0)
    lease = script.lease(0)
    script.heartbeat(0, (lease.id,), activity="compute")
    script.pass_time(69, alive=(1,))
    assert not hung(script)
    script.pass_time(3, alive=(1,))
    (event,) = hung(script)
    assert "silent for 71 s" in event.message
    assert "no stacks" in event.message
    given_up = next(one for one in script.job.events.events if one.kind is EventKind.POD_GIVEN_UP)
    assert given_up.cause == event.number


def test_a_ps_that_is_away_explains_everything() -> None:
    script, lease = working()
    script.ps_dies()
    pause(script, lease, 700)
    assert not hung(script)


def test_a_new_process_under_the_same_id_has_no_history() -> None:
    script, lease = working()
    script.worker_joins(0, incarnation=8)
    lease = script.ask(e.LeaseRequested, 0, 8).lease
    for _ in range(400):
        script.now += 1.0
        script.ask(e.HeartbeatReceived, Role.WORKER, 0, 8, (Position(lease.id, 0),), "compute")
        script.tell(e.Tick())
    assert not hung(script)


def test_of_a_group_that_stands_still_the_member_that_does_not_wait_hangs() -> None:
    script = standing(3, step_timeout=20.0, hang_timeout=20.0)
    answers = []
    for second in range(1, 22):
        script.now += 1.0
        script.beat(0, waiting=float(second))
        answers.append(script.beat(1, activity="compute", stacks=STACKS if answers and answers[-1] else None))
        answers[-1] = answers[-1].wants_stacks
        script.beat(2, waiting=float(second))
        script.tell(e.Tick())
    assert answers[:10] == [False] * 10
    assert any(answers)
    (event,) = hung(script)
    assert event.subject == "worker-1"
    assert event.details["where"] == "net.py:31 in loss"
    broken = next(one for one in script.job.events.events if one.kind is EventKind.GROUP_BROKEN)
    assert broken.cause == event.number


def test_a_member_that_moves_while_all_others_wait_does_not_hang() -> None:
    """It evaluates a long task, minibatch after minibatch."""
    script = standing(2, step_timeout=20.0, hang_timeout=20.0, collective_timeout=1000.0)
    lease = script.lease(0)
    for second in range(1, 60):
        script.now += 1.0
        fields = {"activity": "evaluate", "seconds": {"evaluate": float(second)}, "group_version": script.version}
        script.heartbeat(0, (lease.id,), minibatch=second // 5, **fields)
        script.beat(1, waiting=float(second))
        script.tell(e.Tick())
    assert not hung(script)


def test_a_member_that_stays_in_a_collective_of_a_group_that_is_over_hangs() -> None:
    """Waiting for the others explains nothing there: they have gone on without it."""
    script = standing(2, hang_timeout=20.0, collective_timeout=5.0)
    lease, old = script.lease(0), script.version
    script.lease(1)
    script.ready(1, old, "it cannot form a group with worker 0")
    for second in range(1, 90):
        script.now += 1.0
        fields = {"activity": "world", "seconds": {"world": float(second)}, "group_version": old}
        script.heartbeat(0, (lease.id,), waiting_seconds=float(second), **fields)
        script.beat(1)
        if script.planned.members[0].worker_id == 1:
            script.forms()
        elif script.planned.version > old:
            script.ready(1, script.planned.version, "it cannot form a group with worker 0")
        script.tell(e.Tick())
    (event,) = hung(script)
    assert (event.subject, event.details["threshold"]) == ("worker-0", 20.0)
    assert is_replaced(script)


def test_members_that_wait_do_not_hang() -> None:
    script = standing(2, step_timeout=20.0, hang_timeout=20.0, hang_action=Remedy.REPORT, collective_timeout=1000.0)
    lease = script.lease(0)
    for second in range(1, 100):
        script.now += 1.0
        wait = float(second)
        fields = {"activity": "world", "seconds": {"world": wait}, "group_version": script.version}
        script.heartbeat(0, (lease.id,), waiting_seconds=wait, **fields)
        script.beat(1)
        script.tell(e.Tick())
    assert {event.subject for event in hung(script)} == {"worker-1"}
    assert script.stands


def test_a_member_whose_feed_hangs_is_found_although_it_waits_now_and_then() -> None:
    script = standing(2, step_timeout=20.0, hang_timeout=20.0, collective_timeout=1000.0)
    lease = script.lease(0)
    for second in range(1, 30):
        script.now += 1.0
        spent = {"input": 0.8 * second, "world": 0.2 * second}
        fields = {"activity": "world", "seconds": spent, "group_version": script.version}
        script.heartbeat(0, (lease.id,), waiting_seconds=0.1, **fields)
        script.beat(1, waiting=0.5)
        script.tell(e.Tick())
    (event,) = hung(script)
    assert event.subject == "worker-0"
    assert float(event.details["seconds"]) == pytest.approx(20.0, abs=1.0)


@pytest.mark.parametrize(("does", "runs_command"), [("checkpoint", False), ("checkpoint", True), ("evaluate", True)])
def test_a_member_that_saves_or_whose_script_evaluates_for_long_does_not_hang(does: str, runs_command: bool) -> None:
    script = standing(3, step_timeout=20.0, hang_timeout=20.0, runs_command=runs_command)
    for second in range(1, 80):
        script.now += 1.0
        busy_s = float(min(second, 60))
        activity = does if second < 60 else "compute"
        script.beat(0, activity=activity, seconds={does: busy_s, "compute": second - busy_s})
        waiting = float(second) if second < 62 else 0.0
        script.beat(1, waiting=waiting)
        script.beat(2, waiting=waiting)
        script.tell(e.Tick())
    assert hung(script) == []


def test_the_time_of_a_checkpoint_is_no_part_of_a_minibatch() -> None:
    script, lease = working(step_timeout=200.0)
    pause(script, lease, 400, activity="checkpoint")
    assert not hung(script)


def test_a_worker_that_does_the_same_for_half_a_minute_is_in_the_status_with_its_line() -> None:
    script, lease = working()
    assert not pause(script, lease, 30)
    assert script.job.status().standing == ()
    assert pause(script, lease, 1)
    pause(script, lease, 2, stacks=STACKS)
    (one,) = script.job.status().standing
    assert (one.worker, one.seconds, one.activity, one.where) == (0, 33.0, "compute", "net.py:31 in loss")
    assert any("has done the same for 32 s (compute), at net.py:31 in loss" in line for line in script.log())
    pause(script, lease, 1, minibatch=3)
    assert script.job.status().standing == ()


def test_a_minibatch_of_the_usual_length_is_not_shown() -> None:
    script, lease = working()
    pause(script, lease, 25)
    pause(script, lease, 70, minibatch=3)
    assert script.job.status().standing == ()
    pause(script, lease, 10, minibatch=3)
    assert script.job.status().standing


def test_stacks_that_come_after_the_minibatch_they_show_are_no_later_hangs() -> None:
    script, lease = working(step_timeout=150.0)
    assert pause(script, lease, 31)
    pause(script, lease, 1, minibatch=3)
    pause(script, lease, 1, minibatch=3, stacks=Stacks("net.py:1 in feed", "…"))
    assert pause(script, lease, 100, minibatch=3)
    pause(script, lease, 1, minibatch=3, stacks=Stacks("net.py:2 in feed", "…"))
    assert pause(script, lease, 40, minibatch=3)
    pause(script, lease, 1, minibatch=3, stacks=STACKS)
    pause(script, lease, 10, minibatch=3)
    assert "net.py:31 in loss" in hung(script)[0].message


def test_of_many_workers_that_stand_some_are_looked_at_and_all_are_counted() -> None:
    script = running(num_workers=20, step_timeout=600.0)
    asked: list[int] = []
    for _ in range(33):
        script.now += 1.0
        spent = {"compile": script.now}
        answers = {
            worker: script.heartbeat(
                worker, activity="compile", seconds=spent, stacks=STACKS if worker in asked else None
            )
            for worker in range(20)
        }
        asked = [worker for worker, answer in answers.items() if answer.wants_stacks]
        assert len(asked) <= 16
    status = script.job.status()
    assert (len(status.standing), status.num_standing) == (16, 20)
    assert all(one.where for one in status.standing)
    assert sum("has done the same for" in line for line in script.log()) == 16


def test_a_worker_that_is_known_to_hang_is_not_shown_as_one_that_stands() -> None:
    script, lease = working()
    pause(script, lease, 102)
    assert hung(script)
    assert script.job.status().standing == ()


@pytest.mark.parametrize(
    ("activity", "runs_command", "stands"),
    [
        ("start", False, True),
        ("start", True, False),
        ("compile", False, True),
        ("evaluate", True, True),
        ("checkpoint", True, True),
        ("compute", True, False),
        ("idle", False, False),
        ("ps", False, False),
        ("world", True, False),
    ],
)
def test_without_a_task_only_work_that_has_an_end_can_stand(activity: str, runs_command: bool, stands: bool) -> None:
    script = running(step_timeout=600.0, runs_command=runs_command)
    assert start(script, 40, activity) is stands
    assert bool(script.job.status().standing) is stands


def test_a_checkpoint_of_the_servers_that_takes_long_is_in_the_status() -> None:
    script = running(checkpoint_dir="/c", checkpoint_steps=1)
    script.progress(script.lease(), 0)
    assert script.last(c.SaveCheckpoint)
    script.pass_time(30, alive=(0,))
    assert script.job.status().saving_seconds == 0.0
    script.pass_time(2, alive=(0,))
    assert script.job.status().saving_seconds == pytest.approx(32.0)
