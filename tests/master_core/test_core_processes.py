"""Workers of several processes: the cluster loses pods, leases and groups have processes."""

from __future__ import annotations

import pytest
from core_script import Like
from group_script import GroupScript

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.values import PodState, Stacks
from elasticdl.protocol import Role
from elasticdl_client.job_events import EventKind


def pods_of_two(num_workers: int, **settings: object) -> GroupScript:
    """Workers of two processes each, in a group."""
    script = GroupScript(num_workers=num_workers, processes_per_worker=2, **settings)
    for pod in range(num_workers):
        script.pod(Role.WORKER, pod, PodState.RUNNING)
    for worker_id in range(2 * num_workers):
        script.worker_joins(worker_id)
    script.data_is_known()
    for worker_id in range(2 * num_workers):
        script.ready(worker_id)
    assert script.members == tuple(range(2 * num_workers))
    script.forms(steps=0)
    return script


def two_by_two(**settings: object) -> GroupScript:
    """Two workers of two processes each, in a group of four."""
    return pods_of_two(2, **settings)


def test_the_status_has_the_share_of_the_optimizers_state_of_each_member() -> None:
    script = two_by_two(shard_optimizer=True)
    for worker_id in range(4):
        script.beat(worker_id, optimizer_share=0.25 * worker_id)
    assert script.job.status().optimizer_shares == (0.0, 0.25, 0.5, 0.75)
    assert two_by_two().job.status().optimizer_shares == ()


def test_each_process_holds_a_lease_and_the_loss_of_a_pod_gives_back_those_of_all() -> None:
    script = two_by_two(records=80)
    leases = {worker_id: script.ask_at_once(worker_id).lease for worker_id in range(4)}
    assert len({lease.task for lease in leases.values()}) == 4
    script.kill(1)
    assert [lease.id for lease in script.job._work.leases.all()] == [leases[0].id, leases[1].id]
    assert script.told(c.CreatePod) == [Like(c.CreatePod, index=2, slot=1)]
    assert not script.stands
    lost = [event for event in script.job.events.events if event.kind is EventKind.POD_LOST]
    assert [event.subject for event in lost] == ["worker-1"]


def test_a_pod_that_fails_is_charged_once_although_some_of_its_processes_leave() -> None:
    script = two_by_two()
    script.beat(2, leaving=True)
    script.pod(Role.WORKER, 1, PodState.FAILED, "Error")
    assert script.job._work.retry_budget.num_faults == 1


def test_a_pod_that_was_asked_to_end_is_not_charged_and_drains_once() -> None:
    script = two_by_two()
    for worker_id in (2, 3):
        script.beat(worker_id, leaving=True)
    script.pod(Role.WORKER, 1, PodState.FAILED, "Error")
    assert script.job._work.retry_budget.num_faults == 0
    kinds = [event.kind for event in script.job.events.events]
    assert kinds.count(EventKind.POD_DRAINING) == kinds.count(EventKind.POD_LOST) == 1


def test_a_pod_is_replaced_when_one_of_its_processes_is_silent() -> None:
    script = two_by_two()
    script.silence(75, 3)
    assert script.last(c.DeletePod).name == "elasticdl-j-worker-1"
    assert script.last(c.CreatePod).index == 2
    assert script.job._workers.get(2) is None
    assert script.job._workers.get(1) is not None


def test_a_script_that_has_ended_is_waited_for_while_another_of_its_pod_works() -> None:
    script = two_by_two(runs_command=True, expects_data=True)
    script.ask(e.TrainingStopRequested, 0, 7, "early")
    assert script.job._work.is_covered
    script.silence(75, 3)
    assert not [one for one in script.history if isinstance(one, c.DeletePod)]


def test_a_script_that_has_said_its_end_is_not_waited_for_before_the_end_of_the_data() -> None:
    script = two_by_two(runs_command=True, records=80)
    lease = script.ask_at_once(3).lease
    script.beat(3, ended=True)
    assert script.job._work.leases.get(lease.id, 3) is None
    script.all_leave(0, 1, 2, reason="worker 3 is gone")
    assert script.members == (0, 1, 2)
    script.forms()
    script.silence(200, 3)
    assert not [one for one in script.history if isinstance(one, c.DeletePod)]
    assert script.stands
    kinds = [event.kind for event in script.job.events.events]
    assert EventKind.POD_DRAINING not in kinds
    assert EventKind.WORKER_HUNG not in kinds


def test_the_next_master_knows_which_scripts_have_ended() -> None:
    script = two_by_two(runs_command=True, records=80)
    script.beat(3, ended=True)
    script.restarts(0, 1)
    for worker_id in range(3):
        script.worker_joins(worker_id)
    script.silence(200, 3)
    assert not [one for one in script.history if isinstance(one, c.DeletePod)]


def test_a_pod_whose_scripts_have_all_ended_is_replaced_if_it_stays() -> None:
    script = two_by_two(runs_command=True, records=80)
    for worker_id in (2, 3):
        script.beat(worker_id, ended=True)
    script.silence(75, 2, 3)
    assert script.last(c.DeletePod).name == "elasticdl-j-worker-1"


def test_a_pod_whose_scripts_have_ended_at_different_times_has_the_time_of_the_last_one() -> None:
    script = two_by_two(runs_command=True, records=80)
    script.beat(3, ended=True)
    script.silence(100, 3)
    script.beat(2, ended=True)
    script.silence(60, 2, 3)
    assert not [one for one in script.history if isinstance(one, c.DeletePod)]
    script.silence(15, 2, 3)
    given_up = next(event for event in script.job.events.events if event.kind is EventKind.POD_GIVEN_UP)
    assert (given_up.subject, given_up.message) == ("worker-1", "process 0 has been silent for 71 s")
    assert EventKind.WORKER_HUNG not in [event.kind for event in script.job.events.events]


def test_a_group_is_broken_by_the_end_of_a_script_not_by_its_silence() -> None:
    script = two_by_two(runs_command=True, records=80)
    script.beat(3, ended=True)
    assert not script.stands
    script.silence(6, 3)
    broken = [event for event in script.job.events.events if event.kind is EventKind.GROUP_BROKEN]
    assert [event.message for event in broken] == ["worker 1 (process 1) has ended its script"]


def test_scripts_that_end_with_the_data_break_no_group() -> None:
    script = two_by_two(runs_command=True, expects_data=True)
    script.ask(e.TrainingStopRequested, 0, 7, "early")
    for worker_id in range(3):
        script.beat(worker_id, ended=True)
    script.silence(20, 0, 1, 2)
    assert script.stands


def test_a_script_that_fails_after_its_last_word_is_a_fault_of_its_pod() -> None:
    script = two_by_two(runs_command=True, records=80)
    for worker_id in (2, 3):
        script.beat(worker_id, ended=True)
    script.pod(Role.WORKER, 1, PodState.FAILED, "Error")
    assert script.job._work.retry_budget.num_faults == 1


def test_a_first_group_does_not_wait_for_a_script_that_has_ended() -> None:
    script = GroupScript(num_workers=1, processes_per_worker=2, runs_command=True)
    script.pod(Role.WORKER, 0, PodState.RUNNING)
    for worker_id in (0, 1):
        script.worker_joins(worker_id)
    script.ready(0)
    script.moment()
    assert script.members == ()
    script.beat(1, ended=True)
    script.moment()
    assert script.members == (0,)


def start_without_the_last(**settings: object) -> GroupScript:
    """Two workers of two processes, three of which are ready."""
    values: dict[str, object] = {"min_workers": 2, "step_timeout": 50.0, "num_workers": 2, "processes_per_worker": 2}
    script = GroupScript(**(values | settings))
    for pod in (0, 1):
        script.pod(Role.WORKER, pod, PodState.RUNNING)
    for worker_id in range(3):
        script.worker_joins(worker_id)
    script.data_is_known()
    for worker_id in range(3):
        script.ready(worker_id)
    return script


def test_a_process_that_never_registers_is_named_and_its_pod_replaced() -> None:
    script = start_without_the_last()
    script.silence(31)
    assert script.job.status().message == "waiting for worker 1 (process 1) to form a group"
    script.silence(91)
    given_up = next(event for event in script.job.events.events if event.kind is EventKind.POD_GIVEN_UP)
    assert (given_up.subject, given_up.message) == ("worker-1", "process 1 has run for 121 s and never registered")
    assert script.last(c.CreatePod).index == 2


def test_a_first_group_begins_without_a_script_that_never_registers() -> None:
    script = start_without_the_last(runs_command=True)
    script.silence(118)
    assert script.members == ()
    script.silence(4)
    assert script.members == (0, 1, 2)
    script.forms(steps=0)
    script.silence(120)
    assert not [one for one in script.history if isinstance(one, c.DeletePod)]


def test_a_first_group_waits_for_all_processes_of_a_pod_that_starts_late() -> None:
    script = GroupScript(num_workers=2, processes_per_worker=2, min_workers=2, step_timeout=50.0)
    script.pod(Role.WORKER, 0, PodState.RUNNING)
    for worker_id in (0, 1):
        script.worker_joins(worker_id)
    script.data_is_known()
    for worker_id in (0, 1):
        script.ready(worker_id)
    script.silence(200)
    script.pod(Role.WORKER, 1, PodState.RUNNING)
    script.worker_joins(2)
    script.ready(2)
    script.silence(31)
    assert script.members == ()
    assert script.job.status().message == "waiting for worker 1 (process 1) to form a group"
    script.worker_joins(3)
    script.ready(3)
    assert script.members == (0, 1, 2, 3)


def test_a_first_group_does_not_wait_for_a_process_in_one_that_did_not_form() -> None:
    """Which it leaves when the next one is planned; the master has forgotten the one that did not form."""
    script = GroupScript(num_workers=1, processes_per_worker=2)
    script.pod(Role.WORKER, 0, PodState.RUNNING)
    for worker_id in (0, 1):
        script.worker_joins(worker_id)
    script.data_is_known()
    for worker_id in (0, 1):
        script.ready(worker_id)
    version = script.version
    script.restarts(0)
    for worker_id in (0, 1):
        script.worker_joins(worker_id)
    script.ready(0, version, "not all members came")
    for _ in range(10):
        script.now += 1.0
        script.beat(0)
        script.heartbeat(1, group_version=version, waiting_seconds=script.now)
        script.tell(e.Tick())
    assert script.members == (0,)
    assert script.version > version


@pytest.mark.parametrize("activity", ["start", "compile"])
def test_a_process_that_hangs_before_it_is_ready_is_found_and_named(activity: str) -> None:
    script = start_without_the_last()
    script.worker_joins(3)
    stacks = None
    for second in range(120):
        script.now += 1.0
        for worker_id in range(2 if script.job._workers.get(3) is None else 3):
            script.beat(worker_id)
        if script.job._workers.get(3) is not None:
            answer = script.beat(3, activity=activity, seconds={activity: float(second)}, stacks=stacks)
            stacks = Stacks("data.py:3 in records", "thread MainThread:\n  …") if answer.wants_stacks else None
        script.tell(e.Tick())
    hung = next(event for event in script.job.events.events if event.kind is EventKind.WORKER_HUNG)
    assert hung.subject == "worker-1"
    assert hung.message.startswith("process 1: starting for 51 s")
    given_up = next(event for event in script.job.events.events if event.kind is EventKind.POD_GIVEN_UP)
    assert (given_up.subject, given_up.message) == ("worker-1", "process 1 is stuck")


def test_the_next_master_finds_all_processes_of_its_pods() -> None:
    script = two_by_two(records=80)
    leases = [script.ask_at_once(worker_id).lease for worker_id in range(4)]
    script.restarts(0, 1)
    for worker_id in range(4):
        script.worker_joins(worker_id)
    assert script.job.status().workers_alive == 2
    assert script.job.status().processes_per_worker == 2
    assert {lease.id for lease in script.job._work.leases.all()} <= {lease.id for lease in leases}
    assert script.told(c.CreatePod) == []


def test_a_group_needs_all_processes_of_the_fewest_workers() -> None:
    script = GroupScript(num_workers=2, processes_per_worker=2, min_workers=2)
    for pod in (0, 1):
        script.pod(Role.WORKER, pod, PodState.RUNNING)
    for worker_id in range(3):
        script.worker_joins(worker_id)
        script.ready(worker_id)
    script.moment()
    assert script.members == ()
    script.worker_joins(3)
    script.ready(3)
    assert script.members == (0, 1, 2, 3)


def test_a_script_does_not_wait_for_the_other_of_its_pod_that_has_ended() -> None:
    script = pods_of_two(1, runs_command=True, expects_data=True)
    script.ask(e.TrainingStopRequested, 0, 7, "early")
    script.ready(1, script.version, "worker 0 leaves")
    script.watch(1)
    script.silence(6, 0)
    assert script.members == (1,)


def test_a_later_group_needs_a_process_of_the_fewest_workers() -> None:
    script = two_by_two(runs_command=True, expects_data=True, min_workers=2)
    script.ask(e.TrainingStopRequested, 3, 7, "early")
    script.all_leave(0, 1, 2)
    script.silence(6, 3)
    assert script.members == (0, 1, 2)
    script.forms()
    version = script.version
    script.kill(1)
    script.all_leave(0, 1)
    script.moment()
    assert script.version == version
    expected = "Training waits for workers: 1 with 2 of 2 processes can form a group, 2 must (--min_workers=2)"
    assert expected in script.log()


def test_fewer_workers_are_fewer_pods() -> None:
    script = two_by_two()
    script.tell(e.ScaleRequested(1))
    assert [command.name for command in script.told(c.DeletePod)] == ["elasticdl-j-worker-1"]
    assert script.job.status().workers_wanted == 1
    script.moment(1.0)
    seconds = script.job._accounting.worker_seconds(script.now)
    assert sum(seconds.values()) > 0
