"""Grants in a group, and the ledger by the model of its source."""

from __future__ import annotations

from core_script import Like, applied, running
from group_script import GroupScript, standing

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.ledger.failures import RetryBudget
from elasticdl.master.core.values import DataKind, PodState, ReportedLease, ScriptPlan, TaskType
from elasticdl.protocol import Role, Shard
from elasticdl_client.job_events import EventKind
from elasticdl_client.job_status import JobPhase


def test_nothing_is_granted_before_a_group_stands() -> None:
    script = GroupScript(num_workers=1)
    script.worker_starts(0)
    script.data_is_known()
    assert script.request(0) is None
    script.ready(0)
    assert script.request(0) is None
    script.forms(steps=0)
    assert script.request(0) is not None


def test_only_members_are_granted_anything() -> None:
    script = standing(1, wanted=2, records=400)
    script.successor_starts(1)
    assert script.request(1) is None
    assert script.request(0) is None  # a new group is planned, and has not formed
    script.moment()
    script.forms()
    assert script.request(1) is not None


def test_what_the_source_holds_is_committed_and_the_rest_is_not() -> None:
    script = standing(2)
    first, second = script.lease(0), script.lease(1)
    script.progress(first, 0)
    script.progress(second, 0, worker_id=1)
    script.kill(0)
    script.all_leave(1)
    script.forms({(0, second.task): (0, 1), (0, first.task): (0,)}, steps=2)
    ledger = script.job._work.tasks.ledger().tasks()
    assert ledger == applied({(0, second.task): (0, 1), (0, first.task): (0,)}).tasks()
    assert script.lease(1).task == first.task


def test_a_model_that_no_worker_has_any_more_is_trained_again_from_the_checkpoint() -> None:
    script = standing(1)
    lease = script.lease(0)
    script.finish(lease)
    script.kill(0)
    script.pass_time(2)
    script.successor_starts(1)
    script.moment()
    script.forms({}, steps=0)
    assert any("no worker has the model any more); its model is the initial one" in line for line in script.log())
    assert any("Epoch 1 is open again" in line for line in script.log())
    assert {script.lease(1).task, script.lease(1).task} == {0, 1}


def test_a_new_model_ends_every_lease() -> None:
    script = standing(2)
    lease = script.lease(1)
    script.kill(0)
    script.all_leave(1)
    script.forms({}, steps=7, restored_from="checkpoints/version-7")
    assert script.progress(lease, 0, worker_id=1) == Like(c.Refused)
    assert any("its model is that of checkpoints/version-7" in line for line in script.log())


def test_an_initial_model_ends_every_lease_though_no_minibatch_was_reported_yet() -> None:
    script = standing(2)
    lease = script.lease(0)
    script.all_leave(0, 1, reason="user code raised in the update of the model")
    script.forms({}, steps=0)
    assert script.progress(lease, 0) == Like(c.Refused)  # it was under way meanwhile, and the model lacks it


def test_leases_of_workers_outside_the_new_group_are_handed_on() -> None:
    script = standing(2)
    lease = script.lease(1)
    script.silence(6, 1)
    assert script.members == (0,)
    script.forms({(0, lease.task): (0,)})
    assert script.progress(lease, 1, worker_id=1) == Like(c.Refused)
    assert script.lease(0).task == lease.task


def test_a_restarted_master_calls_the_living_to_a_new_group_and_no_model_moves() -> None:
    script = standing(2)
    lease = script.lease(0)
    version = script.version
    script.restarts(0, 1)
    assert script.ready(1) == Like(c.UnknownWorker)
    script.worker_joins(0, (ReportedLease(lease, (0,)),))
    script.moment()
    assert script.version == version  # worker 1 is waited for
    script.worker_joins(1)
    script.moment()
    assert [m.is_source for m in script.planned.members] == [True, True]
    assert script.version >> 32 == 2
    assert script.ask(e.GroupFormed, 0, 7, version, applied({}), 0) == Like(c.Accepted)
    assert not script.stands
    script.forms({(0, lease.task): (0,)})
    assert script.stands
    assert "the master has restarted" in script.log()[-1]


def test_a_group_that_a_resumed_job_leaves_follows_from_that_and_not_from_an_earlier_restart() -> None:
    script = standing(2)
    script.restarts(0, 1)
    script.worker_joins(0)
    script.worker_joins(1)
    script.moment()
    script.forms({})
    script.restart_master(resumed_at=script.now + 5.0)
    newest = {event.kind: event for event in script.job.events.events}
    assert newest[EventKind.GROUP_BROKEN].cause == newest[EventKind.JOB_RESUMED].number
    assert newest[EventKind.MASTER_RESTARTED].number < newest[EventKind.JOB_RESUMED].number


def test_a_group_that_formed_is_written_down_before_it_is_acknowledged() -> None:
    script = GroupScript(num_workers=1)
    script.worker_starts(0)
    script.ready(0)
    script.forms(steps=0)
    kinds = [type(one) for one in script.commands]
    assert kinds.index(c.Persist) < kinds.index(c.Reply)
    assert script.job.snapshot()["worlds"]["members"] == [[0, 7, "host-0"]]


def test_a_sample_is_the_first_minibatch_of_the_data() -> None:
    script = GroupScript(num_workers=1)
    script.worker_starts(0)
    assert script.ask(e.SampleRequested, 0, 7) is None
    call = script._num_calls
    script.data_is_known()
    assert script.answer(call) == c.SampleGiven(Shard("training", 0, 10), -1)
    assert script.ask(e.SampleRequested, 0, 7) == c.SampleGiven(Shard("training", 0, 10), -1)


def test_a_sample_comes_with_the_first_epoch_that_is_not_whole() -> None:
    script = standing(1, num_epochs=3)
    num_tasks = len(script.job._work.tasks.slices)
    for _ in range(num_tasks + 1):
        script.finish(script.lease(0))
    answer = script.ask(e.SampleRequested, 0, 7)
    assert (answer.shard, answer.epoch) == (Shard("training", 0, 10), 1)
    script.kill(0)
    script.worker_starts(1)
    assert script.ask(e.SampleRequested, 1, 7).epoch == -1, "no worker has the model any more"


def test_there_is_a_sample_though_every_task_has_a_record_that_is_set_aside() -> None:
    script = GroupScript(num_workers=1, max_bad_records=10)
    script.worker_starts(0)
    script.data_is_known()
    tasks = script.job._work.tasks
    for task, shard in enumerate(tasks.slices):
        tasks.quarantine(task, (shard.start,))
    assert script.ask(e.SampleRequested, 0, 7) == c.SampleGiven(Shard("training", 0, 10), -1)


def test_a_request_at_once_is_not_kept_waiting() -> None:
    script = standing(1)
    assert script.ask_at_once(only=TaskType.EVALUATION) == c.NoLeaseNow()
    assert script.ask_at_once() == Like(c.LeaseGranted)
    script.kill(7)
    assert script.ask_at_once() == Like(c.LeaseGranted)
    assert script.ask_at_once() == c.NoLeaseNow()


def test_evaluation_is_had_on_top_of_training() -> None:
    script = standing(2, has_validation_data=True, evaluation_steps=1, records=80)
    first, second = script.lease(0), script.lease(0)
    script.progress(first, 0)
    assert script.ask_at_once(0) == c.NoLeaseNow()
    granted = script.ask_at_once(0, TaskType.EVALUATION)
    assert granted.lease.type is TaskType.EVALUATION
    assert script.ask_at_once(1).lease.type is TaskType.EVALUATION
    assert second.type is TaskType.TRAINING


def test_a_script_whose_group_has_ended_tells_the_next_life_of_the_master_what_its_model_holds() -> None:
    script = GroupScript(num_workers=2, runs_command=True)
    script.worker_starts(0)
    script.worker_starts(1)
    script.ask(e.ModelReported, 0, 7, shards={DataKind.TRAINING: (Shard("", 0, 40),)}, plan=ScriptPlan(10, 2, 1))
    script.ready(0)
    script.ready(1)
    script.forms(steps=0)
    script.lease(0)
    script.lease(1)
    script.restarts(0, 1)  # reports of the last second are lost
    script.worker_joins(1)
    script.worker_joins(0, applied=applied({(0, 0): (0, 1), (0, 1): (0, 1)}))
    for worker_id in (0, 1):
        script.pod(Role.WORKER, worker_id, PodState.SUCCEEDED, "Completed")
    assert "Epoch 1: records 40, committed 40, repeated 0, lost 0" in script.log()


# Models that are lost again and again ---------------------------------------------------------------------------------


def _relives(script: GroupScript, worker_id: int, minibatches: int) -> None:
    """A successor begins with the initial model, commits some minibatches of the first task and fails."""
    script.successor_starts(worker_id)
    script.moment()
    script.forms(steps=0)
    lease = script.lease(worker_id)
    for minibatch in range(minibatches):
        script.progress(lease, minibatch, worker_id=worker_id)
    script.kill(worker_id, "Error")


def test_workers_that_fail_where_others_did_end_the_job_though_each_trains_up_to_there() -> None:
    script = standing(2)
    script.progress(script.lease(0), 0)
    script.kill(0, "Error")
    script.kill(1, "Error")
    _relives(script, 2, 1)
    assert script.job.status().phase is JobPhase.RUNNING
    _relives(script, 4, 1)
    message = (
        "3 workers in a row failed, the last one elasticdl-j-worker-4 (Error), and training got no further than 10"
    )
    assert script.job.status().message.startswith(message)


def test_workers_that_run_out_of_the_most_memory_where_others_did_end_the_job() -> None:
    script = standing(1)
    for worker_id in range(7):
        assert script.job.status().phase is JobPhase.RUNNING
        if worker_id:
            script.successor_starts(worker_id)
            script.moment()
            script.forms(steps=0)
        script.progress(script.lease(worker_id), 0, worker_id=worker_id)
        script.kill(worker_id, "OOMKilled")
    assert script.job.status().phase is JobPhase.FAILED
    assert "3 workers in a row failed, the last one elasticdl-j-worker-6 (OOMKilled)" in script.job.status().message


def test_a_script_that_fails_after_its_last_epoch_each_time_ends_the_job() -> None:
    script = GroupScript(num_workers=1, runs_command=True)
    script.worker_starts(0)
    script.ask(e.ModelReported, 0, 7, shards={DataKind.TRAINING: (Shard("", 0, 40),)}, plan=ScriptPlan(10, 2, 1))
    script.ready(0)
    for worker_id in range(3):
        if worker_id:
            script.successor_starts(worker_id)
            script.moment()
        script.forms(steps=0)
        for _ in range(2):
            script.finish(script.lease(worker_id), worker_id)
        script.pod(Role.WORKER, worker_id, PodState.FAILED, "Error", message=f"exit code 1: ValueError: {worker_id}")
    message = "ValueError: 2\n3 workers in a row failed, the last one elasticdl-j-worker-2 (exit code 1)"
    assert script.job.status().phase is JobPhase.FAILED
    assert script.job.status().message.startswith(message)


def test_workers_that_lose_the_model_in_the_final_evaluation_each_time_end_the_job() -> None:
    script = standing(1, has_validation_data=True)
    for worker_id in range(3):
        if worker_id:
            script.successor_starts(worker_id)
            script.moment()
            script.forms(steps=0)
        assert script.job.status().phase is JobPhase.RUNNING
        for _ in range(2):
            script.finish(script.lease(worker_id), worker_id)
        script.evaluated(script.lease(worker_id), worker_id=worker_id)
        script.kill(worker_id, "Error")
    assert script.job.status().phase is JobPhase.FAILED


def test_workers_that_fail_in_an_evaluation_while_servers_keep_the_model_do_not_end_the_job() -> None:
    script = running(records=80, num_epochs=2, has_validation_data=True, evaluation_steps=8)
    for _ in range(4):
        script.finish(script.lease())
    for worker_id in range(4):
        if worker_id:
            script.worker_starts(worker_id)
        granted = script.ask(e.LeaseRequested, worker_id, 7, True, TaskType.EVALUATION)
        script.evaluated(granted.lease, worker_id=worker_id)
        script.kill(worker_id, "Error")
    assert script.job.status().phase is JobPhase.RUNNING


def test_a_late_report_does_not_count_a_failure_twice() -> None:
    script = standing(2, records=80, num_minibatches_per_task=4)
    for first, second in ((0, 1), (2, 3)):
        if first:
            for worker_id in (first, second):
                script.successor_starts(worker_id)
            script.moment()
            script.forms(steps=0)
        lease, other = script.lease(first), script.lease(second)
        script.progress(lease, 0, worker_id=first)
        script.kill(first, "Error")
        script.progress(other, 0, worker_id=second)
        script.kill(second, "Error")
    assert script.job.status().phase is JobPhase.RUNNING


def test_workers_that_were_asked_to_end_are_not_counted() -> None:
    script = standing(1)
    for worker_id in range(4):
        if worker_id:
            script.successor_starts(worker_id)
            script.moment()
            script.forms(steps=0)
        script.progress(script.lease(worker_id), 0, worker_id=worker_id)
        script.beat(worker_id, leaving=True)
        script.kill(worker_id, "Error")
    assert script.job.status().phase is JobPhase.RUNNING


def test_failures_are_counted_on_by_the_next_generation_of_the_master() -> None:
    budget, successor = RetryBudget(3), RetryBudget(3)
    budget.relapsed(10)
    successor.restore(budget.snapshot())
    successor.committed(10)
    assert (successor.relapsed(5), successor.furthest) == (2, 10)
    successor.committed(11)
    assert successor.relapsed(11) == 1


def test_workers_that_fail_ever_later_do_not_end_the_job() -> None:
    script = standing(1, records=80, num_minibatches_per_task=8)
    script.progress(script.lease(0), 0)
    script.kill(0, "Error")
    for worker_id in range(1, 6):
        _relives(script, worker_id, worker_id + 1)
    assert script.job.status().phase is JobPhase.RUNNING
