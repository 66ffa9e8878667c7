"""Minibatches whose loss or gradient is not finite: they end the job, or are left out and counted exactly."""

from __future__ import annotations

import math

from core_script import Like, Script, everything, running

from elasticdl.master.core import commands as c
from elasticdl_client.choices import DistributionStrategy, NanPolicy


def skipping(num_workers: int = 1, **settings: object) -> Script:
    return running(num_workers, nan_policy=NanPolicy.SKIP, **settings)


def finish_all(script: Script) -> None:
    while (lease := script.request()) is not None:
        script.finish(lease)


def coverage(script: Script) -> list[str]:
    return [line for line in script.log() if line.startswith("Epoch ") and "records" in line]


def test_a_gradient_that_is_not_finite_fails_the_job_and_says_what_and_where() -> None:
    script = running()
    lease = script.lease()
    script.progress(lease, 0, loss=1.0)
    script.progress(lease, skipped=(1,), not_finite="The gradient of dense/kernel is not finite")
    status = script.job.status()
    assert status.phase == "Failed"
    where = f"epoch 1, task {lease.task}, minibatch 1, records training:{lease.shard.start}-{lease.shard.end - 1}"
    assert f"The gradient of dense/kernel is not finite ({where})" in status.message
    assert "--nan_policy=skip" in status.message


def test_a_loss_that_is_not_finite_fails_the_job_too() -> None:
    script = running()
    script.progress(script.lease(), 0, loss=math.nan)
    assert "The loss is nan (epoch 1" in script.job.status().message
    assert script.job.status().loss is None


def test_a_skipped_minibatch_is_written_down_before_the_worker_may_leave_it_out() -> None:
    script = skipping()
    lease = script.lease()
    script.progress(lease, skipped=(0,), not_finite="The loss is nan")
    kinds = [type(command) for command in script.commands]
    assert kinds.index(c.Persist) < kinds.index(c.Reply)
    assert script.job.status().records_skipped == 0  # it is not in the model yet
    script.progress(lease, 0)
    assert script.job.status().records_skipped == 10
    assert script.told(c.Persist) == []


def test_the_records_of_skipped_minibatches_are_skipped_not_committed() -> None:
    script = skipping(num_epochs=2)
    lease = script.lease()
    script.skip(lease, 1)
    script.finish(lease)
    script.finish(script.lease())
    script.sets_are_read(everything(script), num_applies=4)
    finish_all(script)
    script.sets_are_read(everything(script, 2), num_applies=8)
    assert coverage(script) == [
        "Epoch 1: records 40, committed 30, repeated 0, lost 0, skipped 10",
        "Epoch 2: records 40, committed 40, repeated 0, lost 0",
    ]
    assert "Minibatches left out by --nan_policy=skip: 1 (10 records)" in script.log()
    status = script.job.status()
    assert (status.phase, status.records_done, status.records_skipped, status.model_version) == ("Succeeded", 80, 10, 8)
    assert [one.skipped for one in status.coverage] == [10, 0]


def test_minibatches_that_only_the_model_knows_to_be_left_out_are_skipped_too() -> None:
    script = skipping(num_ps=2)
    while (lease := script.request()) is not None:
        script.finish(lease)
    script.sets_are_read(everything(script), num_applies=4, skipped={(0, 1): frozenset({0})})
    assert coverage(script) == ["Epoch 1: records 40, committed 30, repeated 0, lost 0, skipped 10"]


def test_the_last_minibatch_of_a_task_counts_with_the_records_that_it_has() -> None:
    script = skipping(records=33)
    while (lease := script.request()) is not None:
        if lease.shard.start == 20:
            script.skip(lease, 1)
        script.finish(lease)
    script.sets_are_read(everything(script), num_applies=4)
    assert coverage(script) == ["Epoch 1: records 33, committed 30, repeated 0, lost 0, skipped 3"]


def test_skipped_minibatches_survive_the_master() -> None:
    script = skipping()
    lease = script.lease()
    script.progress(lease, skipped=(0, 1), not_finite="The loss is nan")
    script.restart_master()
    script.ps_joins(held=1)
    script.worker_joins(0)  # its reports of progress were lost
    script.sets_are_read({(0, lease.task): range(2)})
    assert script.job.status().records_skipped == 20
    finish_all(script)
    script.sets_are_read(everything(script), num_applies=4)
    assert coverage(script) == ["Epoch 1: records 40, committed 20, repeated 0, lost 0, skipped 20"]


def test_what_a_lost_server_had_skipped_is_computed_again_and_may_count() -> None:
    script = skipping()
    first = script.lease()
    script.skip(first, 0)
    script.ps_dies()
    script.pass_time(1, alive=(0,))
    script.ps_starts(life=2)
    script.sets_are_read({})
    assert script.job.status().records_skipped == 0
    finish_all(script)
    script.sets_are_read(everything(script), num_applies=4)
    assert coverage(script) == ["Epoch 1: records 40, committed 40, repeated 0, lost 0"]


def test_a_repeated_report_is_counted_once_and_one_under_a_lost_lease_is_refused() -> None:
    script = skipping()
    lease = script.lease()
    script.skip(lease, 0)
    script.skip(lease, 0)
    assert script.job.status().records_skipped == 10
    assert sum("it is left out" in line for line in script.log()) == 1
    script.pass_time(12, alive=(0,))
    assert script.skip(lease, 1) == Like(c.Refused)
    assert script.job.status().records_skipped == 10


def test_of_very_many_skipped_minibatches_only_some_are_reported() -> None:
    script = skipping(records=4000, num_minibatches_per_task=400)
    lease = script.lease()
    for n in range(400):
        script.skip(lease, n)
    told = [line for line in script.log() if "it is left out" in line]
    assert len(told) == 39
    assert told[-1].endswith("number 400")


def test_the_local_strategy_skips_too() -> None:
    script = skipping(num_ps=0, strategy=DistributionStrategy.LOCAL)
    lease = script.lease()
    script.skip(lease, 0)
    script.finish(lease)
    finish_all(script)
    assert coverage(script) == ["Epoch 1: records 40, committed 30, repeated 0, lost 0, skipped 10"]
