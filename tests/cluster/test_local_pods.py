"""Behaviour of the local runtime alone: slots, its pauses before restarts, no straggler of a pod."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_agent import LocalAgent, Observer, Wire, have_ended
from pod_specs import master, worker

from elasticdl.cluster.cluster import EndReason, PodPhase, RestartPolicy
from elasticdl.cluster.local.adapter import ProcessCluster
from elasticdl.protocol import Role
from tests.master.small_disk import small_disk

SLOTS = 2


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    agent = LocalAgent(tmp_path, slots=SLOTS)
    yield agent.cluster
    agent.stop()


def test_pods_beyond_the_capacity_wait_in_order_of_creation(cluster: ProcessCluster, observer: Observer) -> None:
    for index in range(4):
        cluster.create(worker(f"w-{index}"))
    cluster.create(master("m"))  # needs no slot
    observer.phase("m", PodPhase.RUNNING)
    pods = {pod.name: pod for pod in cluster.list()}
    assert [pods[f"w-{index}"].phase for index in range(4)] == [PodPhase.RUNNING] * 2 + [PodPhase.PENDING] * 2
    assert pods["w-3"].message == "0 of 2 slots free"
    cluster.delete("w-1")
    observer.phase("w-2", PodPhase.RUNNING)
    assert {pod.name: pod.phase for pod in cluster.list()}["w-3"] is PodPhase.PENDING


def test_a_waiting_pod_can_be_deleted(cluster: ProcessCluster, observer: Observer) -> None:
    for index in range(3):
        cluster.create(worker(f"w-{index}"))
    cluster.delete("w-2")
    assert observer.deleted("w-2").reason is EndReason.DELETED


def test_taking_a_slot_preempts_the_youngest_worker(cluster: ProcessCluster, observer: Observer) -> None:
    for name, role in [("w-0", Role.WORKER), ("ps-0", Role.PS)]:
        cluster.create(worker(name, role=role))
    observer.phase("ps-0", PodPhase.RUNNING)
    cluster.set_slots(1)
    preempted = observer.ended_pod("w-0")
    assert (preempted.phase, preempted.reason) == (PodPhase.FAILED, EndReason.PREEMPTED)
    cluster.create(worker("w-1"))
    cluster.create(worker("w-2"))
    cluster.set_slots(3)
    observer.phase("w-2", PodPhase.RUNNING)
    cluster.set_slots(2)
    assert observer.until(lambda event: event.pod.reason is EndReason.PREEMPTED).pod.name == "w-2"
    phases = {pod.name: pod.phase for pod in cluster.list()}
    assert (phases["ps-0"], phases["w-1"]) == (PodPhase.RUNNING, PodPhase.RUNNING)


def test_a_server_that_waits_gets_the_slot_of_the_youngest_worker(cluster: ProcessCluster, observer: Observer) -> None:
    """A waiting worker has the slot of a lost server before its successor is created; then all would wait."""
    cluster.create(worker("ps-0", role=Role.PS))
    for index in range(2):
        cluster.create(worker(f"w-{index}"))
    cluster.delete("ps-0", grace_s=0)
    observer.phase("w-1", PodPhase.RUNNING)
    cluster.create(worker("ps-0", role=Role.PS))
    cluster.create(worker("w-2"))
    preempted = observer.ended_pod("w-1")
    assert (preempted.phase, preempted.reason) == (PodPhase.FAILED, EndReason.PREEMPTED)
    observer.until(lambda event: event.pod.name == "ps-0" and event.pod.phase is PodPhase.RUNNING)
    phases = {pod.name: pod.phase for pod in cluster.list()}
    assert (phases["w-0"], phases["w-2"]) == (PodPhase.RUNNING, PodPhase.PENDING)


def test_pauses_before_restarts_grow_and_the_log_holds_every_life(
    cluster: ProcessCluster, observer: Observer, tmp_path: Path
) -> None:
    script = f'echo life; echo x >> {tmp_path}/lives; test "$(wc -l < {tmp_path}/lives)" -ge 3'
    cluster.create(master("m", script, restart_policy=RestartPolicy.ON_FAILURE))
    assert observer.ended_pod("m").restarts == 2
    assert [line for line in cluster.logs("m").splitlines() if line == "life"] == ["life"] * 3
    pauses = [event.pod.message.split(": ")[0] for event in observer.seen if "starts again" in event.pod.message]
    assert pauses == ["starts again in 0.2 s", "starts again in 0.4 s"]


def test_a_pod_starts_again_while_the_disk_of_its_log_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_kib=256) as disk:
        fill = f"test -e {disk}/filler && exit 0; yes | head -c 65536; cat /dev/zero > {disk}/filler; exit 1"
        agent = LocalAgent(disk)
        try:
            observer = Observer(agent.cluster)
            agent.cluster.create(master("m", fill, restart_policy=RestartPolicy.ON_FAILURE))
            ended = observer.ended_pod("m")
            assert (ended.phase, ended.restarts, ended.message) == (PodPhase.SUCCEEDED, 1, "")
            agent.cluster.create(worker("w-0", "exit 0"))
            assert observer.ended_pod("w-0").phase is PodPhase.SUCCEEDED
        finally:
            agent.stop()


def test_a_pod_whose_log_cannot_be_written_ends_and_the_others_go_on(
    cluster: ProcessCluster, observer: Observer, tmp_path: Path
) -> None:
    log = tmp_path / "logs" / "m.log"
    spoil = f"ln -sfn {tmp_path}/missing/log {log}; exit 1"
    cluster.create(master("m", spoil, restart_policy=RestartPolicy.ON_FAILURE))
    pod = observer.ended_pod("m")
    assert (pod.exit_code, pod.message) == (126, "cannot be started: No such file or directory")
    (tmp_path / "logs" / "w-0.log").symlink_to(log)
    assert cluster.create(worker("w-0")).phase is PodPhase.FAILED
    cluster.create(worker("w-1"))
    cluster.create(worker("w-2"))
    observer.phase("w-2", PodPhase.RUNNING)  # no slot is kept for w-0


def test_a_pod_between_two_lives_can_be_deleted(cluster: ProcessCluster, observer: Observer) -> None:
    cluster.create(master("m", "exit 1", restart_policy=RestartPolicy.ON_FAILURE))
    observer.until(lambda event: "starts again in 0.8 s" in event.pod.message)
    cluster.delete("m")
    assert observer.deleted("m").reason is EndReason.DELETED


def test_two_watchers_see_every_event(cluster: ProcessCluster, observer: Observer) -> None:
    second = Observer(cluster)
    cluster.create(worker("w-0", "exit 4"))
    for watcher in (observer, second):
        watcher.ended_pod("w-0")
    assert second.seen == observer.seen


def test_the_rest_of_a_pod_ends_with_its_leader(cluster: ProcessCluster, observer: Observer, tmp_path: Path) -> None:
    wire = Wire(tmp_path / "wire")
    script = f"sleep 1000 & sleep 1000 & echo $! > {wire.path}"
    cluster.create(worker("w-0", script))
    straggler = int(wire.read()[0])
    observer.ended_pod("w-0")
    assert have_ended([straggler])


def test_the_slots_tool_frees_a_slot(tmp_path: Path) -> None:
    agent = LocalAgent(tmp_path, slots=1)
    observer = Observer(agent.cluster)
    agent.cluster.create(worker("w-0"))
    agent.cluster.create(worker("w-1"))
    subprocess.run([sys.executable, "-m", "elasticdl.cluster.local.slots", agent.socket, "2"], check=True)
    observer.phase("w-1", PodPhase.RUNNING)
    agent.stop()
