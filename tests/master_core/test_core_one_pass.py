"""Jobs that go over their data once with a trained model: evaluate, predict."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from core_script import Script, running

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.values import Array, Lease, MetricArrays, ReportedLease, TaskType
from elasticdl.protocol import Shard


def evaluating(num_workers: int = 1, **settings: Any) -> Script:
    flags = {"has_training_data": False, "has_validation_data": True, "verb": "evaluated", "model_version": 24}
    return running(num_workers, **(flags | settings))


def predicting(num_workers: int = 1, **settings: Any) -> Script:
    flags = {"has_training_data": False, "has_prediction_data": True, "verb": "predicted", "has_last_task": True}
    return running(num_workers, **(flags | settings))


def counted(lease: Lease) -> MetricArrays:
    """A state that says which records were evaluated: one number a record."""
    numbers = [float(lease.shard.start <= record < lease.shard.end) for record in range(80)]
    return MetricArrays("count", (Array((80,), array("d", numbers).tobytes()),))


def seen(lease: Lease) -> list[float]:
    """Return the numbers merged into a lease for the results."""
    numbers = array("d")
    numbers.frombytes(lease.merged[0].arrays[0].data)
    return list(numbers)


def test_tasks_come_in_the_order_of_the_data() -> None:
    script = predicting(records=160)
    starts = []
    for _ in range(8):
        lease = script.lease()
        starts.append(lease.shard.start)
        script.finish(lease)
    assert starts == [0, 20, 40, 60, 80, 100, 120, 140]


def test_each_record_is_evaluated_once_though_a_worker_and_the_master_are_lost() -> None:
    script = evaluating(2, records=80)
    first = script.lease(0)
    script.lease(1)
    script.evaluated(first, counted(first), worker_id=0)
    script.kill(1)
    script.worker_starts(2)
    script.restart_master()
    script.worker_joins(0)
    script.worker_joins(2)
    script.ps_joins(0, held=1)
    script.pass_time(11, alive=(0, 2))
    leases = []
    while not (lease := script.lease(0)).merged:
        leases.append(lease)
        script.evaluated(lease, counted(lease), worker_id=0)
    assert sorted(one.task for one in leases) == [1, 2, 3]
    assert seen(lease) == [1.0] * 80
    assert lease.model_version == 24
    script.evaluated(lease, worker_id=0, count=80.0)
    assert "evaluation: records 80, evaluated 80, repeated 0, lost 0" in script.log()
    assert "Evaluation metrics[step=24]: {'count': 80.0}" in script.log()
    assert script.job.status().phase == "Succeeded"


def test_a_lease_that_a_worker_brings_to_the_next_life_of_the_master_counts() -> None:
    script = evaluating(records=40)
    lease = script.lease()
    script.restart_master()
    script.worker_joins(0, (ReportedLease(lease),))
    script.ps_joins(0, held=1)
    assert script.evaluated(lease, counted(lease)) == c.Accepted(24)
    other = script.lease()
    assert other.task != lease.task
    script.evaluated(other, counted(other))
    assert seen(script.lease())[:40] == [1.0] * 40


def test_states_too_large_for_the_journal_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticdl.master.core.plan.evaluation.MAX_SAVED_BYTES", 100)
    script = evaluating(records=40)
    lease = script.lease()
    script.evaluated(lease, counted(lease))
    script.restart_master()
    script.worker_joins(0)
    script.ps_joins(0, held=1)
    while not (lease := script.lease()).merged:
        script.evaluated(lease, counted(lease))
    assert seen(lease)[:40] == [1.0] * 40


def test_a_restart_between_the_last_task_and_the_results_loses_neither() -> None:
    script = evaluating(records=40)
    for _ in range(2):
        lease = script.lease()
        script.evaluated(lease, counted(lease))
    assert script.lease().merged
    script.restart_master()
    script.worker_joins(0)
    script.ps_joins(0, held=1)
    last = script.lease()
    assert seen(last)[:40] == [1.0] * 40
    script.evaluated(last, count=40.0)
    assert script.job.status().metrics == {"count": 40.0}
    script.restart_master()
    assert script.job.status().metrics == {"count": 40.0}


def test_a_bad_record_is_set_aside_and_told() -> None:
    script = evaluating(records=40, max_bad_records=1)
    lease = script.lease()
    script.fail(lease, bad=(lease.shard.start + 3,))
    again = script.lease()
    assert again.excluded == (lease.shard.start + 3,)
    for one in (again, script.lease()):
        script.evaluated(one, counted(one))
    script.evaluated(script.lease(), count=39.0)
    assert "evaluation: records 40, evaluated 39, repeated 0, lost 0, quarantined 1" in script.log()


def test_the_last_task_comes_when_all_is_predicted_and_once() -> None:
    script = predicting(2, records=40)
    first, second = script.lease(0), script.lease(1)
    script.finish(first, 0)
    assert script.request(0) is None
    script.finish(second, 1)
    last = script.lease(0)
    assert last.type is TaskType.TRAIN_END
    assert script.request(1) is None
    script.kill(0)
    last = script.lease(1)
    assert (last.type, len(last.shard)) == (TaskType.TRAIN_END, 40)
    script.finish(last, 1, 0)
    assert "prediction: records 40, predicted 40, repeated 0, lost 0" in script.log()
    assert script.job.status().phase == "Succeeded"


def test_a_job_without_a_last_task_ends_with_its_data() -> None:
    script = predicting(has_last_task=False, records=20)
    script.finish(script.lease())
    assert script.job.status().phase == "Succeeded"


def test_nothing_to_evaluate_fails_the_job() -> None:
    script = Script(has_training_data=False, has_validation_data=True)
    script.ps_starts()
    script.worker_starts()
    script.ask(e.ModelReported, 0, 7)
    script.tell(e.ShardsListed("validation", (Shard("a", 0, 10),)))
    assert script.job.status().phase == "Failed"
    assert "eval_metrics_fn() names none" in script.job.status().message
