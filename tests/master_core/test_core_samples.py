"""Samples that `feed` makes of records: omitted and added ones are counted, exactly and for good."""

from __future__ import annotations

import copy
from array import array

from core_script import Script, everything, running

from elasticdl.master.core.job import Job
from elasticdl.master.core.values import Array, MetricArrays
from elasticdl.master.pod_specs import to_job_status
from elasticdl_client.choices import DistributionStrategy, NanPolicy

STATE = MetricArrays("accuracy", (Array((1,), array("d", [1.0]).tobytes()),))


def coverage(script: Script) -> list[str]:
    return [line for line in script.log() if line.startswith(("Epoch 1: ", "evaluation: "))]


def warnings(script: Script) -> list[str]:
    return [line for line in script.log() if line.startswith("feed")]


def test_records_without_a_sample_are_filtered_and_not_committed() -> None:
    script = running()
    script.finish(script.lease(), num_minibatches=1, surplus=-15, made_by="take")
    script.finish(script.lease(), num_minibatches=0, surplus=-20, made_by="take")
    script.sets_are_read({(0, 0): (0,)})
    assert coverage(script) == ["Epoch 1: records 40, committed 5, repeated 0, lost 0, filtered 35"]
    assert script.job.status().records_done == 40


def test_samples_beyond_one_a_record_are_augmented() -> None:
    script = running()
    script.finish(script.lease(), num_minibatches=4, surplus=20)
    script.finish(script.lease(), num_minibatches=2)
    script.sets_are_read({(0, 0): range(4), (0, 1): range(4)})
    assert coverage(script) == ["Epoch 1: records 40, committed 40, repeated 0, lost 0, augmented 20"]


def test_one_task_may_filter_and_another_augment() -> None:
    script = running()
    script.finish(script.lease(), num_minibatches=3, surplus=3)
    script.finish(script.lease(), num_minibatches=2, surplus=-4)
    script.sets_are_read({(0, 0): range(3), (0, 1): range(3)})
    line = "records 40, committed 36, repeated 0, lost 0, filtered 4, augmented 3"
    assert coverage(script) == [f"Epoch 1: {line}"]
    (shown,) = to_job_status(script.job.status(), 0.0).coverage
    assert (str(shown), shown.filtered, shown.augmented) == (line, 4, 3)


def test_it_is_said_once_with_the_operation_that_makes_it_over_lives_of_the_master_too() -> None:
    script = running(num_epochs=2, strategy=DistributionStrategy.LOCAL, num_ps=0)
    script.finish(script.lease(), num_minibatches=1, surplus=-15, made_by="take")
    (line,) = warnings(script)
    assert line.startswith("feed (take in it) makes 5 samples of the 20 records of training:")
    assert "--strict_feed" in line
    script.restart_master()
    script.worker_joins(0)
    script.finish(script.lease(), num_minibatches=1, surplus=-15, made_by="take")
    assert len(warnings(script)) == 1


def test_a_feed_that_makes_one_sample_a_record_is_not_spoken_of() -> None:
    script = running()
    while (lease := script.request()) is not None:
        script.finish(lease)
    script.sets_are_read(everything(script))
    assert coverage(script) == ["Epoch 1: records 40, committed 40, repeated 0, lost 0"]
    assert warnings(script) == []


def test_a_task_that_the_model_has_lost_is_counted_by_its_next_end() -> None:
    script = running()
    first, second = script.lease(), script.lease()
    script.finish(first, num_minibatches=2, surplus=-3)
    script.finish(second, num_minibatches=2, surplus=-4)
    script.sets_are_read({(0, second.task): range(2)})  # a server has come back with less
    assert script.job._work.tasks.epochs[0].num_filtered == 4
    script.finish(script.lease(), num_minibatches=2, surplus=-3)
    script.sets_are_read(everything(script))
    assert coverage(script)[-1] == "Epoch 1: records 40, committed 33, repeated 0, lost 0, filtered 7"


def test_the_counts_survive_the_master() -> None:
    script = running(strategy=DistributionStrategy.LOCAL, num_ps=0)
    script.finish(script.lease(), num_minibatches=5, surplus=30)
    script.restart_master()
    script.worker_joins(0)
    script.finish(script.lease(), num_minibatches=0, surplus=-20)
    line = "Epoch 1: records 40, committed 20, repeated 0, lost 0, filtered 20, augmented 30"
    assert coverage(script) == [line]


def test_a_journal_without_these_counts_is_read() -> None:
    script = running()
    script.finish(script.lease())
    old = copy.deepcopy(script.job.snapshot())
    for epoch in old["tasks"]["epochs"]:
        del epoch["surpluses"]
    job = Job.restore(script.settings, old, 2, script.now)
    job.validate_state()
    assert job.status().records_done == 20


def test_what_is_skipped_and_what_is_filtered_are_different_records() -> None:
    script = running(nan_policy=NanPolicy.SKIP)
    first = script.lease()
    script.skip(first, 0)
    script.finish(first, num_minibatches=1, surplus=-15)
    second = script.lease()
    script.skip(second, 0, 1, 2)
    script.finish(second, num_minibatches=4, surplus=20)
    script.sets_are_read({(0, first.task): (0,), (0, second.task): range(4)})
    # Of the second task 30 of 40 samples are skipped: they cannot be more records than it has.
    assert coverage(script) == [
        "Epoch 1: records 40, committed 0, repeated 0, lost 0, skipped 25, filtered 15, augmented 20"
    ]


def test_a_count_below_every_record_is_every_record() -> None:
    script = running()
    script.finish(script.lease(), num_minibatches=0, surplus=-1000)
    assert script.job._work.tasks.epochs[0].num_filtered == 20


def test_an_evaluation_says_how_many_samples_it_has_measured() -> None:
    script = running(has_validation_data=True)
    while (lease := script.request()) is not None:
        script.finish(lease)
    script.sets_are_read(everything(script))
    script.evaluated(script.lease(), STATE, surplus=-7)
    script.evaluated(script.lease(), STATE, surplus=-1)
    script.evaluated(script.lease(), accuracy=0.5)
    assert "Evaluation[step=4] measured the 32 samples that feed (its filter) makes of 40 records" in script.log()


def test_an_evaluate_job_has_them_in_its_coverage() -> None:
    script = running(has_training_data=False, has_validation_data=True, verb="evaluated")
    script.evaluated(script.lease(), STATE, surplus=-7)
    script.evaluated(script.lease(), STATE)
    assert coverage(script) == ["evaluation: records 40, evaluated 33, repeated 0, lost 0, filtered 7"]
    assert len(warnings(script)) == 1
