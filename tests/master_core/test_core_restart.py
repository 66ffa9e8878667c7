"""The master dies and lives again; and the Local strategy, whose ledger comes with its worker."""

from __future__ import annotations

import dataclasses
import json

import pytest
from core_script import Like, Script, applied, everything, running, train_all

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.ledger.leases import MAX_UNWRITTEN
from elasticdl.master.core.plan.tasks import MAX_UNKNOWN_EPOCHS
from elasticdl.master.core.values import PodState, ReportedLease
from elasticdl.protocol import Role, Shard
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.job_events import EventKind


def back(script: Script, *worker_ids: int) -> None:
    """The next master finds its pods; the PS comes back under its incarnation."""
    script.restart_master()
    pods = [e.PodChanged("elasticdl-j-ps-0", Role.PS, 0, "elasticdl-j-ps-0/1", PodState.RUNNING)]
    for worker_id in worker_ids:
        name = f"elasticdl-j-worker-{worker_id}"
        pods.append(e.PodChanged(name, Role.WORKER, worker_id, f"{name}/1", PodState.RUNNING))
    script.tell(e.PodsListed(tuple(pods)))
    if script.settings.num_ps:
        script.ps_joins(held=1)


def test_a_snapshot_is_json() -> None:
    script = running(2, has_validation_data=True, evaluation_steps=2, records=80)
    script.finish(script.lease())
    script.lease()
    script.fail(script.lease(1), 1)
    assert json.loads(json.dumps(script.job.snapshot())) == json.loads(json.dumps(script.job.snapshot()))


def test_a_restarted_master_adopts_pods_leases_and_progress() -> None:
    script = running(2)
    lease, other = script.lease(0), script.lease(1)
    script.progress(lease, 0)
    back(script, 0, 1)
    assert script.told(c.CreatePod) == []
    assert not script.heartbeat(0, (lease.id,)).known
    script.worker_joins(0, (ReportedLease(lease, (0, 1)),))
    script.worker_joins(1, (ReportedLease(other),))
    assert script.last(c.ReadAppliedSets)
    script.sets_are_read({(0, lease.task): range(2)})
    assert script.finish(lease) == c.Accepted(2)
    assert script.finish(other, 1) == c.Accepted(4)


def test_servers_that_outlive_the_master_are_waited_for_by_that_name() -> None:
    script = running(2)
    script.restart_master()
    message = script.job.status().message
    assert message == "the master has restarted: waiting for parameter servers to register again: 0 of 1 have"
    script.tell(e.PodsListed(()))
    assert script.job.status().message == "waiting for parameter servers: 0 of 1 are ready, 1 is lost"


def test_workers_that_outlive_the_master_are_waited_for_by_that_name() -> None:
    script = running(2)
    script.lease(0)
    back(script, 0, 1)
    assert script.job.status().message == "the master has restarted: waiting for workers to register again"
    script.worker_joins(0)
    assert script.job.status().message == "the master has restarted: waiting for workers to register again"
    script.worker_joins(1)
    assert script.job.status().message == ""


def test_a_failure_under_a_lease_that_has_outlived_the_master_names_its_records() -> None:
    script = running(2)
    lease = script.lease(0)
    back(script, 0, 1)
    for worker_id in (0, 1):
        script.worker_joins(worker_id, (ReportedLease(lease),) if worker_id == 0 else ())
    script.sets_are_read({})
    script.fail(lease)
    failed = next(one for one in script.job.events.events if one.kind is EventKind.TASK_FAILED)
    assert failed.details["records"] == f"training:{lease.shard.start}-{lease.shard.end}"


def test_records_of_an_evaluation_under_a_lease_that_has_outlived_the_master_are_counted() -> None:
    script = running(has_validation_data=True, evaluation_steps=1)
    training = script.lease()
    script.progress(training, 0)
    lease = script.lease()
    back(script, 0)
    script.worker_joins(0, (ReportedLease(training, (0,)), ReportedLease(lease)))
    script.sets_are_read({(0, training.task): range(1)})
    script.evaluated(lease, surplus=-5)
    current = script.job._work.evaluations.current
    assert current is not None
    assert (current.num_records, current.num_samples) == (20, 15)


def test_nothing_is_handed_out_until_the_holders_are_back_or_their_leases_have_run_out() -> None:
    script = running(2)
    lease = script.lease(0)
    back(script, 0, 1)
    script.worker_joins(1)
    assert script.request(1) is None
    assert script.told(c.ReadAppliedSets) == []
    script.pass_time(12, alive=(1,))
    script.sets_are_read({})
    assert script.last(c.Reply).answer == Like(c.LeaseGranted)
    assert script.last(c.Reply).answer.lease.task == lease.task
    assert script.last(c.Reply).answer.lease.id > (2 << 32)


def test_a_worker_that_died_with_the_master_is_replaced() -> None:
    script = running(2)
    script.lease(0)
    back(script, 1)
    assert script.told(c.CreatePod) == []
    assert any(line.startswith("Relaunch the worker: elasticdl-j-worker-0") for line in script.log())
    script.pass_time(1)
    assert [one.index for one in script.history if isinstance(one, c.CreatePod) if one.role is Role.WORKER][-1] == 2


def test_of_two_leases_for_one_task_the_newer_one_is_adopted() -> None:
    script = running(2)
    old = script.lease(0)
    snapshot = script.job.snapshot()
    script.pass_time(12, alive=(1,))
    new = script.lease(1)
    assert new.task == old.task
    script.job.snapshot = lambda: snapshot  # the one on disk is older
    back(script, 0, 1)
    script.worker_joins(0, (ReportedLease(old),))
    script.worker_joins(1, (ReportedLease(new),))
    assert script.heartbeat(0, (old.id,)).revoked == (old.id,)
    assert script.heartbeat(1, (new.id,)).revoked == ()


def test_what_the_snapshot_missed_is_found_in_the_applied_sets() -> None:
    script = running(num_epochs=2)
    snapshot = script.job.snapshot()
    lease = script.lease()
    script.finish(lease)
    script.job.snapshot = lambda: snapshot
    back(script, 0)
    script.worker_joins(0)
    script.sets_are_read({(0, lease.task): range(2), (1, 0): (0,)})
    assert script.job.status().model_version == 3
    assert script.job.status().epoch == 2
    again = script.lease()
    assert again.epoch == 0


def test_what_the_snapshot_calls_done_and_the_sets_lack_is_handed_out_again() -> None:
    script = running()
    lease = script.lease()
    script.finish(lease)
    back(script, 0)
    script.worker_joins(0)
    script.sets_are_read({(0, lease.task): (0,)})
    assert script.lease().task == lease.task


def test_a_lease_that_was_revoked_because_a_ps_was_lost_is_never_adopted() -> None:
    script = running()
    lease = script.lease()
    script.ps_dies()
    script.ps_starts(life=2)
    script.restart_master()
    script.worker_joins(0, (ReportedLease(lease, (0, 1)),))
    assert script.heartbeat(0, (lease.id,)).revoked == (lease.id,)


def test_the_journal_is_written_for_a_ps_that_is_new_and_not_for_one_that_comes_back() -> None:
    script = Script()
    script.ps_joins()
    assert script.told(c.Persist)
    back(script)
    assert script.told(c.Persist) == []
    script.ps_joins(life=2)
    assert script.told(c.Persist)


def test_a_ps_that_is_not_back_yet_is_waited_for() -> None:
    script = running()
    script.restart_master()
    assert not script.ask(e.HeartbeatReceived, Role.PS, 0, 1).known
    assert script.worker_joins(0) == c.Registered(None)
    script.ps_joins(held=1)
    assert script.told(c.ReadAppliedSets) == [Like(c.ReadAppliedSets)]
    assert script.heartbeat(0).partition.version >= 2 << 32


def test_failures_are_remembered() -> None:
    script = running(records=20)
    script.fail(script.lease())
    script.fail(script.lease())
    back(script, 0)
    script.worker_joins(0)
    script.sets_are_read({})
    script.fail(script.lease())
    assert script.job.status().phase == "Failed"


def test_a_question_that_fails_is_asked_again() -> None:
    script = running()
    leases = [script.lease(), script.lease()]
    for lease in leases:
        script.finish(lease)
    question = script.last(c.ReadAppliedSets)
    script.tell(e.AppliedSetsUnreadable(question.question, "no answer"))
    assert script.told(c.ReadAppliedSets) == []
    script.pass_time(2, alive=(0,))
    assert script.last(c.ReadAppliedSets).question > question.question
    script.sets_are_read(everything(script))
    assert script.job.status().phase == "Succeeded"


def test_a_lost_server_is_named_beside_those_that_have_to_register_again() -> None:
    script = Script(num_ps=3)
    for ps_id in range(3):
        script.ps_starts(ps_id)
    script.restart_master()
    running_pods = [
        e.PodChanged(f"elasticdl-j-ps-{n}", Role.PS, n, f"elasticdl-j-ps-{n}/1", PodState.RUNNING) for n in range(3)
    ]
    script.tell(e.PodsListed(tuple(running_pods)))
    script.ps_dies(1)
    message = "waiting for parameter servers: 0 of 3 are ready, 1 is lost, 2 have to register again"
    assert script.job.status().message == message
    script.ps_joins(0, held=1)
    message = "waiting for parameter servers: 1 of 3 are ready, 1 is lost, 1 has to register again"
    assert script.job.status().message == message
    script.ps_joins(2, held=1)
    assert script.job.status().message == "waiting for parameter servers: 2 of 3 are ready, 1 is lost"


def test_a_master_that_dies_while_the_job_ends_ends_it_in_its_next_life() -> None:
    script = running()
    train_all(script)
    back(script, 0)
    script.pass_time(31)
    assert script.last(c.EndJob) == c.EndJob(0)


def test_a_local_worker_brings_its_ledger_and_the_rest_is_opened_again() -> None:
    script = running(num_ps=0, strategy=DistributionStrategy.LOCAL, records=80)
    done = [script.lease(), script.lease()]
    for lease in done:
        script.finish(lease)
    script.kill(0)
    script.worker_starts(1, applied=applied({(0, done[0].task): range(2)}))
    assert script.lease(1).task == done[1].task
    assert script.job.status().records_done == 20


def test_a_local_worker_without_a_ledger_as_yet_opens_nothing_again() -> None:
    script = running(num_ps=0, strategy=DistributionStrategy.LOCAL, records=80)
    done = [script.lease(), script.lease()]
    for lease in done:
        script.finish(lease)
    script.kill(0)
    script.worker_starts(1)
    assert script.job.status().records_done == 40
    script.worker_joins(1, applied=applied({(0, done[0].task): range(2)}))
    assert script.job.status().records_done == 20
    assert [line for line in script.log() if "the model has lost" in line] == [
        "Epoch 1 is open again: the model has lost 20 records of 1 tasks, which are computed again"
    ]
    script.progress(script.lease(1), 0, worker_id=1)
    script.worker_joins(1, applied=applied({(0, done[0].task): range(2)}))  # made before that report
    assert script.job.status().records_done == 30


def test_a_local_worker_brings_its_ledger_before_the_data_is_known() -> None:
    script = Script(num_ps=0, strategy=DistributionStrategy.LOCAL, records=80)
    script.worker_starts()
    script.worker_joins(
        0, applied=applied({(0, 1): range(2)}), restored_from="checkpoints/version-2", restored_records=80
    )
    script.data_is_known()
    assert script.job.status().records_done == 20


def test_a_ledger_brought_in_the_life_before_does_not_undo_what_came_after_it() -> None:
    script = running(num_ps=0, strategy=DistributionStrategy.LOCAL, records=80)
    script.worker_joins(0, applied=applied({}))
    lease = script.lease()
    script.progress(lease, 0)
    back(script, 0)
    script.worker_joins(0, (ReportedLease(lease),), applied=applied({}))
    assert script.job.status().model_version == 1


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_ledger_of_other_data_is_refused_before_it_counts(is_planned: bool) -> None:
    if is_planned:
        script = running(num_ps=0, strategy=DistributionStrategy.LOCAL)
    else:
        script = Script(num_ps=0, strategy=DistributionStrategy.LOCAL)
        script.worker_starts()
    brought = applied({(0, 1): range(2)})
    script.worker_joins(0, applied=brought, restored_from="checkpoints/version-2", restored_records=30)
    if not is_planned:
        script.data_is_known()
    assert script.job.status().records_done == 0
    assert script.request() is None
    script.pod(Role.WORKER, 0, PodState.SUCCEEDED)
    script.pass_time(31)
    message = script.last(c.EndJob).message
    assert "checkpoints/version-2" in message
    assert "30 records, not 40" in message


def test_a_local_worker_survives_the_masters_restart_with_all_it_has_done() -> None:
    script = running(num_ps=0, strategy=DistributionStrategy.LOCAL)
    snapshot = script.job.snapshot()
    lease = script.lease()
    script.progress(lease, 0)
    script.job.snapshot = lambda: snapshot
    script.restart_master()
    script.tell(e.PodsListed((e.PodChanged("elasticdl-j-worker-0", Role.WORKER, 0, "u", PodState.RUNNING),)))
    script.worker_joins(0, (ReportedLease(lease, (0,)),), applied=applied({(0, lease.task): (0,)}))
    assert script.job.status().model_version == 1
    script.finish(lease)
    script.finish(script.lease())
    assert "Epoch 1: records 40, committed 40, repeated 0, lost 0" in script.log()


def test_a_held_lease_that_no_life_of_this_master_can_have_granted_is_not_adopted() -> None:
    script = running(2)
    lease = script.lease(0)
    back(script, 0, 1)
    for number in ((2 << 32) + 1, 1 << 62):
        invented = dataclasses.replace(lease, id=number)
        script.worker_joins(1, (ReportedLease(invented),))
        assert script.job._work.leases.of_worker(1) == []
    script.worker_joins(0, (ReportedLease(lease),))
    script.sets_are_read({})
    assert script.finish(lease) == c.Accepted(2)


def test_a_held_lease_beyond_what_the_journal_can_lack_is_not_adopted() -> None:
    script = running(2)
    lease = script.lease(0)
    assert script.ask(e.HeartbeatReceived, Role.PS, 0, 1).newest_lease == lease.id
    back(script, 0, 1)
    assert script.ask(e.HeartbeatReceived, Role.PS, 0, 1).newest_lease == 2 << 32
    script.worker_joins(1, (ReportedLease(dataclasses.replace(lease, id=lease.id + MAX_UNWRITTEN + 1)),))
    assert script.job._work.leases.of_worker(1) == []
    script.worker_joins(0, (ReportedLease(lease),))
    script.sets_are_read({})
    assert script.finish(lease) == c.Accepted(2)


def test_a_lease_of_a_life_that_wrote_no_journal_is_adopted() -> None:
    script = running(2, records=80)
    script.lease(0)
    back(script, 0, 1)
    before = script.job.snapshot()
    back(script, 0, 1)  # the second life has granted something, of which nothing is written down
    script.job.snapshot = lambda: before
    lost = dataclasses.replace(script.job._work.leases.all()[0], id=(2 << 32) + 7)
    back(script, 0, 1)
    script.worker_joins(1, (ReportedLease(lost),))
    assert script.job._work.leases.of_worker(1) == [lost]


def test_a_journal_of_an_earlier_version_knows_no_newest_lease() -> None:
    script = running(2)
    lease = script.lease(0)
    snapshot = script.job.snapshot()
    del snapshot["newest_lease"]
    script.job.snapshot = lambda: snapshot
    back(script, 0)
    later = dataclasses.replace(lease, id=lease.id + MAX_UNWRITTEN + 1)
    script.worker_joins(0, (ReportedLease(later),))
    assert script.job._work.leases.of_worker(0) == [later]


def test_a_held_lease_of_an_epoch_far_away_begins_no_more_than_the_journal_can_lack() -> None:
    script = running(2, num_epochs=0)
    lease = script.lease(0)
    back(script, 0)
    script.worker_joins(0, (ReportedLease(dataclasses.replace(lease, id=lease.id + 1, epoch=1 << 24)),))
    assert len(script.job._work.tasks.epochs) <= MAX_UNKNOWN_EPOCHS + 2


def test_data_that_would_be_cut_into_more_tasks_than_fit_the_memory_end_the_job_with_what_to_do() -> None:
    script = Script(records=1 << 40)
    script.ps_starts()
    script.worker_starts(0)
    script.data_is_known()
    script.pod(Role.WORKER, 0, PodState.SUCCEEDED)
    script.pod(Role.PS, 0, PodState.SUCCEEDED)
    assert "Raise --minibatch_size" in script.last(c.EndJob).message


def test_a_report_of_the_model_is_written_down_before_it_is_accepted() -> None:
    script = Script()
    script.worker_starts(0)
    assert script.ask(e.ModelReported, 0, 7, has_metrics=True) == c.Accepted(0)
    assert [type(one) for one in script.commands if isinstance(one, c.Persist | c.Reply)] == [c.Persist, c.Reply]
    for command in script.told(c.ListShards):
        script.tell(e.ShardsListed(command.kind, (Shard("a", 0, 40),)))
    script.ask(e.ModelReported, 0, 7, has_metrics=True)
    assert script.told(c.Persist) == []
