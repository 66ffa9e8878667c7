"""Processes come and go: pods, workers, parameter servers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_script import Like, Script, everything, running, train_all

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.fleet.servers import owned
from elasticdl.master.core.values import BucketRange, MessagePace, PodState, PsAddress, TaskType
from elasticdl.protocol import Device, Role
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.job_events import EventKind
from elasticdl_client.job_status import DeviceStatus, JobStatus


def test_a_job_starts_its_pods_once_their_ids_are_written_down() -> None:
    script = Script(num_workers=2, num_ps=1)
    assert script.commands == [
        c.Persist(),
        c.CreatePod("elasticdl-j-ps-0", Role.PS, 0),
        c.CreatePod("elasticdl-j-worker-0", Role.WORKER, 0),
        c.CreatePod("elasticdl-j-worker-1", Role.WORKER, 1, slot=1),
    ]


def test_a_killed_worker_costs_no_sample_and_its_successor_has_a_new_id_at_once() -> None:
    script = running(2)
    lease = script.lease(0)
    script.progress(lease, 0)
    script.kill(0)
    assert script.told(c.CreatePod) == [c.CreatePod("elasticdl-j-worker-2", Role.WORKER, 2)]
    assert any(line.startswith("Relaunch the worker: elasticdl-j-worker-0 (Killed") for line in script.log())
    again = script.lease(1)
    assert (again.epoch, again.task) == (lease.epoch, lease.task)
    assert again.id > lease.id
    assert script.job.status().model_version == 1


def test_the_status_has_the_devices_of_the_workers_that_live() -> None:
    script = running(3)
    script.heartbeat(2, device=Device("cuda:1", "H100", 3 << 30, 80 << 30))
    script.heartbeat(0, device=Device("cuda:0", "H100", 1 << 30, 80 << 30))
    script.heartbeat(1)
    script.heartbeat(0, device=Device("cuda:0", "H100", 2 << 30, 80 << 30))
    of_the_last = DeviceStatus(2, "cuda:1", "H100", 3 << 30, 80 << 30)
    assert script.job.status().devices == (DeviceStatus(0, "cuda:0", "H100", 2 << 30, 80 << 30), of_the_last)
    script.kill(0)
    assert script.job.status().devices == (of_the_last,)
    assert JobStatus.from_json(script.job.status().to_json()).devices == (of_the_last,)


def test_a_replaced_worker_is_refused() -> None:
    script = running(2)
    script.kill(0)
    assert isinstance(script.ask(e.LeaseRequested, 0, 7), c.UnknownWorker)
    assert isinstance(script.worker_joins(0), c.Refused)
    assert not script.heartbeat(0).known


def test_pending_pods_block_no_worker() -> None:
    script = Script(num_workers=3)
    script.ps_starts()
    script.pod(Role.WORKER, 1, PodState.PENDING)
    script.worker_starts(0)
    script.data_is_known()
    script.sets_are_read({})
    assert script.lease() is not None
    script.pass_time(700, alive=(0,))
    assert script.told(c.DeletePod) == []
    assert script.job.status().phase == "Running"


def test_workers_that_end_by_their_own_fault_before_a_commit_end_the_job_with_their_log() -> None:
    script = Script(records=20)
    script.ps_starts()
    for worker_id in range(3):
        script.pod(Role.WORKER, worker_id, PodState.RUNNING)
        script.pod(Role.WORKER, worker_id, PodState.FAILED, "Error", message="ImportError: no module named foo")
        script.pass_time(5)
    script.pass_time(6)
    end = script.last(c.EndJob)
    assert end == Like(c.EndJob, exit_code=1, pod="elasticdl-j-worker-2")
    assert "3 pods in a row" in end.message
    assert "no module named foo" in end.message


def test_a_commit_forgives_what_went_before() -> None:
    script = Script(max_task_failures=2, num_workers=2)
    script.ps_starts()
    script.worker_starts(0)
    script.data_is_known()
    script.sets_are_read({})
    script.kill(1, "Error")
    script.progress(script.lease(0), 0)
    script.pass_time(3, alive=(0,))
    script.kill(2, "Error")
    assert script.job.status().phase == "Running"
    script.pass_time(3, alive=(0,))
    script.kill(3, "Error")
    assert script.job.status().phase == "Failed"


def test_successors_back_off_while_nothing_is_committed() -> None:
    script = Script(max_task_failures=100)
    script.ps_starts()
    waits = []
    for worker_id in range(9):
        script.kill(worker_id, "Error")
        died_at = script.now
        while not script.told(c.CreatePod):
            script.pass_time(1)
        waits.append(script.now - died_at)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_slot_whose_pods_never_commit_backs_off_while_others_train() -> None:
    script = running(2, records=4000)
    script.kill(1, "Error")
    waits = []
    for worker_id in range(2, 8):
        died_at = script.now
        while not script.told(c.CreatePod):
            script.pass_time(1, alive=(0,))
        waits.append(script.now - died_at)
        script.finish(script.lease(0))
        script.worker_starts(worker_id)
        script.kill(worker_id, "Error")
    assert waits == [1, 2, 4, 8, 16, 32]
    while not script.told(c.CreatePod):
        script.pass_time(1, alive=(0,))
    script.worker_starts(8)
    script.finish(script.lease(8), 8)
    script.kill(8, "Error")
    assert script.told(c.CreatePod)
    script.worker_starts(9)
    script.kill(9, "Error")
    script.pass_time(1, alive=(0,))
    assert script.told(c.CreatePod)


def test_the_next_master_backs_off_as_long_and_a_pod_that_ran_for_long_is_no_early_end() -> None:
    script = Script(max_task_failures=100)
    for worker_id in range(3):
        script.kill(worker_id)
        script.pass_time(4)
    script.pod(Role.WORKER, 3, PodState.RUNNING)
    script.restart_master()
    name = script.settings.pod_name(Role.WORKER, 3)
    script.tell(e.PodsListed((e.PodChanged(name, Role.WORKER, 3, f"{name}/1", PodState.RUNNING),)))
    script.kill(3)
    script.pass_time(7)
    assert script.job._fleet.pods.living(Role.WORKER) == []
    script.pass_time(1)
    script.pod(Role.WORKER, 4, PodState.RUNNING)
    script.pass_time(600)
    script.kill(4)
    assert script.told(c.CreatePod)


def test_failed_creations_are_tried_again_less_and_less_often() -> None:
    script = Script()
    name = "elasticdl-j-worker-0"
    waits = []
    for _ in range(4):
        script.tell(e.PodNotCreated(name, "quota exceeded"))
        failed_at = script.now
        while not script.told(c.CreatePod):
            script.pass_time(1)
        waits.append(script.now - failed_at)
    assert waits == [1, 2, 4, 8]
    assert sum("quota exceeded" in line for line in script.log()) == 1


def test_a_refusal_that_has_been_reported_is_reported_of_another_role_and_after_a_creation() -> None:
    script = running(2)

    def reported() -> list[str]:
        found = [one for one in script.job.events.events if one.kind is EventKind.POD_NOT_CREATED]
        return [one.subject.removeprefix("elasticdl-j-") for one in found]

    def refused(role: Role, index: int) -> None:
        script.tell(e.PodNotCreated(script.settings.pod_name(role, index), "the webhook denies it"))

    script.kill(0)
    script.kill(1)
    refused(Role.WORKER, 2)
    refused(Role.WORKER, 3)
    assert reported() == ["worker-2"]
    script.ps_dies()
    refused(Role.PS, 0)
    assert reported() == ["worker-2", "ps-0"]
    script.pass_time(2)
    script.pod(Role.WORKER, 2, PodState.RUNNING)
    refused(Role.WORKER, 3)
    assert reported() == ["worker-2", "ps-0", "worker-3"]


def test_a_silent_worker_loses_its_lease_and_later_its_place() -> None:
    script = running(2)
    lease = script.lease(0)
    script.pass_time(12, alive=(1,))
    assert script.lease(1).task == lease.task
    assert script.job.status().workers_alive == 2
    script.pass_time(60, alive=(1,))
    deleted = [one for one in script.history if isinstance(one, c.DeletePod)]
    assert deleted == [c.DeletePod("elasticdl-j-worker-0")]
    assert script.last(c.CreatePod) == c.CreatePod("elasticdl-j-worker-2", Role.WORKER, 2)
    script.kill(0)
    assert script.told(c.CreatePod) == []


def test_a_worker_stuck_in_one_minibatch_loses_its_lease_and_later_its_place() -> None:
    script = running(step_timeout=20.0)
    lease = script.lease()
    script.pass_time(22, alive=(0,), holding={0: (lease.id,)})
    assert any("is stuck" in line for line in script.log())
    assert script.job._work.leases.all() == []
    script.pass_time(61, alive=(0,), holding={0: (lease.id,)})
    assert script.last(c.DeletePod) == c.DeletePod("elasticdl-j-worker-0")


def test_a_worker_that_waits_for_a_parameter_server_is_not_stuck() -> None:
    script = running(step_timeout=20.0)
    lease = script.lease()
    script.ps_dies()
    script.pass_time(100, alive=(0,), holding={0: (lease.id,)})
    assert script.job._work.leases.all() == [lease]


def test_a_worker_that_never_registers_is_replaced() -> None:
    script = Script(step_timeout=20.0)
    script.pod(Role.WORKER, 0, PodState.RUNNING)
    script.pass_time(95)
    assert script.last(c.DeletePod) == c.DeletePod("elasticdl-j-worker-0")


def test_no_worker_is_blamed_for_the_time_in_which_the_master_was_stopped() -> None:
    script = running()
    lease = script.lease()
    script.now += 1000.0
    script.tell(e.Tick())
    assert script.finish(lease) == c.Accepted(2)


def test_the_partition_is_handed_out_only_while_every_ps_is_ready() -> None:
    script = Script(num_ps=2)
    script.ps_starts(0)
    assert script.worker_starts() == c.Registered(None)
    script.ps_starts(1)
    partition = script.heartbeat(0).partition
    assert partition.ps == (
        PsAddress(0, "address-0", 1, (BucketRange(0, 512),)),
        PsAddress(1, "address-1", 1, (BucketRange(512, 1024),)),
    )
    assert script.heartbeat(0, partition_version=partition.version).partition is None
    script.ps_dies(1)
    assert script.heartbeat(0).partition is None
    script.ps_starts(1, life=2)
    newer = script.heartbeat(0, partition_version=partition.version).partition
    assert newer.version > partition.version
    assert newer.ps[1] == PsAddress(1, "address-1", 2, (BucketRange(512, 1024),))


def test_a_ps_learns_the_partition_from_its_heartbeat() -> None:
    script = Script(num_ps=2)
    script.ps_starts(0)
    assert script.ask(e.HeartbeatReceived, Role.PS, 0, 1).partition is None
    script.ps_starts(1)
    partition = script.ask(e.HeartbeatReceived, Role.PS, 0, 1).partition
    assert [ps.incarnation for ps in partition.ps] == [1, 1]
    assert script.ask(e.HeartbeatReceived, Role.PS, 0, 1, partition_version=partition.version).partition is None
    script.ps_dies(1)
    script.ps_starts(1, life=2)
    newer = script.ask(e.HeartbeatReceived, Role.PS, 0, 1, partition_version=partition.version).partition
    assert [ps.incarnation for ps in newer.ps] == [1, 2]


@pytest.mark.parametrize("num_ps", [1, 3, 7, 1024])
def test_every_bucket_has_one_owner_and_shares_differ_by_one_at_most(num_ps: int) -> None:
    ranges = [one for ps_id in range(num_ps) for one in owned(ps_id, num_ps)]
    assert [bucket for one in ranges for bucket in range(one.start, one.end)] == list(range(1024))
    sizes = [one.end - one.start for one in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_a_ps_is_sent_the_number_of_workers_that_train() -> None:
    script = running(3, has_validation_data=True, evaluation_steps=2, records=60)

    def num_pushing() -> int:
        return int(script.ask(e.HeartbeatReceived, Role.PS, 0, 1).num_pushing)

    assert num_pushing() == 0
    first = script.lease(0)
    assert num_pushing() == 1
    script.lease(1)
    assert num_pushing() == 2
    script.finish(first)  # an evaluation is due
    assert [script.lease(0).type for _ in range(2)] == [TaskType.EVALUATION] * 2
    assert num_pushing() == 1
    assert [script.lease(2).type for _ in range(2)] == [TaskType.EVALUATION, TaskType.TRAINING]
    assert num_pushing() == 1  # the next one to be worked off is an evaluation
    script.kill(1)
    assert num_pushing() == 0


def test_a_repeated_registration_of_a_ps_gets_the_same_incarnation() -> None:
    script = Script()
    assert script.ps_joins(0) == script.ps_joins(0) == Like(c.PsAdmitted, incarnation=1)


def test_a_lost_ps_comes_back_under_its_id_and_what_it_lacks_is_trained_again() -> None:
    script = running(num_epochs=2)
    finished = [script.lease(), script.lease()]
    for lease in finished:
        script.finish(lease)
    script.sets_are_read(everything(script))
    assert "Epoch 1: records 40, committed 40, repeated 0, lost 0" in script.log()
    held = script.lease()
    script.ps_dies()
    assert script.told(c.CreatePod) == [c.CreatePod("elasticdl-j-ps-0", Role.PS, 0)]
    assert script.ps_starts(life=2) == Like(c.PsAdmitted, incarnation=2)
    assert script.heartbeat(0, (held.id,)).revoked == (held.id,)
    assert script.request() is None
    script.sets_are_read({(0, 0): range(2), (0, 1): (1,)})
    again = script.last(c.Reply).answer.lease
    assert (again.epoch, again.task) == (0, 1)
    assert any("Epoch 1 is open again" in line for line in script.log())
    script.finish(again)
    script.sets_are_read(everything(script))
    assert script.log().count("Epoch 1: records 40, committed 40, repeated 0, lost 0") == 2


def test_what_the_model_has_lost_with_a_ps_is_counted_in_records_of_done_and_begun_tasks() -> None:
    script = running()
    done, begun = script.lease(), script.lease()
    script.finish(done)
    script.progress(begun, 0)
    script.ps_dies()
    script.ps_starts(life=2)
    script.sets_are_read({(0, done.task): (0,)})
    reopened = [event for event in script.job.events.events if event.kind is EventKind.EPOCH_REOPENED]
    assert [(event.subject, event.details) for event in reopened] == [("epoch-1", {"records": 20, "tasks": 2})]


def test_train_end_is_withdrawn_when_the_model_is_lost() -> None:
    script = running(output="/export")
    train_all(script)
    export = script.lease()
    assert export.type == "TRAIN_END"
    script.ps_dies()
    script.ps_starts(life=2)
    assert isinstance(script.ask(e.LeaseQuestioned, 0, 7, export.id), c.Refused)
    script.sets_are_read({})
    assert script.lease().type == "TRAINING"


def test_the_end_of_a_ps_told_twice_is_one_end() -> None:
    script = running()
    script.ps_dies(life=1)
    assert len(script.told(c.CreatePod)) == 1
    script.pod(Role.PS, 0, PodState.DELETED, "Deleted", life=1)
    assert script.told(c.CreatePod) == []
    assert script.ps_starts(life=2) == Like(c.PsAdmitted, incarnation=2)


def test_a_silent_ps_is_given_up_and_started_again_once_its_pod_has_ended() -> None:
    script = running()
    for _ in range(72):
        script.now += 1.0
        script.heartbeat(0)
        script.tell(e.Tick())
    assert script.last(c.DeletePod) == c.DeletePod("elasticdl-j-ps-0")
    assert isinstance(script.ps_joins(0, life=1, held=1), c.Refused)
    script.pod(Role.PS, 0, PodState.FAILED, "Killed")
    assert script.told(c.CreatePod) == [c.CreatePod("elasticdl-j-ps-0", Role.PS, 0)]


def test_a_ps_that_cannot_start_ends_the_job_with_its_log() -> None:
    script = Script()
    for life in range(1, 4):
        script.pod(Role.PS, 0, PodState.FAILED, "Error", life=life)
        script.pass_time(5)
    assert script.job.status().phase == "Failed"


def test_pods_that_vanished_unseen_are_replaced_after_a_list() -> None:
    script = running(2)
    name = "elasticdl-j-worker-1"
    script.tell(e.PodsListed((e.PodChanged("elasticdl-j-ps-0", Role.PS, 0, "elasticdl-j-ps-0/1", PodState.RUNNING),)))
    assert any(line.startswith(f"Relaunch the worker: {name} (Deleted") for line in script.log())
    assert [(command.index, command.slot) for command in script.told(c.CreatePod)] == [(2, 0), (3, 1)]


def test_workers_of_a_large_job_speak_less_often_but_never_seem_silent() -> None:
    script = running(2)
    assert script.heartbeat(0).pace == MessagePace(1.0, 0.1)
    workers, settings = script.job._workers, script.settings
    for worker_id in range(2, 1000):
        workers.join(worker_id, 7, 0.0)
    assert workers.pace(settings) == MessagePace(2.0, 2.0)
    for worker_id in range(1000, 5000):
        workers.join(worker_id, 7, 0.0)
    assert workers.pace(settings) == MessagePace(2.0, 2.0)
    assert workers.pace(replace(settings, lease_timeout=2.0)) == MessagePace(1.0, 1.0)
    assert workers.pace(replace(settings, strategy=DistributionStrategy.ALL_REDUCE)) == MessagePace(1.25, 1.25)
