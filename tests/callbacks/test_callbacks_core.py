"""The master's decisions: a plan cut short, occasions handed out, and a new generation that keeps both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.applied import CommittedSet
from elasticdl.master.core.values import Lease, PodState, ReportedLease, TaskType
from elasticdl.protocol import Role, Shard
from elasticdl_client.choices import DistributionStrategy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "master_core"))
from core_script import Script

STOP = {"metric": "loss", "maximize": False, "min_delta": 0.0, "patience": 1, "baseline": None, "start_from": 0}
SAVE = {"path": "m-{epoch}", "metric": "", "maximize": False, "min_delta": 0.0, "threshold": None, "every_steps": 0}
LOCAL = {"strategy": DistributionStrategy.LOCAL, "num_ps": 0, "has_validation_data": True}


def running(rules: dict[str, Any], records: int = 40, **settings: Any) -> Script:
    script = Script(records, **{**LOCAL, "num_workers": 1, **settings})
    for worker_id in range(script.settings.num_workers):
        script.worker_starts(worker_id)
    script.ask(e.ModelReported, 0, 7, has_metrics=True, callbacks=rules)
    for command in script.told(c.ListShards):
        script.tell(e.ShardsListed(command.kind, (Shard(str(command.kind), 0, script.records),)))
    return script


def work_off(script: Script, values: list[float]) -> list[Lease]:
    """Everything there is; evaluations find these losses, one after the other.  The leases that are no training."""
    others = []
    left = list(values)
    while (lease := script.request(0)) is not None:
        if lease.type is TaskType.EVALUATION:
            results = {"loss": left.pop(0)} if lease.task == 2 else {}
            script.evaluated(lease, **results)
        else:
            script.finish(lease, num_minibatches=-(-len(lease.shard) // 10))
            if lease.type is not TaskType.TRAINING:
                others.append(lease)
    assert script.job.status().phase == "Succeeded", script.job.status()
    return others


def new_life(script: Script) -> None:
    """The next master finds the worker, which holds no lease and all that was committed."""
    script.restart_master()
    pod = e.PodChanged("elasticdl-j-worker-0", Role.WORKER, 0, "elasticdl-j-worker-0/1", PodState.RUNNING)
    script.tell(e.PodsListed((pod,)))
    script.worker_joins(0, applied=script.job._work.tasks.ledger())


def test_with_a_callback_that_watches_a_metric_each_epoch_is_evaluated() -> None:
    script = running({"stopping": [STOP]}, num_epochs=3)
    work_off(script, [3.0, 2.0, 1.0])
    assert [line for line in script.log() if line.startswith("Starting the")] == [
        "Starting the evaluation at step 4: 2 tasks",
        "Starting the evaluation at step 8: 2 tasks",
        "Starting the final evaluation at step 12: 2 tasks",
    ]


def test_without_one_only_the_end_is_evaluated() -> None:
    script = running({}, num_epochs=3)
    work_off(script, [3.0])
    assert sum(line.startswith("Starting the") for line in script.log()) == 1


def test_early_stopping_shortens_the_plan_and_the_job_succeeds() -> None:
    script = running({"stopping": [STOP]}, num_epochs=9)
    work_off(script, [2.0, 2.5, 2.5])
    text = "\n".join(script.log())
    assert "Training stops at step 8: loss has not improved for 1 evaluations (now 2.5, best 2)" in text
    status = script.job.status()
    assert (status.epoch, status.records_done, status.records_total) == (2, 80, 80)


def test_begun_tasks_are_finished_and_the_rest_is_not_planned_any_more() -> None:
    rules = {"stopping": [{**STOP, "patience": 0}]}
    script = running(rules, records=80, num_epochs=9, evaluation_steps=2, num_workers=2)
    held = script.lease(1)
    for value in (1.0, 2.0):
        script.finish(script.lease(0))
        for _ in range(5):
            lease = script.lease(0)
            script.evaluated(lease, **({"loss": value} if lease.task == 4 else {}))
    script.finish(held, 1)
    for _ in range(5):
        lease = script.lease(0)
        script.evaluated(lease, **({"loss": 2.0} if lease.task == 4 else {}))
    assert "Epoch 1: records 80, committed 60, repeated 0, lost 0, unplanned 20" in script.log()
    assert (script.job.status().phase, script.job.status().records_total) == ("Succeeded", 60)


@pytest.mark.parametrize("rules", [{"stopping": [STOP]}, {"calls_epoch_end": True}, {"saving": [SAVE]}], ids=str)
def test_no_epoch_begins_before_the_model_of_the_last_one_has_been_looked_at(rules: dict[str, Any]) -> None:
    script = running(rules, num_epochs=2, num_workers=2)
    held: dict[int, Lease] = {}
    seen = []
    while all(lease.epoch == 0 or lease.type is not TaskType.TRAINING for lease in held.values()):
        if held:
            worker_id, lease = held.popitem()
            if lease.type is TaskType.EVALUATION:
                script.evaluated(lease, worker_id=worker_id, **({"loss": 1.0} if lease.task == 2 else {}))
            else:
                script.finish(lease, worker_id)
        new = {one: lease for one in {0, 1} - held.keys() if (lease := script.request(one)) is not None}
        seen += [lease.type for lease in new.values()]
        held |= new
    num_looks = {TaskType.EVALUATION: 0 if "saving" in rules else 3, TaskType.CALLBACK: int("stopping" not in rules)}
    assert {one: seen.count(one) for one in num_looks} == num_looks
    assert {lease.type for lease in held.values()} == {TaskType.TRAINING}


def test_a_new_life_of_the_master_continues_with_what_was_decided() -> None:
    script = running({"stopping": [STOP]}, num_epochs=9)
    losses = [2.0, 2.5]
    while losses:
        lease = script.lease()
        if lease.type is TaskType.TRAINING:
            script.finish(lease)
        else:
            script.evaluated(lease, **({"loss": losses.pop(0)} if lease.task == 2 else {}))
    new_life(script)
    work_off(script, [2.5])
    assert script.job.status().records_total == 80


def test_a_metric_that_does_not_exist_fails_the_job_by_name() -> None:
    script = running({"stopping": [{**STOP, "metric": "auc"}]}, num_epochs=2)
    while script.job.status().phase == "Running":
        lease = script.lease()
        if lease.type is TaskType.TRAINING:
            script.finish(lease)
        else:
            script.evaluated(lease, **({"loss": 1.0} if lease.task == 2 else {}))
    assert "EarlyStopping monitors 'auc', and the evaluation's metrics are: loss" in script.job.status().message


def test_a_model_is_saved_and_a_hook_called_after_each_epoch_in_order_before_the_export() -> None:
    script = running({"saving": [SAVE], "calls_epoch_end": True}, num_epochs=2, output="/out")
    others = work_off(script, [2.0, 1.0])
    found = [(lease.type, lease.occasion and (lease.occasion.save_to, lease.occasion.epoch)) for lease in others]
    assert found == [
        (TaskType.CALLBACK, ("", 0)),
        (TaskType.CALLBACK, ("m-1", 0)),
        (TaskType.CALLBACK, ("", 1)),
        (TaskType.CALLBACK, ("m-2", 1)),
        (TaskType.TRAIN_END, None),
    ]
    assert others[2].occasion is not None
    assert dict(others[2].occasion.logs) == {"val_loss": 1.0}
    assert "ModelCheckpoint: the model of step 8 is saved to m-2" in script.log()


def test_a_model_that_is_not_saved_is_reported_with_what_to_do() -> None:
    script = running({"saving": [SAVE]}, num_epochs=1)
    while (lease := script.lease()).type is not TaskType.CALLBACK:
        if lease.type is TaskType.TRAINING:
            script.finish(lease)
        else:
            script.evaluated(lease, **({"loss": 1.0} if lease.task == 2 else {}))
    script.finish(lease, not_exported="it needs 5 GB")
    assert "ModelCheckpoint: no model is saved to m-1: it needs 5 GB. Give workers more memory." in script.log()


def test_the_best_model_is_saved_after_the_evaluation_that_found_it() -> None:
    best = {**SAVE, "path": "best-{val_loss:.1f}", "metric": "loss"}
    script = running({"saving": [best]}, num_epochs=3)
    saved = [lease.occasion and lease.occasion.save_to for lease in work_off(script, [2.0, 3.0, 1.0])]
    assert saved == ["best-2.0", "best-1.0"]


def test_the_loss_in_the_name_of_a_model_outlives_the_master() -> None:
    script = running({"saving": [{**SAVE, "path": "m-{epoch}-{loss:.2f}", "metric": "loss"}]})
    for _ in range(2):
        lease = script.lease()
        script.progress(lease, 0, loss=0.5, learning_rate=0.25)
        script.finish(lease)
    assert script.lease().type is TaskType.EVALUATION
    new_life(script)
    status = script.job.status()
    assert (status.loss, status.learning_rate) == (0.5, 0.25)
    (saving,) = work_off(script, [2.0])
    assert saving.occasion is not None
    assert saving.occasion.save_to == "m-1-0.50"


def test_an_occasion_of_a_lost_worker_goes_to_the_next() -> None:
    script = running({"calls_epoch_end": True}, num_epochs=1, has_validation_data=False)
    while (lease := script.lease()).type is TaskType.TRAINING:
        script.finish(lease)
    script.kill(0)
    script.pass_time(3)
    script.worker_starts(1, applied=script.job._work.tasks.ledger())
    again = script.lease(1)
    assert again.occasion == lease.occasion
    script.finish(again, 1)
    assert script.job.status().phase == "Succeeded"


def test_an_occasion_waits_for_its_epoch_if_that_is_open_again() -> None:
    script = running({"calls_epoch_end": True}, num_epochs=1, has_validation_data=False)
    while (lease := script.lease()).type is TaskType.TRAINING:
        script.finish(lease)
    script.kill(0)
    script.pass_time(3)
    script.worker_starts(1, applied=CommittedSet())
    found = []
    while (again := script.request(1)) is not None:
        found.append(again.type)
        script.finish(again, 1)
    assert found == [TaskType.TRAINING, TaskType.TRAINING, TaskType.CALLBACK]


def test_a_lease_of_an_occasion_does_not_come_back_while_its_epoch_is_open_again() -> None:
    script = running({"calls_epoch_end": True}, num_epochs=1, has_validation_data=False)
    while (lease := script.lease()).type is TaskType.TRAINING:
        script.finish(lease)
    script.job._work.reconcile(CommittedSet())  # and the worker does not learn that its lease is lost, before
    script.restart_master()
    pod = e.PodChanged("elasticdl-j-worker-0", Role.WORKER, 0, "elasticdl-j-worker-0/1", PodState.RUNNING)
    script.tell(e.PodsListed((pod,)))
    script.worker_joins(0, (ReportedLease(lease),), applied=CommittedSet())
    found = []
    while (again := script.request(0)) is not None:
        found.append(again.type)
        script.finish(again)
    assert found == [TaskType.TRAINING, TaskType.TRAINING, TaskType.CALLBACK]


def test_an_occasion_that_is_open_outlives_the_master() -> None:
    script = running({"calls_epoch_end": True}, num_epochs=1, has_validation_data=False)
    while script.lease().type is TaskType.TRAINING:
        script.finish(script.job._work.leases.all()[-1])
    new_life(script)
    assert [lease.type for lease in work_off(script, [])] == [TaskType.CALLBACK]


def test_models_are_saved_every_n_steps() -> None:
    often = {**SAVE, "path": "step-{step}", "every_steps": 2}
    script = running({"saving": [often]}, num_epochs=1, has_validation_data=False)
    assert [one.occasion and one.occasion.save_to for one in work_off(script, [])] == ["step-2", "step-4"]


def test_max_steps_of_a_callback_and_of_the_flag_the_smaller_one_counts() -> None:
    for flag, expected in ((0, 30), (2, 20), (9, 30)):
        script = running({"max_steps": 3}, max_step=flag, has_validation_data=False)
        assert script.job.status().records_total == expected


def test_evaluations_by_time_begin_after_their_delay_and_then_every_so_often() -> None:
    script = running({}, records=400, evaluation_start_delay=5.0, evaluation_throttle=3.0)
    started = []
    for second in range(14):
        lease = script.lease()
        if lease.type is TaskType.TRAINING:
            script.progress(lease, 0)
        while lease.type is TaskType.EVALUATION:
            script.evaluated(lease, **({"loss": 1.0} if lease.task == 20 else {}))
            lease = script.lease()
        script.finish(lease)
        before = len(script.log())
        script.pass_time(1, alive=(0,))
        started += [second + 1 for line in script.log()[before:] if line.startswith("Starting the evaluation")]
    assert started == [5, 8, 11, 14]
