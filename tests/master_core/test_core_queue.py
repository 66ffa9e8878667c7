"""Pods that a queue admits, within a quota that workers and servers share: servers come first."""

from __future__ import annotations

from core_script import Script, running, train_all

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.values import PodState
from elasticdl.protocol import Role
from elasticdl_client.job_events import EventKind


def shown(script: Script, role: Role, index: int, node: str = "", life: int = 1) -> None:
    """A pending pod is seen: the queue holds it back, or it has a node."""
    name = script.settings.pod_name(role, index)
    queue = "" if node else "team-a"
    script.tell(e.PodChanged(name, role, index, f"{name}/{life}", PodState.PENDING, node=node, queue=queue))


def created(script: Script) -> list[str]:
    """The pods that the newest event has made."""
    return [f"{one.role}-{one.index}" for one in script.told(c.CreatePod)]


def deleted(script: Script) -> list[str]:
    return [one.name.removeprefix("elasticdl-j-") for one in script.told(c.DeletePod)]


def server_waits(num_workers: int, num_queued: int) -> Script:
    """A job that has lost its server, whose successor the queue holds back; some workers were never admitted."""
    script = running(num_workers)
    script.tell(e.ScaleRequested(num_workers + num_queued))
    for index in range(num_workers, num_workers + num_queued):
        shown(script, Role.WORKER, index)
    script.ps_dies()
    shown(script, Role.PS, 0, life=2)
    return script


def test_workers_of_a_queue_are_created_when_all_servers_have_a_place() -> None:
    script = Script(num_ps=2, num_workers=3, has_queue=True)
    assert created(script) == ["ps-0", "ps-1"]
    shown(script, Role.PS, 0, node="node-0")
    shown(script, Role.PS, 1)
    assert created(script) == []
    shown(script, Role.PS, 1, node="node-0")
    assert created(script) == ["worker-0", "worker-1", "worker-2"]


def test_workers_without_a_queue_are_created_with_the_servers() -> None:
    assert created(Script(num_ps=1, num_workers=2)) == ["ps-0", "worker-0", "worker-1"]


def test_a_job_without_servers_creates_its_workers_at_once() -> None:
    assert created(Script(num_ps=0, num_workers=2, has_queue=True)) == ["worker-0", "worker-1"]


def test_workers_give_their_quota_to_a_server_that_waits_for_it() -> None:
    script = server_waits(num_workers=3, num_queued=2)
    script.pass_time(10, alive=(0, 1, 2))
    assert deleted(script) == created(script) == []
    script.pass_time(1, alive=(0, 1, 2))
    assert deleted(script) == ["worker-3", "worker-4", "worker-2"]  # those in the queue may be older than the server
    script.pass_time(9, alive=(0, 1))
    assert deleted(script) == created(script) == []
    shown(script, Role.PS, 0, node="node-0", life=2)
    assert created(script) == ["worker-5", "worker-6", "worker-7"]
    for index in (2, 3, 4):
        script.kill(index)
        assert created(script) == []
    assert [one for one in script.job.events.events if one.kind is EventKind.POD_LOST and "worker" in one.subject] == []


def test_workers_keep_the_quota_of_a_queue_that_is_not_the_servers() -> None:
    script = running(2, queues_differ=True)
    script.ps_dies()
    shown(script, Role.PS, 0, life=2)
    script.pass_time(60, alive=(0, 1))
    assert deleted(script) == []


def test_a_worker_that_is_about_to_leave_gives_its_quota_first() -> None:
    script = server_waits(num_workers=3, num_queued=0)
    script.pass_time(11, alive=(0, 1, 2))
    assert deleted(script) == ["worker-2"]
    script.pass_time(11, alive=(0, 1))
    assert deleted(script) == []
    script.kill(2)
    script.pass_time(11, alive=(0, 1))
    assert deleted(script) == ["worker-1"]


def refused(script: Script, role: Role, index: int) -> None:
    """A pod was to be created, and the quota of the namespace is used up."""
    name = script.settings.pod_name(role, index)
    script.tell(e.PodNotCreated(name, "exceeded quota: all, requested: pods=1", lacks_quota=True))


def test_a_worker_gives_its_quota_to_a_server_that_cannot_be_created() -> None:
    script = running(2)
    script.ps_dies()
    refused(script, Role.PS, 0)
    for seconds in (1, 2, 4):
        script.pass_time(seconds, alive=(0, 1))
        assert created(script) == ["ps-0"]
        refused(script, Role.PS, 0)
    assert deleted(script) == []
    script.pass_time(4, alive=(0, 1))
    assert deleted(script) == ["worker-1"]
    script.kill(1)
    script.pass_time(1, alive=(0,))
    assert created(script) == ["ps-0"]  # and not the worker's successor, which would take its place
    shown(script, Role.PS, 0, node="node-0", life=2)
    assert created(script) == ["worker-2"]
    script.ps_starts(life=2)
    refused(script, Role.WORKER, 2)
    script.pass_time(60, alive=(0,))
    assert deleted(script) == []


def test_a_server_that_is_refused_for_another_reason_takes_nothing_from_workers() -> None:
    script = running(2)
    script.ps_dies()
    for _ in range(12):
        script.tell(e.PodNotCreated(script.settings.pod_name(Role.PS, 0), "the webhook denies it"))
        script.pass_time(5, alive=(0, 1))
        assert deleted(script) == []


def test_a_server_that_waits_for_a_node_takes_nothing_from_workers() -> None:
    script = running(2)
    script.ps_dies()
    script.pod(Role.PS, 0, PodState.PENDING, life=2, message="0/1 nodes are available: 1 Insufficient memory.")
    script.pass_time(60, alive=(0, 1))
    assert deleted(script) == []


def test_a_job_whose_workers_gave_way_ends_as_any_other() -> None:
    script = server_waits(num_workers=1, num_queued=0)
    script.pass_time(11, alive=(0,))
    assert deleted(script) == ["worker-0"]
    script.kill(0)
    shown(script, Role.PS, 0, node="node-0", life=2)
    assert created(script) == ["worker-1"]
    script.ps_starts(life=2)
    script.worker_starts(1)
    if script.told(c.ReadAppliedSets):
        script.sets_are_read({})
    train_all(script, 1)
