"""The log of events: each event is in it once, in order, with its cause; it outlives the master."""

from __future__ import annotations

import json

import pytest
from core_script import Script, everything, running, train_all
from group_script import standing

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.event_log import MAX_CHARACTERS, MAX_EVENTS, MAX_TEXT, EventLog
from elasticdl.master.core.fleet.fleet import MAX_REASONS
from elasticdl.master.core.values import PodState
from elasticdl.protocol import Role
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.job_events import EventKind, JobEvent, describe


def of_kind(script: Script, kind: EventKind) -> list[JobEvent]:
    return [event for event in script.job.events.events if event.kind is kind]


def causes(script: Script, event: JobEvent) -> list[tuple[str, str]]:
    return [(one.kind.value, one.subject) for one in script.job.events.chain(event)]


def test_a_lost_worker_is_the_cause_of_its_successor_and_of_all_that_that_one_does() -> None:
    script = running(2)
    script.pod(Role.WORKER, 1, PodState.FAILED, "OOMKilled")
    [lost] = of_kind(script, EventKind.POD_LOST)
    assert (lost.subject, lost.details["reason"]) == ("worker-1", "OOMKilled")
    script.worker_starts(2)
    registered = of_kind(script, EventKind.WORKER_REGISTERED)[-1]
    assert registered.subject == "worker-2"
    assert causes(script, registered)[-2:] == [("PodCreated", "worker-2"), ("PodLost", "worker-1")]


def test_a_clock_that_is_set_while_the_job_runs_moves_its_next_events_and_no_time_of_workers() -> None:
    script = running(2)
    elapsed_s = script.job.status(script.now).elapsed_seconds
    script.tell(e.Tick(unix_offset=28_800.0))  # a laptop has slept for eight hours
    script.pod(Role.WORKER, 1, PodState.FAILED, "OOMKilled")
    [lost] = of_kind(script, EventKind.POD_LOST)
    assert lost.at == script.now + 28_800.0
    assert script.job.status(script.now).elapsed_seconds == elapsed_s


def test_a_pod_that_was_asked_to_end_is_lost_by_that() -> None:
    script = running(2)
    script.heartbeat(1, leaving=True)
    script.pod(Role.WORKER, 1, PodState.FAILED, "Preempted")
    [lost] = of_kind(script, EventKind.POD_LOST)
    assert causes(script, lost) == [("PodDraining", "worker-1")]


def test_nothing_that_is_known_of_a_pod_is_an_event_a_second_time_after_a_restart_of_the_master() -> None:
    script = running(2)
    before = [event.number for event in script.job.events.events]
    script.restart_master()
    living = [(Role.PS, 0), (Role.WORKER, 0), (Role.WORKER, 1)]
    names = [script.settings.pod_name(role, index) for role, index in living]
    pods = [e.PodChanged(name, *one, f"{name}/1", PodState.RUNNING) for name, one in zip(names, living, strict=True)]
    script.tell(e.PodsListed(tuple(pods)))
    script.worker_joins(0)
    script.worker_joins(1)
    events = script.job.events.events
    assert [event.number for event in events[: len(before)]] == before
    assert {event.kind for event in events[len(before) :]} <= {EventKind.MASTER_RESTARTED, EventKind.JOB_WAITING}
    assert [event.number for event in events] == list(range(1, len(events) + 1))


def test_a_pod_that_the_master_before_has_planned_and_not_created_was_neither_created_nor_lost() -> None:
    script = running(2)
    script.pod(Role.PS, 0, PodState.FAILED, "Killed")
    [lost] = of_kind(script, EventKind.POD_LOST)
    script.restart_master()  # with the successor in its journal, and nowhere else
    names = [script.settings.pod_name(Role.WORKER, index) for index in range(2)]
    pods = [e.PodChanged(name, Role.WORKER, i, f"{name}/1", PodState.RUNNING) for i, name in enumerate(names)]
    script.tell(e.PodsListed(tuple(pods)))
    script.pass_time(6)
    assert of_kind(script, EventKind.POD_LOST) == [lost]
    script.pod(Role.PS, 0, PodState.RUNNING, life=2)
    [*_, created] = of_kind(script, EventKind.POD_CREATED)
    assert (created.subject, created.cause) == ("ps-0", lost.number)


def test_an_end_follows_from_the_task_that_failed() -> None:
    script = running(1, max_task_failures=1)
    script.fail(script.lease(), error="ValueError: no such column")
    [failed] = of_kind(script, EventKind.JOB_FAILED)
    [task] = of_kind(script, EventKind.TASK_FAILED)
    assert failed.cause == task.number
    assert (task.message, task.details["worker"], task.details["failures"]) == ("ValueError: no such column", 0, 1)


def test_a_task_whose_records_cannot_be_read_failed_in_no_minibatch() -> None:
    script = running(1, max_task_failures=1)
    lease = script.lease()
    script.ask(e.TaskFailed, 0, 7, lease.id, -1, "the records are torn")
    [task] = of_kind(script, EventKind.TASK_FAILED)
    [failed] = of_kind(script, EventKind.JOB_FAILED)
    assert "minibatch" not in failed.message
    assert task.details["minibatch"] == -1


def test_a_good_end_says_so_once_and_the_pods_that_leave_then_are_not_lost() -> None:
    script = running(1)
    train_all(script)
    script.sets_are_read(everything(script))
    assert [event.subject for event in of_kind(script, EventKind.JOB_SUCCEEDED)] == ["job"]
    script.pod(Role.WORKER, 0, PodState.SUCCEEDED)
    assert not of_kind(script, EventKind.POD_LOST)


def test_a_reason_to_be_pending_is_said_again_only_when_more_than_its_numbers_has_changed() -> None:
    script = Script(num_workers=1)

    def pending(message: str) -> None:
        name = script.settings.pod_name(Role.WORKER, 0)
        script.tell(e.PodChanged(name, Role.WORKER, 0, f"{name}/1", PodState.PENDING, "Unschedulable", message=message))

    for message in ("0/3 nodes: 3 Insufficient cpu.", "0/4 nodes: 4 Insufficient cpu.", "0/4 nodes: 4 had taints."):
        pending(message)
    pending("0/5 nodes: 5 Insufficient cpu.")  # a scheduler may waver for weeks
    assert [event.message for event in of_kind(script, EventKind.POD_PENDING)] == [
        "0/3 nodes: 3 Insufficient cpu.",
        "0/4 nodes: 4 had taints.",
    ]


def test_reasons_with_other_names_in_them_are_no_other_reasons_and_of_many_the_first_are_reported() -> None:
    script = Script(num_workers=1)
    name = script.settings.pod_name(Role.WORKER, 0)

    def pending(message: str) -> None:
        script.tell(e.PodChanged(name, Role.WORKER, 0, f"{name}/1", PodState.PENDING, "Failed", message=message))

    for sandbox in ("4f2e", "0b7c", "aa11"):
        pending(f"no network for sandbox {sandbox}")
    assert len(of_kind(script, EventKind.POD_PENDING)) == 1
    for k in range(100):
        pending("so " * k + "it waits")
    assert len(of_kind(script, EventKind.POD_PENDING)) == MAX_REASONS


def test_a_group_breaks_by_the_loss_of_a_member_and_forms_again_by_that() -> None:
    script = standing(3)
    script.kill(1)
    [broken] = of_kind(script, EventKind.GROUP_BROKEN)
    assert (broken.subject, causes(script, broken)[0]) == ("group-1", ("PodLost", "worker-1"))
    script.all_leave(0, 2)
    script.forms()
    formed = of_kind(script, EventKind.GROUP_FORMED)[-1]
    assert (formed.subject, formed.cause) == ("group-2", broken.number)
    assert (formed.details["before"], formed.details["after"], formed.details["workers"]) == (3, 2, "0 2")


def test_a_group_that_a_worker_joins_forms_by_its_registration() -> None:
    script = standing(2, wanted=3)
    script.successor_starts(2)
    script.moment()
    script.forms()
    formed = of_kind(script, EventKind.GROUP_FORMED)[-1]
    assert (formed.subject, causes(script, formed)[0]) == ("group-2", ("WorkerRegistered", "worker-2"))
    assert not of_kind(script, EventKind.GROUP_BROKEN)


def test_the_log_is_bounded_and_says_what_it_has_left_out() -> None:
    log = EventLog()
    log.add(EventKind.JOB_STARTED, "job")
    for number in range(3 * MAX_EVENTS):
        log.add(EventKind.POD_LOST, f"worker-{number}")
    history = log.history
    assert len(history.events) <= MAX_EVENTS
    assert history.events[0].kind is EventKind.JOB_STARTED
    assert len(history.events) - 1 + history.summed_up["PodLost"] == 3 * MAX_EVENTS
    assert [event.number for event in history.events] == sorted(event.number for event in history.events)


def test_a_model_that_hundreds_of_workers_reject_is_one_event() -> None:
    script = Script(num_workers=20)
    for worker_id in range(20):
        script.worker_starts(worker_id)
    for worker_id in range(20):
        script.ask(e.ModelReported, worker_id, 7, error="custom_model raised", error_details="Traceback …")
    [rejected] = of_kind(script, EventKind.MODEL_REJECTED)
    [failed] = of_kind(script, EventKind.JOB_FAILED)
    assert (rejected.subject, failed.cause) == ("worker-0", rejected.number)


@pytest.mark.parametrize("strategy", DistributionStrategy)
def test_a_model_that_others_train_is_not_to_blame_where_a_successor_cannot_load_it(
    strategy: DistributionStrategy,
) -> None:
    settings = {"strategy": strategy, "num_ps": int(strategy is DistributionStrategy.PARAMETER_SERVER)}
    is_local, all_reduce = strategy is DistributionStrategy.LOCAL, strategy is DistributionStrategy.ALL_REDUCE
    script = standing(2) if all_reduce else running(1 if is_local else 2, **settings)
    script.progress(script.lease(0), 0)
    last = 0 if is_local else 1
    script.kill(last)
    script.worker_starts(last + 1)
    script.ask(e.ModelReported, last + 1, 7, error="the weights cannot be downloaded", error_details="Traceback …")
    [rejected] = of_kind(script, EventKind.MODEL_REJECTED)
    assert rejected.subject == f"worker-{last + 1}"
    assert (script.job.status().phase == "Failed") is is_local  # nothing else holds the model: it may be a checkpoint
    if not is_local:
        script.kill(last + 1, "Error")
        script.pass_time(2, alive=(0,))
        assert script.last(c.CreatePod).index == last + 2


def test_long_texts_are_shortened_and_many_of_them_summed_up() -> None:
    log = EventLog()
    for _ in range(200):
        log.add(EventKind.TASK_FAILED, "task-0", "x" * 10_000 + "end", 0, traceback="y" * 10_000)
    assert all(event.message.endswith("end") for event in log.history.events)
    assert max(len(event.message) for event in log.history.events) == MAX_TEXT + 1
    assert len(json.dumps(log.snapshot())) < 2 * MAX_CHARACTERS


def test_of_a_long_text_the_first_line_and_the_end_are_kept() -> None:
    log = EventLog()
    frames = '  File "model.py", line 7, in call\n' * 200
    log.add(EventKind.JOB_FAILED, "job", f"task 3 failed 3 times\n{frames}ValueError: no such column")
    log.add(EventKind.JOB_FAILED, "job", "a" + "x" * 5000 + "end")
    failed, single = log.history.events
    assert describe(failed) == "task 3 failed 3 times"
    assert failed.message.endswith("in call\nValueError: no such column")
    assert describe(single).startswith("ax")
    assert single.message.endswith("xend")
    assert {len(failed.message), len(single.message)} == {MAX_TEXT + 1}


def test_evaluations_of_many_metrics_are_bounded_too() -> None:
    log = EventLog()
    for step in range(MAX_EVENTS):
        log.add(EventKind.EVALUATION_FINISHED, f"evaluation-{step}", **{f"accuracy_{k}": k / 7 for k in range(200)})
    assert len(json.dumps(log.snapshot())) < 2 * MAX_CHARACTERS


def test_a_log_that_was_restored_continues_its_numbers() -> None:
    log = EventLog()
    for number in range(MAX_EVENTS + 1):
        log.add(EventKind.POD_LOST, f"worker-{number}")
    after = EventLog()
    after.restore(json.loads(json.dumps(log.snapshot())))
    assert after.history == log.history
    assert after.add(EventKind.JOB_SUCCEEDED, "job") == MAX_EVENTS + 2


def test_a_snapshot_of_the_log_waits_for_its_writer_and_stays_what_it_was() -> None:
    log = EventLog()
    log.add(EventKind.POD_LOST, "worker-1", reason="Killed")
    taken = log.snapshot()
    text = json.dumps(taken)
    log.add(EventKind.POD_LOST, "worker-1", reason="Killed")
    log.add(EventKind.POD_LOST, "ps-0", reason="Evicted")
    assert json.dumps(taken) == text


def test_every_kind_can_be_described() -> None:
    details = {"before": 4, "after": 3, "seconds": 0.19, "records": 10, "generation": 2, "reason": "Killed"}
    for kind in EventKind:
        text = describe(JobEvent(1, 0.0, kind, "worker-1", "why", 0, details))
        assert text
        assert "\n" not in text
    assert describe(JobEvent(1, 0.0, EventKind.GROUP_FORMED, "group-2", "", 0, details)) == "4 → 3 workers in 0.19 s"


def test_routine_is_summed_up_before_troubles_are() -> None:
    log = EventLog()
    for number in range(50):
        log.add(EventKind.POD_LOST, f"worker-{number}")
    for number in range(5 * MAX_EVENTS):
        log.add(EventKind.EPOCH_COVERED, f"epoch-{number}")
    assert set(log.history.summed_up) == {"EpochCovered"}
    assert sum(event.kind is EventKind.POD_LOST for event in log.history.events) == 50
