"""Bad records are set aside before any minibatch of their task is in the model, for this and later epochs."""

from __future__ import annotations

from core_script import Like, Script, everything, running

from elasticdl.master.core import commands as c
from elasticdl.master.core.values import Array, Lease, MetricArrays


def train_with_a_bad_record(script: Script) -> list[Lease]:
    """One worker works off whatever it gets and reports record 17 when it meets it; the leases that it finished."""
    finished = []
    while (lease := script.request()) is not None:
        meets_it = lease.shard.start <= 17 < lease.shard.end and 17 not in lease.excluded
        if meets_it:
            script.fail(lease, bad=(17,))
        else:
            script.finish(lease)
            finished.append(lease)
    return finished


def test_a_bad_record_is_excluded_from_its_task_in_this_and_later_epochs() -> None:
    script = running(num_epochs=2, max_bad_records=1)
    finished = train_with_a_bad_record(script)
    assert [lease.excluded for lease in finished if lease.shard.start == 0] == [(17,), (17,)]
    assert [lease.excluded for lease in finished if lease.shard.start != 0] == [(), ()]


def test_coverage_counts_the_quarantined_and_loses_nothing() -> None:
    script = running(num_epochs=2, max_bad_records=1)
    train_with_a_bad_record(script)
    script.sets_are_read(everything(script, 2))
    for line in (f"Epoch {n}: records 40, committed 39, repeated 0, lost 0, quarantined 1" for n in (1, 2)):
        assert line in script.log()
    assert "Quarantined records: training:17" in script.log()
    assert not [one for one in script.history if isinstance(one, c.EndJob) and one.exit_code]


def test_a_quarantine_is_journalled_before_it_is_answered_and_is_no_failure_of_the_task() -> None:
    script = running(max_bad_records=1, max_task_failures=1)
    lease = script.lease()
    script.fail(lease, bad=(lease.shard.start,))
    assert script.commands[:1] == [Like(c.Persist)]
    script.restart_master()
    assert script.job._work.tasks.quarantined() == [(lease.shard.name, lease.shard.start)]


def evaluated_with_a_bad_record(script: Script) -> list[Lease]:
    """One worker works off a round, and reports record 3 of the validation data when it meets it."""
    finished = []
    while not (lease := script.lease()).merged:
        if lease.shard.start <= 3 < lease.shard.end and 3 not in lease.excluded:
            script.fail(lease, bad=(3,))
        else:
            script.evaluated(lease, MetricArrays("accuracy", (Array((1,), bytes(8)),)))
            finished.append(lease)
    script.evaluated(lease, accuracy=0.5)
    return finished


def test_a_bad_record_of_the_validation_data_is_set_aside_in_all_evaluations() -> None:
    script = running(has_validation_data=True, max_bad_records=1, max_task_failures=1, evaluation_steps=2)
    rounds = []
    for _ in range(2):
        script.finish(script.lease())
        rounds.append(evaluated_with_a_bad_record(script))
    assert [[(lease.shard.start, lease.excluded) for lease in done] for done in rounds] == 2 * [[(0, (3,)), (20, ())]]
    script.restart_master()
    assert script.job._work.evaluations.quarantined() == [("validation", 3)]


def test_records_that_are_set_aside_are_counted_once_in_both_kinds_of_data() -> None:
    script = running(has_validation_data=True, max_bad_records=1, max_task_failures=1)
    train_with_a_bad_record(script)
    script.sets_are_read(everything(script))
    lease = script.lease()
    assert lease.shard.name == "validation"
    script.fail(lease, error="ValueError: bad", bad=(lease.shard.start,))
    assert script.job.status().phase == "Failed"


def test_one_bad_record_too_many_is_a_failure_of_the_task() -> None:
    script = running(max_bad_records=1, max_task_failures=1)
    lease = script.lease()
    script.fail(lease, error="ValueError: bad", bad=(lease.shard.start, lease.shard.start + 1))
    assert script.job.status().phase == "Failed"
    assert "ValueError: bad" in script.job.status().message


def test_a_task_that_the_model_holds_in_part_stays_as_it_is() -> None:
    script = running(max_bad_records=5)
    lease = script.lease()
    script.progress(lease, 0)
    script.fail(lease, bad=(lease.shard.start,))
    again = script.lease()
    assert (again.task, again.excluded) == (lease.task, ())


def test_a_record_that_cannot_be_set_aside_is_a_failure_of_the_task() -> None:
    script = running(max_bad_records=5, max_task_failures=1)
    lease = script.lease()
    script.progress(lease, 0)
    script.fail(lease, bad=(lease.shard.start,))
    assert script.job.status().phase == "Failed"
