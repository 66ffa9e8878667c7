"""Jobs of a user's own command: finished workers, the end of the data, and what TensorFlow's servers surely hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.plan.epoch import coverage_line
from elasticdl.master.core.values import DataKind, PodState, ScriptPlan, SessionEvent
from elasticdl.protocol import Role, Shard
from tests.master_core.core_script import Like, Script


def running(num_workers: int = 2, own_epochs: int | None = 1, num_records: int = 40, **settings: Any) -> Script:
    """A job whose workers have joined and whose first script has said what the data are."""
    script = Script(**({"num_ps": 0, "runs_command": True, "num_workers": num_workers} | settings))
    for worker_id in range(num_workers):
        script.worker_starts(worker_id)
    report(script, 0, num_records, num_epochs=own_epochs)
    return script


def report(script: Script, worker_id: int, num_records: int = 40, size: int = 10, num_epochs: int | None = 1) -> None:
    shards = {DataKind.TRAINING: (Shard("", 0, num_records),)}
    script.ask(e.ModelReported, worker_id, 7, shards=shards, plan=ScriptPlan(size, 2, num_epochs))


def ends_well(script: Script, worker_id: int) -> None:
    script.pod(Role.WORKER, worker_id, PodState.SUCCEEDED, "Completed")


def session(script: Script, what: SessionEvent, worker_id: int = 0) -> Any:
    return script.ask(e.SessionReported, worker_id, 7, what)


def test_the_first_report_of_the_data_counts() -> None:
    script = running(num_epochs=5)
    report(script, 1, num_records=1000, size=3)
    plan = script.worker_joins(1).plan
    assert plan == ScriptPlan(10, 2, 1, num_records=40, num_minibatches=4)
    assert script.job.status().num_epochs == 1


def test_the_minibatches_of_the_plan_are_those_of_the_tasks() -> None:
    script = Script(num_ps=0, runs_command=True, num_workers=1)
    script.worker_starts(0)
    shards = tuple(Shard(f"part-{size}", 3, 3 + size) for size in range(45))
    script.ask(e.ModelReported, 0, 7, shards={DataKind.TRAINING: shards}, plan=ScriptPlan(10, 2))
    plan = script.worker_joins(0).plan
    assert plan.num_minibatches == sum(-(-len(task) // 10) for task in script.job._work.tasks.slices)


def test_the_number_of_workers_follows_a_gain_that_is_measured_by_the_minibatches_of_the_script() -> None:
    script = running(max_workers=4, minibatch_size=64)
    assert script.job._autoscaler._policy.sample_records == 2 * 10


def test_without_a_report_the_jobs_data_are_listed_when_a_script_asks() -> None:
    script = Script(num_ps=0, runs_command=True, num_workers=1)
    script.worker_starts(0)
    script.ask(e.ModelReported, 0, 7, plan=ScriptPlan(10, 2))
    assert script.told(c.ListShards) == [c.ListShards(DataKind.TRAINING)]


def test_a_worker_whose_command_ends_with_0_is_done_and_has_no_successor() -> None:
    script = running()
    ends_well(script, 0)
    assert not script.told(c.CreatePod)
    script.restart_master()
    script.tell(e.PodsListed(()))
    assert [one.name for one in script.told(c.CreatePod)] == ["elasticdl-j-worker-2"]  # of worker 1, which is gone


def test_the_end_of_the_data_is_reported_and_the_job_waits_for_the_commands() -> None:
    script = running(num_workers=1)
    while (lease := script.request()) is not None:
        script.finish(lease)
    assert script.last(c.Reply).answer == c.JobOver()
    assert "Epoch 1: records 40, committed 40, repeated 0, lost 0" in script.log()
    assert not [one for one in script.history if isinstance(one, c.EndJob)]
    ends_well(script, 0)
    assert script.last(c.EndJob) == c.EndJob(0)


def test_commands_that_end_before_the_data_have_failed() -> None:
    script = running(num_workers=1)
    script.finish(script.lease())
    ends_well(script, 0)
    ended = script.last(c.EndJob)
    assert ended.exit_code == 1
    assert "of 40 planned records 20 are trained, 20 are left out" in ended.message
    line = "Epoch 1: records 40, committed 20, repeated 0, lost 0, unplanned 20"
    assert line in script.log()
    status = script.job.status()
    assert (status.phase, [coverage_line(epoch) for epoch in status.coverage]) == ("Failed", [line])


def test_the_end_of_the_data_is_written_down_before_a_script_may_end_at_its_answer() -> None:
    script = running(num_workers=1)
    script.finish(script.lease())
    assert script.told(c.Persist) == []
    script.finish(script.lease())
    kinds = [type(command) for command in script.commands]
    assert kinds.index(c.Persist) < kinds.index(c.Reply)


def test_epochs_that_no_command_has_begun_are_left_out_too() -> None:
    script = running(num_workers=1, num_epochs=3, own_epochs=None)
    for _ in range(2):
        script.finish(script.lease())
    ends_well(script, 0)
    assert "of 120 planned records 40 are trained, 80 are left out" in script.last(c.EndJob).message


@pytest.mark.parametrize("settings", [{"max_step": 2}, {"num_epochs": 0, "own_epochs": None}], ids=str)
def test_what_the_flags_leave_out_is_no_failure(settings: dict[str, Any]) -> None:
    script = running(num_workers=1, **settings)
    script.finish(script.lease())
    ends_well(script, 0)
    assert script.last(c.EndJob) == c.EndJob(0)


@pytest.mark.parametrize("restarts", [False, True])
def test_what_a_script_has_asked_to_leave_out_is_no_failure(restarts: bool) -> None:
    script = running(num_workers=2)
    script.finish(script.lease(0))
    assert isinstance(script.ask(e.TrainingStopRequested, 0, 7, "the loss is small enough"), c.Accepted)
    assert script.ask(e.LeaseRequested, 1, 7, at_once=True) == c.JobOver()
    if restarts:
        script.restart_master()
        script.tell(e.PodsListed(tuple(pod for pod in _pods(script) if pod.role is Role.WORKER)))
    for worker_id in (0, 1):
        ends_well(script, worker_id)
    assert script.last(c.EndJob) == c.EndJob(0)
    assert "Training stops at step 2: the loss is small enough" in script.log()
    assert "Epoch 1: records 40, committed 20, repeated 0, lost 0, unplanned 20" in script.log()


def test_training_is_stopped_by_a_known_worker_once_the_data_are_known() -> None:
    script = Script(num_ps=0, runs_command=True, num_workers=1)
    script.worker_starts(0)
    assert isinstance(script.ask(e.TrainingStopRequested, 0, 7, "now"), c.Refused)
    assert isinstance(script.ask(e.TrainingStopRequested, 4, 7, "now"), c.UnknownWorker)


def test_commands_that_take_no_data_have_failed_where_the_flags_name_some() -> None:
    for expects_data in (False, True):
        script = Script(num_ps=0, runs_command=True, num_workers=1, expects_data=expects_data)
        script.pod(Role.WORKER, 0, PodState.RUNNING)
        ends_well(script, 0)
        assert script.last(c.EndJob).exit_code == int(expects_data)


def test_a_command_that_never_registers_is_left_alone() -> None:
    script = Script(num_ps=0, runs_command=True, num_workers=1)
    script.pod(Role.WORKER, 0, PodState.RUNNING)
    script.pass_time(2000)
    assert not [one for one in script.history if isinstance(one, c.DeletePod)]


def test_a_failing_command_is_charged() -> None:
    script = running(num_workers=1, max_task_failures=2)
    script.kill(0, "Error")
    script.pass_time(5)
    script.kill(1, "Error")
    assert script.last(c.EndJob) == Like(c.EndJob, exit_code=1)


def estimator(**settings: Any) -> Script:
    """On TensorFlow's own server; worker 0 is the chief."""
    script = running(num_ps=1, has_tensorflow_servers=True, **settings)
    script.pod(Role.PS, 0, PodState.RUNNING)
    return script


def test_the_status_counts_tensorflows_servers_that_run_and_the_evaluator() -> None:
    script = estimator(has_evaluator=True)
    status = script.job.status()
    assert (status.ps_alive, status.ps_wanted) == (1, 1)
    assert (status.workers_alive, status.workers_wanted) == (2, 3)  # two of three have registered
    script.pod(Role.PS, 0, PodState.FAILED, "Killed")
    assert script.job.status().ps_alive == 0


def test_nothing_is_handed_out_before_the_chief_has_made_the_model() -> None:
    script = estimator()
    assert script.request(1) is None
    assert session(script, SessionEvent.RESTORED, worker_id=1) == Like(c.Refused)
    assert session(script, SessionEvent.RESTORED) == Like(c.Accepted)
    assert script.lease(1)


def test_what_was_committed_after_the_last_checkpoint_began_is_handed_out_again() -> None:
    script = estimator()
    session(script, SessionEvent.RESTORED)
    first = script.lease(1)
    script.finish(first, 1)
    session(script, SessionEvent.SAVING)
    second = script.lease(1)
    script.progress(second, 0, worker_id=1)
    session(script, SessionEvent.SAVED)
    script.restart_master()
    script.tell(e.PodsListed(tuple(_pods(script))))
    for worker_id in (0, 1):
        script.worker_joins(worker_id)
    script.pod(Role.PS, 0, PodState.FAILED, "Killed")
    assert script.request(1) is None  # until the chief has restored the model
    session(script, SessionEvent.RESTORED)
    again = script.lease(1)
    assert (again.epoch, again.task) == (second.epoch, second.task)
    script.finish(again, 1)
    script.request(1)
    (line,) = [line for line in script.log() if line.startswith("Epoch 1: ")]
    assert line == "Epoch 1: records 40, committed 40, repeated at most 20, lost 0"
    assert [coverage_line(epoch) for epoch in script.job.status().coverage] == [line]


def test_what_is_in_the_last_checkpoint_takes_some_bytes_of_the_journal_and_outlives_the_master() -> None:
    script = estimator(num_records=40_000)
    session(script, SessionEvent.RESTORED)
    lease = script.lease(1)
    tasks = script.job._work.tasks
    for task in set(range(2000)) - {lease.task}:
        tasks.commit((0, task), (0, 1))
    script.progress(lease, 1, worker_id=1)
    for what in (SessionEvent.SAVING, SessionEvent.SAVED):
        session(script, what)
    assert len(json.dumps(script.job.snapshot()["session"])) < 200
    script.restart_master()
    script.tell(e.PodsListed(tuple(_pods(script))))
    script.worker_joins(0)
    session(script, SessionEvent.RESTORED)
    assert script.job.status().records_done == 40_000 - 10


def test_a_chief_that_gives_its_quota_takes_the_model_with_it() -> None:
    script = estimator()
    script.pod(Role.PS, 0, PodState.FAILED, "Killed")
    script.tell(e.PodChanged("elasticdl-j-ps-0", Role.PS, 0, "ps-0/2", PodState.PENDING, queue="team-a"))
    session(script, SessionEvent.RESTORED)  # of the server that is lost, and late
    assert script.lease(1)
    script.pass_time(11, alive=(0, 1))
    script.kill(1)
    script.pass_time(11, alive=(0,))
    script.kill(0)
    script.pod(Role.PS, 0, PodState.RUNNING, life=2)
    created = [one.index for one in script.told(c.CreatePod)]
    assert created == [2, 3]
    for worker_id in created:
        script.worker_starts(worker_id)
    assert script.request(2) is None  # until the chief has restored the model


def test_the_successor_of_a_server_that_was_trained_on_is_created_at_once_each_time() -> None:
    script = estimator()
    for life in range(1, 4):
        script.pod(Role.PS, 0, PodState.RUNNING, life=life)
        session(script, SessionEvent.RESTORED)
        script.progress(script.lease(1), 0, worker_id=1)
        script.pod(Role.PS, 0, PodState.FAILED, "Killed", life)
        assert script.told(c.CreatePod) == [Like(c.CreatePod, role=Role.PS, index=0)], life


def test_a_checkpoint_that_is_not_whole_does_not_count() -> None:
    script = estimator()
    session(script, SessionEvent.RESTORED)
    script.finish(script.lease(1), 1)
    session(script, SessionEvent.SAVING)
    session(script, SessionEvent.RESTORED)
    assert script.job.status().records_done == 0


def test_a_lost_worker_other_than_the_chief_stops_no_other() -> None:
    script = estimator()
    session(script, SessionEvent.RESTORED)
    lease = script.lease(1)
    script.kill(1)
    assert script.lease(0).task == lease.task
    script.kill(0)
    script.worker_starts(2)
    assert script.request(2) is None


def test_the_late_end_of_a_chief_that_has_a_successor_stops_no_worker() -> None:
    script = estimator()
    session(script, SessionEvent.RESTORED)
    script.pass_time(80, alive=(1,))
    assert script.told(c.DeletePod)
    script.worker_starts(2)
    assert script.request(1) is None
    session(script, SessionEvent.RESTORED, worker_id=2)
    assert script.request(1)
    script.kill(0, "NodeLost")
    assert script.lease(2)


def test_a_worker_learns_the_end_although_a_server_is_lost_after_the_chief_has_ended() -> None:
    script = estimator()
    session(script, SessionEvent.RESTORED)
    while (lease := script.request(1)) is not None:
        script.finish(lease, 1)
    assert script.ask(e.LeaseRequested, 0, 7) == c.JobOver()
    ends_well(script, 0)
    script.pod(Role.PS, 0, PodState.FAILED, "Killed")  # no process restores the model any more
    assert script.ask(e.LeaseRequested, 1, 7) == c.JobOver()


def test_an_evaluator_learns_the_end_after_all_that_train() -> None:
    script = estimator(num_workers=1, has_evaluator=True)
    script.worker_starts(1)
    session(script, SessionEvent.RESTORED)
    while (lease := script.request()) is not None:
        script.finish(lease)
    assert script.ask(e.LeaseRequested, 1, 7, at_once=True) == c.NoLeaseNow()
    ends_well(script, 0)
    assert script.ask(e.LeaseRequested, 1, 7, at_once=True) == c.JobOver()
    assert not [one for one in script.history if isinstance(one, c.EndJob)]
    ends_well(script, 1)
    assert script.last(c.EndJob) == c.EndJob(0)
    assert c.DeletePod("elasticdl-j-ps-0") in script.history


def _pods(script: Script) -> list[e.PodChanged]:
    found = []
    for role, index in ((Role.PS, 0), (Role.WORKER, 0), (Role.WORKER, 1)):
        name = script.settings.pod_name(role, index)
        found.append(e.PodChanged(name, role, index, f"{name}/1", PodState.RUNNING))
    return found


# Commands that fail --------------------------------------------------------------------------------------------------

ERROR = 'exit code 1: AttributeError: no zero_gradd\n  File "train.py", line 3, in train\n    zero_gradd()'


def fails(script: Script, worker_id: int, message: str) -> None:
    script.pod(Role.WORKER, worker_id, PodState.FAILED, "Error", message=message)


def successor(script: Script) -> int:
    """The id of the newest worker, after the pause before it is created."""
    script.pass_time(10)
    return script.last(c.CreatePod).index


def test_the_same_error_of_the_script_before_the_first_step_is_not_tried_a_third_time() -> None:
    script = Script(num_ps=0, runs_command=True, num_workers=1)
    fails(script, 0, ERROR)
    assert script.job.status().phase != "Failed"
    script.restart_master()
    script.tell(e.PodsListed(()))
    fails(script, successor(script), ERROR)
    assert script.job.status().phase == "Failed"
    error, *frames, end = script.job.status().message.splitlines()
    assert error == "AttributeError: no zero_gradd"
    assert frames == ['  File "train.py", line 3, in train', "    zero_gradd()"]
    assert "last in elasticdl-j-worker-" in end


def test_two_workers_of_a_job_that_fail_alike_end_it_at_once() -> None:
    script = Script(num_ps=0, runs_command=True, num_workers=2)
    for worker_id in range(2):
        fails(script, worker_id, f"{ERROR} <object at 0x7f{worker_id}>")
    assert script.job.status().phase == "Failed"


def test_arguments_that_the_script_refuses_twice_end_the_job() -> None:
    script = Script(num_ps=0, runs_command=True, num_workers=2)
    for worker_id in range(2):
        fails(script, worker_id, "exit code 2; its last lines:\nusage: train.py\ntrain.py: error: no --fast")
    assert script.job.status().message.startswith("usage: train.py\ntrain.py: error: no --fast\n")


@pytest.mark.parametrize(
    "messages",
    [
        ["exit code 1: ConnectionRefusedError: [Errno 111]"] * 3,
        ["exit code 1: RuntimeError: CUDA error: device is busy"] * 3,
        ["exit code 1: RuntimeError: DataLoader worker (pid 7) exited unexpectedly"] * 3,
        ["exit code 1; its last lines:\nthe rate is wrong"] * 3,
        ["exit code 1: s3://data/a.csv: 503 Slow Down.\n  → Check the URL, and the settings of its client."] * 3,
        [f"exit code 1: KeyError: {number}" for number in range(3)],
        ["killed by SIGSEGV"] * 3,
    ],
)
def test_other_failures_are_tried_as_often_as_the_flag_says(messages: list[str]) -> None:
    script = Script(num_ps=0, runs_command=True, num_workers=1)
    worker_id = 0
    for message in messages:
        fails(script, worker_id, message)
        worker_id = successor(script)
    assert script.job.status().message.startswith("3 pods in a row ended by their own fault")


def test_what_was_committed_between_two_equal_errors_forgives_the_first() -> None:
    script = running(num_workers=2)
    fails(script, 0, ERROR)
    script.finish(script.lease(1), 1)
    fails(script, successor(script), ERROR)
    assert script.job.status().phase != "Failed"


def test_the_end_of_a_log_is_reported_once() -> None:
    script = Script(num_ps=0, runs_command=True, num_workers=1, max_task_failures=1)
    fails(script, 0, "exit code 1; its last lines:\nthe rate is wrong")
    assert script.last(c.EndJob).pod == ""
    silent = Script(num_ps=0, runs_command=True, num_workers=1, max_task_failures=1)
    fails(silent, 0, "killed by SIGSEGV")
    assert silent.last(c.EndJob).pod == "elasticdl-j-worker-0"
