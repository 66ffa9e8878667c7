"""Evaluations, checkpoints and the export."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from core_script import Like, Script, running, train_all
from group_script import standing

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.plan.evaluation import Evaluations, EvaluationSchedule
from elasticdl.master.core.values import Array, Lease, MetricArrays, PodState, TaskType
from elasticdl.protocol import Role, Shard
from elasticdl_client.job_events import EventKind
from elasticdl_client.job_status import JobPhase


def state(*values: float, additive: bool = True) -> MetricArrays:
    return MetricArrays("accuracy", (Array((len(values),), array("d", values).tobytes()),), additive)


def floats(one: MetricArrays) -> list[list[float]]:
    return [list(array("d", part.data)) for part in one.arrays]


def evaluate_all(script: Script, worker_id: int = 0) -> Lease:
    """Every evaluation task reports (1, 2); the lease on the merged states."""
    while not (lease := script.lease(worker_id)).merged:
        assert lease.type is TaskType.EVALUATION
        script.evaluated(lease, state(1.0, 2.0), worker_id=worker_id)
    return lease


def test_the_final_evaluation_follows_the_last_commit_and_adds_the_states() -> None:
    script = running(has_validation_data=True)
    train_all(script)
    lease = evaluate_all(script)
    assert floats(lease.merged[0]) == [[2.0, 4.0]]
    script.evaluated(lease, accuracy=0.75)
    kinds = [type(command) for command in script.commands]
    assert kinds.index(c.Persist) < kinds.index(c.Log)
    assert "Evaluation metrics[step=4]: {'accuracy': 0.75}" in script.log()
    status = script.job.status()
    assert (status.metrics, status.metrics_step, status.phase) == ({"accuracy": 0.75}, 4, "Succeeded")


def test_states_that_do_not_add_up_are_collected() -> None:
    script = running(has_validation_data=True)
    train_all(script)
    for value in (1.0, 2.0):
        script.evaluated(script.lease(), state(value, additive=False))
    merged = script.lease().merged[0]
    assert (floats(merged), merged.num_states) == ([[1.0], [2.0]], 2)


def test_states_of_different_shapes_fail_the_job() -> None:
    script = running(has_validation_data=True)
    train_all(script)
    script.evaluated(script.lease(), state(1.0))
    script.evaluated(script.lease(), state(1.0, 2.0))
    assert "cannot be added" in script.job.status().message


def test_a_lost_worker_makes_its_evaluation_task_be_done_again() -> None:
    script = running(2, has_validation_data=True)
    train_all(script)
    lease = script.lease(0)
    script.kill(0)
    assert script.lease(1).task == lease.task


def test_the_results_are_computed_again_when_their_worker_dies() -> None:
    script = running(2, has_validation_data=True)
    train_all(script)
    lease = evaluate_all(script, 0)
    script.kill(0)
    again = script.lease(1)
    assert again.merged == lease.merged
    assert again.id > lease.id


def test_an_evaluation_is_made_every_n_steps_before_other_work() -> None:
    script = running(has_validation_data=True, evaluation_steps=2, records=80)
    script.finish(script.lease())
    lease = evaluate_all(script)
    assert lease.model_version == 2
    script.evaluated(lease, accuracy=0.5)
    assert "Evaluation metrics[step=2]: {'accuracy': 0.5}" in script.log()
    assert script.lease().type is TaskType.TRAINING


def test_an_evaluate_job_only_evaluates() -> None:
    script = running(has_training_data=False, has_validation_data=True)
    script.evaluated(evaluate_all(script), accuracy=0.9)
    assert "Evaluation metrics[step=0]: {'accuracy': 0.9}" in script.log()
    assert script.job.status().phase == "Succeeded"


def test_validation_data_without_metrics_is_warned_of() -> None:
    script = Script(has_validation_data=True)
    script.worker_starts()
    script.ask(e.ModelReported, 0, 7, shards={"training": (), "validation": ()})
    assert script.job.status().phase == "Failed"
    script = Script(has_validation_data=True)
    script.worker_starts()
    script.ask(e.ModelReported, 0, 7)
    for kind in ("training", "validation"):
        script.tell(e.ShardsListed(kind, script.job._data.planned_shards() or (e.Shard(kind, 0, 20),)))
    assert any("no metric" in line for line in script.log())


def test_a_model_that_is_not_exported_is_not_said_to_be() -> None:
    for why in ("", "it needs up to 5 GB of memory, and there are 3 GB"):
        script = running(1, output="/export")
        train_all(script)
        script.finish(script.lease(0), 0, 0, not_exported=why)
        assert script.job.status().phase == "Succeeded"
        assert any("is exported to /export" in line for line in script.log()) is not bool(why)
        assert any(f"No model is exported: {why}" in line for line in script.log()) is bool(why)
        assert script.job.events.has_no_model is bool(why)


def test_the_export_is_confirmed_and_done_again_elsewhere_when_lost() -> None:
    script = running(2, output="/export")
    train_all(script)
    lease = script.lease(0)
    assert lease.type is TaskType.TRAIN_END
    assert script.request(1) is None
    assert not script.job._work._has_something_to_grant  # else each event looks at all workers that wait
    script.kill(0)
    again = script.last(c.Reply).answer.lease
    assert again.type is TaskType.TRAIN_END
    assert script.ask(e.LeaseQuestioned, 1, 7, again.id) == c.Accepted(4)
    script.finish(again, 1, 0)
    assert script.job.status().phase == "Succeeded"


def test_an_export_that_fails_again_and_again_fails_the_job() -> None:
    script = running(output="/export")
    train_all(script)
    for _ in range(3):
        script.fail(script.lease(), error="No space left on device")
    assert "No space left on device" in script.job.status().message


def test_a_checkpoint_is_saved_every_n_versions_and_at_the_end() -> None:
    script = running(checkpoint_dir="/c", checkpoint_steps=3, records=80)
    first = script.lease()
    script.progress(first, 0, 1)
    assert script.told(c.SaveCheckpoint) == []
    second = script.lease()
    script.progress(second, 0)
    assert script.told(c.SaveCheckpoint) == [Like(c.SaveCheckpoint, version=3)]
    script.progress(second, 1)
    script.tell(e.CheckpointSaved(3, "/c/version-3"))
    script.finish(first)
    script.finish(second)
    script.finish(script.lease())
    script.tell(e.CheckpointSaved(6, "/c/version-6"))
    train_all(script)
    assert script.last(c.SaveCheckpoint).version == 8
    assert script.job.status().phase == "Running"
    script.tell(e.CheckpointSaved(8, "/c/version-8"))
    assert script.job.status().phase == "Succeeded"


def test_without_checkpoint_steps_one_is_saved_every_minute_if_anything_is_new() -> None:
    script = running(checkpoint_dir="/c")
    script.pass_time(70, alive=(0,))
    assert script.told(c.SaveCheckpoint) == []
    script.progress(script.lease(), 0)
    assert script.told(c.SaveCheckpoint) == [Like(c.SaveCheckpoint, version=1)]
    script.progress(script.lease(), 0)
    script.pass_time(70, alive=(0,))
    assert len([one for one in script.history if isinstance(one, c.SaveCheckpoint)]) == 1, "one is still being saved"


def test_a_checkpoint_that_fails_is_said_and_tried_again() -> None:
    script = running(checkpoint_dir="/c", checkpoint_steps=1)
    lease = script.lease()
    script.progress(lease, 0)
    script.tell(e.CheckpointFailed(1, "No space left on device"))
    assert script.log()[-1].endswith("No space left on device. The job continues and tries again later.")
    script.progress(lease, 1)
    assert script.told(c.SaveCheckpoint) == [Like(c.SaveCheckpoint, version=2)]


def test_the_checkpoints_of_workers_are_reported_once_each_over_all_generations_of_the_master() -> None:
    script = standing(2, checkpoint_dir="/c")
    saved, full = e.CheckpointSaved(20, "/c/version-20"), e.CheckpointFailed(40, "No space left on device")
    for worker_id, one in ((0, saved), (0, saved), (1, saved), (0, full), (1, full)):
        script.beat(worker_id, checkpoint=one)
    script.restarts(0, 1)
    for worker_id in (0, 1):
        script.worker_joins(worker_id)
        script.beat(worker_id, checkpoint=full)
    script.beat(0, checkpoint=e.CheckpointFailed(60, "No space left on device"))
    script.beat(0, checkpoint=e.CheckpointSaved(60, "/c/version-60"))
    kinds = (EventKind.CHECKPOINT_SAVED, EventKind.CHECKPOINT_FAILED)
    events = [one for one in script.job.events.events if one.kind in kinds]
    assert [(str(one.kind), one.subject, one.message) for one in events] == [
        ("CheckpointSaved", "checkpoint-20", "saved to /c/version-20"),
        ("CheckpointFailed", "checkpoint-40", "No space left on device"),
        ("CheckpointFailed", "checkpoint-60", "No space left on device"),
        ("CheckpointSaved", "checkpoint-60", "saved to /c/version-60"),
    ]
    assert script.job.status().checkpoint_at == events[-1].at


def test_a_checkpoint_that_a_killed_master_forgot_is_reported_and_none_is_reported_twice() -> None:
    script = standing(2, checkpoint_dir="/c")
    script.beat(0, checkpoint=e.CheckpointSaved(20, "/c/version-20"), checkpoint_attempt=1)
    script.beat(1, checkpoint=e.CheckpointSaved(40, "/c/version-40"), checkpoint_attempt=1)
    for _ in range(2):  # each generation of the master hears the newest attempt of every worker
        script.restarts(0, 1)
        for worker_id in (0, 1):
            script.worker_joins(worker_id)
        script.beat(0, checkpoint=e.CheckpointSaved(20, "/c/version-20"), checkpoint_attempt=1)
        script.beat(1, checkpoint=e.CheckpointSaved(60, "/c/version-60"), checkpoint_attempt=2)
    saved = [one for one in script.job.events.events if one.kind is EventKind.CHECKPOINT_SAVED]
    assert [one.subject for one in saved] == ["checkpoint-20", "checkpoint-40", "checkpoint-60"]


def test_the_last_checkpoint_is_tried_again_before_the_job_has_failed() -> None:
    script = running(checkpoint_dir="/c", max_task_failures=3)
    train_all(script)
    for attempt in range(3):
        assert len([one for one in script.history if isinstance(one, c.SaveCheckpoint)]) == attempt + 1
        assert script.job.status().phase is JobPhase.RUNNING
        script.tell(e.CheckpointFailed(script.last(c.SaveCheckpoint).version, "No space left on device"))
        script.pass_time(6, alive=(0,))
    assert "The last checkpoint was not written: No space left on device" in script.job.status().message
    assert "--checkpoint_dir_for_init" in script.job.status().message  # a job that has failed is not resumed
    said = [line.rpartition("No space left on device.")[2] for line in script.log() if " failed: No space" in line]
    assert said == [" It is tried again, up to 3 times in all."] * 2 + [""]
    assert script.job.status().phase is JobPhase.FAILED


def test_a_last_checkpoint_that_is_written_the_second_time_ends_the_job_well() -> None:
    script = running(checkpoint_dir="/c")
    train_all(script)
    version = script.last(c.SaveCheckpoint).version
    script.tell(e.CheckpointFailed(version, "the storage has a pause"))
    script.pass_time(6, alive=(0,))
    assert len([one for one in script.history if isinstance(one, c.SaveCheckpoint)]) == 2
    script.tell(e.CheckpointSaved(version, f"/c/version-{version}"))
    assert script.job.status().phase is JobPhase.SUCCEEDED


def test_a_ps_restores_the_newest_checkpoint_and_before_that_the_given_parameters() -> None:
    script = running(checkpoint_dir="/c", checkpoint_steps=1, checkpoint_dir_for_init="/other/version-9")
    assert script.ps_joins() == c.PsAdmitted(1, "/other/version-9", True)
    script.progress(script.lease(), 0)
    script.tell(e.CheckpointSaved(1, "/c/version-1"))
    script.ps_dies()
    assert script.ps_joins(life=2) == c.PsAdmitted(2, "/c/version-1", False)


def test_the_model_is_lost_during_an_epochs_evaluation_that_waits_until_the_epoch_is_trained_again() -> None:
    evaluations = Evaluations(EvaluationSchedule(each_epoch=True), (Shard("v", 0, 10),))
    evaluations.pass_time(1.0, 4, num_ended=1)
    assert evaluations.begin_if_due(4, False) is not None
    evaluations.withdraw()
    evaluations.pass_time(2.0, 4, num_ended=0)
    assert evaluations.begin_if_due(4, False) is None
    evaluations.pass_time(3.0, 8, num_ended=1)
    begun = evaluations.begin_if_due(8, False)
    assert begun is not None
    assert begun.step == 8


def test_an_evaluation_by_steps_begins_anew_when_the_model_is_lost_though_an_epoch_has_ended() -> None:
    evaluations = Evaluations(EvaluationSchedule(every_steps=4), (Shard("v", 0, 10),))
    evaluations.pass_time(1.0, 4, num_ended=1)
    assert evaluations.begin_if_due(4, False) is not None
    evaluations.withdraw()
    assert evaluations.current is not None


def test_the_model_is_lost_during_the_final_evaluation_and_evaluated_again() -> None:
    script = running(has_validation_data=True)
    train_all(script)
    lease = script.lease()
    script.ps_dies()
    script.ps_starts(life=2)
    assert isinstance(script.evaluated(lease, state(1.0)), c.Refused)
    script.sets_are_read({})
    train_all(script)
    script.evaluated(evaluate_all(script), accuracy=0.5)
    assert script.job.status().phase == "Succeeded"
    script.pod(Role.WORKER, 0, PodState.SUCCEEDED)
    assert script.last(c.EndJob) == c.EndJob(0)


FIRST = c.SampleGiven(Shard("validation", 0, 10), -1)
NOTHING_TO_TRY = Like(c.SampleGiven, shard=Shard("", 0, 0))


def ask_for_trial(script: Script, worker_id: int) -> object:
    return script.ask(e.SampleRequested, worker_id, 7, of_validation=True)


def ask_for_sample(script: Script, worker_id: int) -> object:
    return script.ask(e.SampleRequested, worker_id, 7)


def test_one_worker_tries_the_metrics_as_soon_as_the_data_are_known() -> None:
    script = Script(num_workers=2, has_validation_data=True)
    for worker_id in range(2):
        script.worker_starts(worker_id)
    assert ask_for_trial(script, 0) is None
    call = script._num_calls
    script.data_is_known()  # though no PS is there
    assert script.answer(call) == FIRST
    assert ask_for_trial(script, 1) == NOTHING_TO_TRY
    assert ask_for_trial(script, 0) == FIRST, "the answer may have been lost"


def test_another_worker_tries_the_metrics_when_the_first_one_is_lost() -> None:
    script = running(2, has_validation_data=True)
    assert ask_for_trial(script, 0) == FIRST
    script.kill(0)
    assert ask_for_trial(script, 1) == FIRST


def test_metrics_are_not_tried_once_something_is_trained_whichever_master_lives() -> None:
    script = running(2, has_validation_data=True)
    script.progress(script.lease(), 0)
    assert ask_for_trial(script, 1) == NOTHING_TO_TRY
    script.restart_master()
    script.worker_joins(0)
    script.worker_joins(1)
    script.ps_joins(0, held=1)
    assert ask_for_trial(script, 1) == NOTHING_TO_TRY


def test_there_is_nothing_to_try_where_nothing_is_evaluated() -> None:
    assert ask_for_trial(running(), 0) == NOTHING_TO_TRY
    script = Script(num_workers=1, has_validation_data=True)
    script.worker_starts(0)
    script.ask(e.ModelReported, 0, 7, has_metrics=False)
    for command in script.told(c.ListShards):
        script.tell(e.ShardsListed(command.kind, (Shard(str(command.kind), 0, 40),)))
    assert ask_for_trial(script, 0) == NOTHING_TO_TRY


def test_metrics_that_cannot_be_tried_fail_the_job_though_others_train() -> None:
    script = running(2, has_validation_data=True)
    assert ask_for_trial(script, 0) == FIRST
    script.progress(script.lease(1), 0, worker_id=1)
    script.ask(e.ModelReported, 0, 7, error="the evaluation raised ValueError", error_details="Traceback …")
    assert script.job.status().phase == "Failed"


@pytest.mark.parametrize("request_more", [Script.request, ask_for_sample])
def test_a_worker_rejected_after_its_trial_of_the_metrics_is_replaced(
    request_more: Callable[[Script, int], object],
) -> None:
    """Its trial has succeeded once it asks for anything else: what it meets later is its own fault."""
    script = running(2, has_validation_data=True)
    assert ask_for_trial(script, 0) == FIRST
    request_more(script, 0)
    assert ask_for_trial(script, 1) == NOTHING_TO_TRY
    script.progress(script.lease(1), 0, worker_id=1)
    script.ask(e.ModelReported, 0, 7, error="its disk is full")
    assert script.job.status().phase == "Running"
