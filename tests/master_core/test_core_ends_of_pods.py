"""Consequences of a pod's end, or of its failure to start: memory, lost nodes, images, farewells, slots."""

from __future__ import annotations

import pytest
from core_script import Like, Script, everything, running, train_all

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.fleet.pods import KEPT_ENDED
from elasticdl.master.core.values import Lease, PodState, ReportedLease
from elasticdl.protocol import Role

WORKER, PS = "elasticdl-j-worker", "elasticdl-j-ps"


def ps_heartbeat(script: Script, ps_id: int = 0, incarnation: int = 1, leaving: bool = True) -> c.HeartbeatAnswer:
    answer: c.HeartbeatAnswer = script.ask(e.HeartbeatReceived, Role.PS, ps_id, incarnation, leaving=leaving)
    return answer


def blocked(script: Script, role: Role, index: int, why: str) -> None:
    name = script.settings.pod_name(role, index)
    script.tell(e.PodChanged(name, role, index, f"{name}/1", PodState.PENDING, blocked=why))


# Slots --------------------------------------------------------------------------------------------------------------


def test_a_successor_fills_its_predecessors_slot() -> None:
    script = running(3)
    script.kill(1)
    assert script.told(c.CreatePod) == [c.CreatePod(f"{WORKER}-3", Role.WORKER, 3, slot=1)]
    script.kill(0)
    assert script.told(c.CreatePod) == [c.CreatePod(f"{WORKER}-4", Role.WORKER, 4, slot=0)]
    script.kill(3, "Preempted")
    script.pass_time(3, alive=(2,))
    assert script.last(c.CreatePod) == c.CreatePod(f"{WORKER}-5", Role.WORKER, 5, slot=1)


def test_slots_outlive_the_master() -> None:
    script = running(3)
    script.kill(1)
    script.restart_master()
    script.tell(e.PodsListed((e.PodChanged(f"{WORKER}-0", Role.WORKER, 0, f"{WORKER}-0/1", PodState.RUNNING),)))
    found = script.told(c.CreatePod)
    script.pass_time(2, alive=(0,))  # the second end in a row of a pod in that slot
    slots = {one.index: one.slot for one in (*found, *script.told(c.CreatePod)) if one.role is Role.WORKER}
    assert slots == {4: 2, 5: 1}


def test_many_workers_lost_at_once_all_have_successors_at_once() -> None:
    script = Script(num_workers=100)
    for worker_id in range(30):
        script.pod(Role.WORKER, worker_id, PodState.DELETED, "Deleted")
        assert script.told(c.CreatePod) == [
            c.CreatePod(f"{WORKER}-{100 + worker_id}", Role.WORKER, 100 + worker_id, slot=worker_id)
        ]


# Memory -------------------------------------------------------------------------------------------------------------


def test_a_worker_that_ran_out_of_memory_has_a_successor_with_more_of_it_until_four_times() -> None:
    script = Script(max_task_failures=2)
    for worker_id, factor in enumerate((1.5, 2.25, 3.375, 4.0)):
        script.kill(worker_id, "OOMKilled")
        created = c.CreatePod(f"{WORKER}-{worker_id + 1}", Role.WORKER, worker_id + 1, 0, factor)
        assert script.told(c.CreatePod) == [created]
    assert any(
        line.startswith("worker-0 ran out of memory (OOMKilled); its successor gets 1.5 times the memory")
        for line in script.log()
    )
    script.kill(4, "OOMKilled")
    assert script.told(c.CreatePod) == []
    script.pass_time(1)
    assert script.last(c.CreatePod).memory_factor == 4.0
    script.kill(5, "OOMKilled")
    assert script.job.status().phase == "Failed"


def test_more_memory_is_kept_by_the_slot_alone_and_outlives_the_master() -> None:
    script = running(2)
    script.kill(1, "OOMKilled")
    script.kill(2, "Killed")
    assert script.last(c.CreatePod) == c.CreatePod(f"{WORKER}-3", Role.WORKER, 3, slot=1, memory_factor=1.5)
    script.kill(0)
    assert script.last(c.CreatePod) == c.CreatePod(f"{WORKER}-4", Role.WORKER, 4, slot=0)
    script.restart_master()
    script.tell(e.PodsListed(()))
    script.pass_time(3)
    created = [one for one in script.history if isinstance(one, c.CreatePod)][-3:]
    assert {one.slot: one.memory_factor for one in created if one.role is Role.WORKER} == {0: 1.0, 1: 1.5}


def test_a_ps_that_ran_out_of_memory_comes_back_with_more() -> None:
    script = running(num_ps=2)
    script.ps_dies(1, reason="OOMKilled")
    assert script.told(c.CreatePod) == [c.CreatePod(f"{PS}-1", Role.PS, 1, slot=1, memory_factor=1.5)]


def resize(name: str, role: Role, factor: float) -> c.ResizePod:
    return c.ResizePod(c.CreatePod(name, role, 0, 0, factor))


def test_a_worker_near_its_limit_gets_more_memory_while_it_runs_until_four_times() -> None:
    script = running(2)
    for factor in (1.5, 2.25, 3.375, 4.0):
        script.heartbeat(0, memory_share=0.89)
        assert script.told(c.ResizePod) == []
        script.heartbeat(0, memory_share=0.9)
        assert script.told(c.ResizePod) == [resize(f"{WORKER}-0", Role.WORKER, factor)]
        script.heartbeat(0, memory_share=0.95)
        assert script.told(c.ResizePod) == []  # it is under way
        script.tell(e.PodResized(f"{WORKER}-0", factor, 1 << 30))
    script.heartbeat(0, memory_share=0.99)
    assert script.told(c.ResizePod) == []
    script.kill(0)
    assert script.told(c.CreatePod) == [c.CreatePod(f"{WORKER}-2", Role.WORKER, 2, 0, 4.0)]


def test_what_is_asked_for_counts_only_when_it_is_in_force() -> None:
    script = running(1)
    script.heartbeat(0, memory_share=0.95)
    script.kill(0)
    assert script.last(c.CreatePod).memory_factor == 1.0
    script.worker_starts(1)
    script.heartbeat(1, memory_share=0.95)
    script.tell(e.PodNotResized(f"{WORKER}-1", "Infeasible: too large.", is_final=False))
    script.kill(1, "OOMKilled")
    assert script.last(c.CreatePod).memory_factor == 1.5


def test_a_resize_under_way_outlives_the_master() -> None:
    script = running(1)
    script.heartbeat(0, memory_share=0.95)
    script.restart_master()
    script.tell(e.PodsListed((e.PodChanged(f"{WORKER}-0", Role.WORKER, 0, f"{WORKER}-0/1", PodState.RUNNING),)))
    script.worker_joins(0)
    script.heartbeat(0, memory_share=0.95)
    assert script.told(c.ResizePod) == [resize(f"{WORKER}-0", Role.WORKER, 1.5)]
    script.tell(e.PodResized(f"{WORKER}-0", 1.5, 1 << 30))
    script.restart_master()
    script.worker_joins(0)
    script.heartbeat(0, memory_share=0.95)
    assert script.told(c.ResizePod) == [resize(f"{WORKER}-0", Role.WORKER, 2.25)]


def test_a_cluster_without_resizes_is_asked_once_and_it_is_said_once() -> None:
    script = running(2)
    for worker_id in (0, 1):
        script.heartbeat(worker_id, memory_share=0.95)
    for worker_id in (0, 1):
        script.tell(e.PodNotResized(f"{WORKER}-{worker_id}", "The API server does not resize pods.", is_final=True))
    assert len([line for line in script.log() if "cannot be raised in place" in line]) == 1
    script.kill(0, "OOMKilled")
    script.worker_starts(2)
    script.heartbeat(2, memory_share=0.95)
    assert script.told(c.ResizePod) == []
    assert script.last(c.CreatePod).memory_factor == 1.5


def test_a_ps_near_its_limit_gets_more_memory_while_it_runs() -> None:
    script = running(1)
    server = next(iter(script.job._fleet.servers.all()))
    script.ask(e.HeartbeatReceived, Role.PS, server.id, server.incarnation, memory_share=0.95)
    assert script.told(c.ResizePod) == [resize(f"{PS}-0", Role.PS, 1.5)]


# Pods that cannot start ---------------------------------------------------------------------------------------------


def test_an_image_that_cannot_be_pulled_fails_the_job_at_once() -> None:
    script = Script(num_workers=2)
    blocked(script, Role.WORKER, 1, "ImagePullBackOff: no image foo:1")
    status = script.job.status()
    assert (status.phase, status.message) == ("Failed", f"{WORKER}-1 cannot start: ImagePullBackOff: no image foo:1")


def test_an_image_that_could_be_pulled_before_is_only_complained_of() -> None:
    script = running(2)
    script.kill(1)
    for reason in ("ErrImagePull", "ImagePullBackOff", "ErrImagePull", "ImagePullBackOff"):
        blocked(script, Role.WORKER, 2, reason)
    assert [line for line in script.log() if "cannot start" in line] == [
        f"{WORKER}-2 cannot start: ErrImagePull",
        f"{WORKER}-2 cannot start: ImagePullBackOff",
    ]
    assert script.lease(0)


def test_that_a_role_has_run_outlives_the_master() -> None:
    script = running()
    script.kill(0)
    script.restart_master()
    script.tell(e.PodsListed((e.PodChanged(f"{PS}-0", Role.PS, 0, f"{PS}-0/1", PodState.RUNNING),)))
    blocked(script, Role.WORKER, script.last(c.CreatePod).index, "ImagePullBackOff")
    assert script.job.status().phase != "Failed"


def test_a_running_ps_says_nothing_of_the_workers_image() -> None:
    script = Script()
    script.ps_starts()
    blocked(script, Role.WORKER, 0, "InvalidImageName")
    assert script.job.status().phase == "Failed"


# Creation -----------------------------------------------------------------------------------------------------------


def test_a_ps_whose_name_is_taken_is_tried_again_every_few_seconds() -> None:
    script = Script(num_workers=0)
    waits = []
    for _ in range(6):
        script.tell(e.PodNotCreated(f"{PS}-0", "the pod exists already"))
        failed_at = script.now
        while not script.told(c.CreatePod):
            script.pass_time(1)
        waits.append(script.now - failed_at)
    assert waits == [1, 2, 4, 5, 5, 5]


def test_a_pod_that_ends_makes_room_for_those_that_could_not_be_created() -> None:
    script = Script(num_workers=2)
    name = f"{WORKER}-1"
    for _ in range(6):
        script.tell(e.PodNotCreated(name, "exceeded quota"))
        script.pass_time(60)
    script.tell(e.PodNotCreated(name, "exceeded quota"))
    script.pass_time(5)
    assert script.told(c.CreatePod) == []
    script.kill(0)
    script.pass_time(1)
    assert c.CreatePod(name, Role.WORKER, 1, slot=1) in script.told(c.CreatePod)


@pytest.mark.parametrize("is_seen_first", [True, False])
def test_a_pod_whose_creation_seemed_to_fail_is_taken_for_what_it_is(is_seen_first: bool) -> None:
    script = Script()
    for _ in range(2):
        if is_seen_first:
            script.pod(Role.WORKER, 0, PodState.RUNNING)
        script.tell(e.PodNotCreated(f"{WORKER}-0", "time-out"))
        if not is_seen_first:
            script.pod(Role.WORKER, 0, PodState.RUNNING)
    assert script.worker_joins(0) == c.Registered(None)
    listed = e.PodChanged(f"{WORKER}-0", Role.WORKER, 0, f"{WORKER}-0/1", PodState.RUNNING)
    script.tell(e.PodsListed((listed,)))
    assert script.told(c.DeletePod) == []


# Lost nodes ---------------------------------------------------------------------------------------------------------


def test_what_is_left_of_a_pod_on_a_lost_node_is_deleted_before_its_successor_is_created() -> None:
    script = running(2)
    script.kill(0, "NodeLost")
    assert script.told(c.DeletePod) == [c.DeletePod(f"{WORKER}-0", 0.0)]
    script.ps_dies(reason="NodeLost")
    order = [one for one in script.commands if isinstance(one, c.DeletePod | c.CreatePod)]
    assert order == [c.DeletePod(f"{PS}-0", 0.0), c.CreatePod(f"{PS}-0", Role.PS, 0)]
    script.pod(Role.PS, 0, PodState.DELETED, "NodeLost")
    assert script.told(c.CreatePod) == []


def test_pods_on_a_lost_node_are_deleted_in_any_life_of_the_master() -> None:
    script = running(2)
    script.restart_master()
    lost = e.PodChanged(f"{WORKER}-9", Role.WORKER, 9, "u", PodState.FAILED, "NodeLost")
    kept = e.PodChanged(f"{WORKER}-8", Role.WORKER, 8, "v", PodState.FAILED, "Error")
    stray = e.PodChanged(f"{WORKER}-7", Role.WORKER, 7, "w", PodState.RUNNING)
    script.tell(e.PodsListed((lost, kept, stray)))
    assert script.told(c.DeletePod) == [c.DeletePod(f"{WORKER}-9", 0.0), c.DeletePod(f"{WORKER}-7")]


# Farewells ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_says_farewell_gives_its_leases_back_at_once_and_gets_no_more() -> None:
    script = running(2)
    lease = script.lease(0)
    script.progress(lease, 0)
    assert script.heartbeat(0, leaving=True) == c.HeartbeatAnswer(True, (), script.last(c.Reply).answer.partition)
    assert script.lease(1).task == lease.task
    assert script.request(0) is None
    assert isinstance(script.progress(lease, 1), c.Refused)


@pytest.mark.parametrize("reason", ["Killed", "Completed", "Error", "OOMKilled", "Preempted"])
def test_the_end_of_a_worker_that_said_farewell_is_nobodys_fault(reason: str) -> None:
    script = Script(max_task_failures=1)
    script.ps_starts()
    for worker_id in range(4):
        script.worker_starts(worker_id)
        script.heartbeat(worker_id, leaving=True)
        script.restart_master()
        pods = [e.PodChanged(f"{PS}-0", Role.PS, 0, f"{PS}-0/1", PodState.RUNNING)]
        pods.append(
            e.PodChanged(f"{WORKER}-{worker_id}", Role.WORKER, worker_id, f"{WORKER}-{worker_id}/1", PodState.RUNNING)
        )
        script.tell(e.PodsListed(tuple(pods)))
        script.kill(worker_id, reason)
        assert script.told(c.CreatePod) == [c.CreatePod(f"{WORKER}-{worker_id + 1}", Role.WORKER, worker_id + 1)]


def restarted() -> tuple[Script, Lease]:
    """The second life of a master, to which no worker has spoken yet, and the lease that worker 0 holds."""
    script = running(2)
    lease = script.lease(0)
    script.restart_master()
    pods = [e.PodChanged(f"{PS}-0", Role.PS, 0, f"{PS}-0/1", PodState.RUNNING)]
    pods += [e.PodChanged(f"{WORKER}-{k}", Role.WORKER, k, f"{WORKER}-{k}/1", PodState.RUNNING) for k in (0, 1)]
    script.tell(e.PodsListed(tuple(pods)))
    script.ps_joins(held=1)
    return script, lease


def test_a_restarted_master_does_not_wait_for_a_worker_that_said_farewell() -> None:
    script, lease = restarted()
    script.worker_joins(1)
    assert script.heartbeat(0, leaving=True).known
    script.sets_are_read({})
    assert script.lease(1).task == lease.task


def test_a_worker_that_said_farewell_holds_no_lease_that_it_brings_to_a_restarted_master() -> None:
    """Its registration comes after its farewell: another thread has sent it."""
    script, lease = restarted()
    script.heartbeat(0, leaving=True)
    script.worker_joins(0, (ReportedLease(lease, (0,)),))
    script.worker_joins(1)
    script.sets_are_read({})
    assert script.lease(1).task == lease.task


def test_a_worker_that_says_farewell_and_stays_is_replaced() -> None:
    script = running()
    script.heartbeat(0, leaving=True)
    script.pass_time(72)
    assert script.last(c.DeletePod) == c.DeletePod(f"{WORKER}-0")


def test_a_ps_that_was_asked_to_end_leaves_after_a_checkpoint() -> None:
    script = running(checkpoint_dir="/checkpoints")
    lease = script.lease()
    script.progress(lease, 0)
    assert not ps_heartbeat(script).stop
    save = script.last(c.SaveCheckpoint)
    assert save.version == 1
    script.progress(lease, 1)
    assert script.told(c.SaveCheckpoint) == []
    assert not ps_heartbeat(script).stop
    script.tell(e.CheckpointSaved(1, "/checkpoints/version-1"))
    assert script.told(c.SaveCheckpoint) == []
    assert ps_heartbeat(script).stop
    script.ps_dies(reason="Error")
    assert script.told(c.CreatePod) == [c.CreatePod(f"{PS}-0", Role.PS, 0)]
    assert script.job._work.retry_budget.num_faults == 0
    assert script.ps_starts(life=2) == c.PsAdmitted(2, "/checkpoints/version-1")
    assert not ps_heartbeat(script, incarnation=2, leaving=False).stop


def test_a_checkpoint_under_way_is_too_old_for_a_ps_that_was_asked_to_end_after_more_was_committed() -> None:
    script = running(checkpoint_dir="/checkpoints", checkpoint_steps=1)
    lease = script.lease()
    script.progress(lease, 0)
    assert script.last(c.SaveCheckpoint).version == 1
    script.progress(lease, 1)
    assert not ps_heartbeat(script).stop
    script.tell(e.CheckpointSaved(1, "/checkpoints/version-1"))
    assert script.last(c.SaveCheckpoint).version == 2
    assert not ps_heartbeat(script).stop
    script.tell(e.CheckpointFailed(2, "disk full"))
    assert ps_heartbeat(script).stop


def test_a_ps_leaves_at_once_where_nothing_is_to_be_saved() -> None:
    script = running()
    script.progress(script.lease(), 0)
    assert ps_heartbeat(script).stop
    saved = running(checkpoint_dir="/checkpoints", checkpoint_steps=1)
    saved.progress(saved.lease(), 0)
    saved.tell(e.CheckpointSaved(1, "/checkpoints/version-1"))
    assert ps_heartbeat(saved).stop
    assert ps_heartbeat(running(checkpoint_dir="/checkpoints")).stop


def test_a_ps_that_leaves_costs_no_sample() -> None:
    script = running(checkpoint_dir="/checkpoints", checkpoint_steps=100)
    first = script.lease()
    script.finish(first)
    ps_heartbeat(script)
    script.tell(e.CheckpointSaved(2, "/checkpoints/version-2"))
    assert ps_heartbeat(script).stop
    script.ps_dies()
    script.ps_starts(life=2)
    script.sets_are_read({(0, first.task): range(2)})
    script.finish(script.lease())
    script.sets_are_read(everything(script))
    assert "Epoch 1: records 40, committed 40, repeated 0, lost 0" in script.log()
    assert not any("open again" in line for line in script.log())
    assert script.last(c.SaveCheckpoint) == Like(c.SaveCheckpoint, version=4)


def test_at_the_end_a_ps_is_asked_to_stop_and_one_that_is_not_heard_is_deleted() -> None:
    script = running()
    train_all(script)
    script.sets_are_read(everything(script))
    script.pod(Role.WORKER, 0, PodState.SUCCEEDED, "Completed")
    assert script.commands == [c.EndJob(0)]
    assert ps_heartbeat(script, leaving=False).stop
    silent = running()
    train_all(silent)
    silent.sets_are_read(everything(silent))
    silent.job._fleet.servers.all()[0].heard_at -= 60
    silent.pod(Role.WORKER, 0, PodState.SUCCEEDED, "Completed")
    assert silent.commands == [c.DeletePod(f"{PS}-0"), c.EndJob(0)]


def test_a_checkpoint_that_is_asked_for_is_written_once_and_workers_are_asked_for_theirs() -> None:
    script = running(checkpoint_dir="/checkpoints")
    assert script.heartbeat(0).checkpoint_request == 0
    script.tell(e.CheckpointRequested())
    assert script.told(c.SaveCheckpoint) == []  # nothing is in the model yet
    lease = script.lease()
    script.progress(lease, 0)
    assert [save.version for save in script.told(c.SaveCheckpoint)] == [1]
    script.tell(e.CheckpointSaved(1, "/checkpoints/version-1"))
    script.progress(lease, 1)
    assert script.told(c.SaveCheckpoint) == []
    assert script.heartbeat(0).checkpoint_request == 1


def _ended_pods(indices: range) -> tuple[e.PodChanged, ...]:
    return tuple(
        e.PodChanged(f"{WORKER}-{index}", Role.WORKER, index, f"{WORKER}-{index}/1", PodState.FAILED, "Preempted")
        for index in indices
    )


def test_pods_that_ended_long_ago_are_deleted_and_the_newest_keep_their_logs() -> None:
    script = running(2)
    for worker_id in range(1, KEPT_ENDED + 3):
        script.kill(worker_id, "Preempted")
        script.pass_time(60, alive=(0,))  # until the next one is created
    script.kill(0, "Preempted")  # the oldest pod, and the last to end
    ended = _ended_pods(range(KEPT_ENDED + 3))
    living = e.PodChanged(f"{WORKER}-{KEPT_ENDED + 3}", Role.WORKER, KEPT_ENDED + 3, "u", PodState.RUNNING)
    script.tell(e.PodsListed((*ended, living)))
    assert script.told(c.DeletePod) == [c.DeletePod(f"{WORKER}-{index}") for index in (1, 2, 3)]
    script.tell(e.PodsListed((ended[0], *ended[4:], living)))
    assert script.told(c.DeletePod) == []


def test_the_next_master_deletes_the_ended_pods_with_the_lowest_numbers() -> None:
    script = running(2)
    script.restart_master()
    script.tell(e.PodsListed(_ended_pods(range(2, KEPT_ENDED + 4))))
    assert script.told(c.DeletePod) == [c.DeletePod(f"{WORKER}-{index}") for index in (2, 3)]


def test_a_large_job_keeps_as_many_ended_pods_as_it_has_workers_and_all_once_it_has_ended() -> None:
    script = Script(num_workers=KEPT_ENDED + 10)
    ended = _ended_pods(range(100, KEPT_ENDED + 111))
    script.tell(e.PodsListed(ended))
    assert script.told(c.DeletePod) == [c.DeletePod(f"{WORKER}-100")]
    script.tell(e.StopRequested("the end"))
    script.tell(e.PodsListed(ended))
    assert script.told(c.DeletePod) == []
