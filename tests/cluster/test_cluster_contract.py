"""The contract of the port `Cluster`, on real processes; every adapter passes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_agent import LocalAgent, Observer, Wire, have_ended

from elasticdl.cluster.cluster import Cluster, EndReason, EventType, Pod, PodPhase, PodSpec, RestartPolicy, Role
from elasticdl_client.errors import ElasticDLError

pytestmark = pytest.mark.ci

SLOTS = 2
FOREVER = "exec sleep 1000"


class Processes:
    """The local runtime, as the contract sees an adapter: a cluster, its capacity, and a hand that kills."""

    def __init__(self, job_dir: Path) -> None:
        self._agent = LocalAgent(job_dir, slots=SLOTS)
        self.cluster: Cluster = self._agent.cluster

    def set_slots(self, slots: int | None) -> None:
        self._agent.cluster.set_slots(slots)

    def signal(self, pod: Pod, number: signal.Signals) -> None:
        os.kill(pod.pid, number)

    def stop(self) -> None:
        self._agent.stop()


@pytest.fixture(params=[Processes])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Processes]:
    adapter = request.param(tmp_path)
    yield adapter
    adapter.stop()


@pytest.fixture
def cluster(runtime: Processes) -> Cluster:
    return runtime.cluster


@pytest.fixture
def observer(cluster: Cluster) -> Observer:
    return Observer(cluster)


@pytest.fixture
def wire(tmp_path: Path) -> Wire:
    return Wire(tmp_path / "wire")


def worker(name: str, script: str, **more: Any) -> PodSpec:
    return PodSpec(**({"name": name, "role": Role.WORKER, "index": 0, "command": ("sh", "-c", script)} | more))


def master(name: str, script: str, **more: Any) -> PodSpec:
    return worker(name, script, role=Role.MASTER, **more)


def test_a_pod_runs_to_its_end(cluster: Cluster, observer: Observer) -> None:
    created = cluster.create(worker("w-0", "echo out; echo err >&2", labels={"job": "mnist"}, index=7))
    ended = observer.ended_pod("w-0")
    assert (ended.phase, ended.reason, ended.exit_code) == (PodPhase.SUCCEEDED, EndReason.COMPLETED, 0)
    assert (ended.uid, ended.role, ended.index, ended.labels) == (created.uid, Role.WORKER, 7, {"job": "mnist"})
    assert cluster.logs("w-0").split() == ["out", "err"]
    phases = [(event.type, event.pod.phase) for event in observer.seen]
    assert phases == [
        (EventType.ADDED, PodPhase.PENDING),
        (EventType.MODIFIED, PodPhase.RUNNING),
        (EventType.MODIFIED, PodPhase.SUCCEEDED),
    ]


def test_a_pod_has_its_environment(cluster: Cluster, observer: Observer) -> None:
    cluster.create(worker("w-0", 'echo "$WORKER_ID"', env={"WORKER_ID": "a b"}))
    observer.ended_pod("w-0")
    assert cluster.logs("w-0") == "a b\n"


def test_an_ended_pod_stays_until_it_is_deleted(cluster: Cluster, observer: Observer) -> None:
    cluster.create(worker("w-0", "true"))
    observer.ended_pod("w-0")
    assert [pod.phase for pod in cluster.list()] == [PodPhase.SUCCEEDED]
    cluster.delete("w-0")
    assert observer.deleted("w-0").reason is EndReason.COMPLETED
    assert cluster.list() == []


def test_a_second_pod_of_a_living_ones_name_is_refused(cluster: Cluster) -> None:
    cluster.create(worker("w-0", FOREVER))
    with pytest.raises(ElasticDLError, match="w-0 exists already"):
        cluster.create(worker("w-0", FOREVER))


def test_an_ended_ones_name_may_be_given_again(cluster: Cluster, observer: Observer) -> None:
    first = cluster.create(worker("ps-0", "exit 1"))
    observer.ended_pod("ps-0")
    second = cluster.create(worker("ps-0", FOREVER))
    assert second.uid != first.uid
    assert observer.deleted("ps-0").uid == first.uid
    assert observer.phase("ps-0", PodPhase.RUNNING).uid == second.uid
    assert [pod.uid for pod in cluster.list()] == [second.uid]


@pytest.mark.parametrize("name", ["../w", "W", "", "a/b", "w-"])
def test_what_is_no_pod_name_is_refused(cluster: Cluster, name: str) -> None:
    with pytest.raises(ElasticDLError, match="cannot be the name"):
        cluster.create(worker(name, "true"))


def test_an_exit_code_is_the_pods_own_fault_and_its_last_lines_are_told(cluster: Cluster, observer: Observer) -> None:
    cluster.create(worker("w-0", "echo no such file >&2; exit 3"))
    ended = observer.ended_pod("w-0")
    assert (ended.phase, ended.reason, ended.exit_code) == (PodPhase.FAILED, EndReason.ERROR, 3)
    assert "no such file" in ended.message


def test_a_command_that_does_not_exist_is_an_error_that_names_it(cluster: Cluster, observer: Observer) -> None:
    cluster.create(worker("w-0", "", command=("/no/such/program",)))
    ended = observer.ended_pod("w-0")
    assert ended.reason is EndReason.ERROR
    assert "/no/such/program" in ended.message


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, EndReason.KILLED),
        (signal.SIGTERM, EndReason.KILLED),
        (signal.SIGSEGV, EndReason.ERROR),
        (signal.SIGABRT, EndReason.ERROR),
    ],
)
def test_a_signal_from_outside_is_told_from_a_crash(
    runtime: Processes, observer: Observer, number: signal.Signals, reason: EndReason
) -> None:
    runtime.cluster.create(worker("w-0", FOREVER))
    runtime.signal(observer.phase("w-0", PodPhase.RUNNING), number)
    ended = observer.ended_pod("w-0")
    assert (ended.phase, ended.reason, ended.exit_code) == (PodPhase.FAILED, reason, 128 + number)


def test_deletion_lets_a_pod_say_goodbye(cluster: Cluster, observer: Observer, wire: Wire) -> None:
    script = f"trap 'echo goodbye; exit 0' TERM; echo ready > {wire.path}; while :; do sleep 0.05; done"
    cluster.create(worker("w-0", script))
    wire.read()
    assert "goodbye" not in cluster.logs("w-0")
    cluster.delete("w-0")
    gone = observer.deleted("w-0")
    assert (gone.reason, gone.exit_code) == (EndReason.DELETED, 0)
    assert cluster.list() == []


def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace(cluster: Cluster, observer: Observer, wire: Wire) -> None:
    script = f"trap '' TERM; echo ready > {wire.path}; while :; do sleep 0.05; done"
    cluster.create(worker("w-0", script, grace_s=0.3))
    wire.read()
    cluster.delete("w-0")
    with pytest.raises(ElasticDLError, match="exists already"):
        cluster.create(worker("w-0", FOREVER))
    gone = observer.deleted("w-0")
    assert (gone.reason, gone.exit_code) == (EndReason.DELETED, 128 + signal.SIGKILL)


def test_a_second_deletion_may_shorten_the_grace(cluster: Cluster, observer: Observer, wire: Wire) -> None:
    script = f"trap '' TERM; echo ready > {wire.path}; while :; do sleep 0.05; done"
    cluster.create(worker("w-0", script, grace_s=1000))
    wire.read()
    cluster.delete("w-0")
    cluster.delete("w-0", grace_s=0)
    assert observer.deleted("w-0").exit_code == 128 + signal.SIGKILL


def test_a_stopped_pod_can_be_deleted(runtime: Processes, observer: Observer) -> None:
    runtime.cluster.create(worker("w-0", FOREVER, grace_s=0.2))
    runtime.signal(observer.phase("w-0", PodPhase.RUNNING), signal.SIGSTOP)
    runtime.cluster.delete("w-0")
    assert observer.deleted("w-0").reason is EndReason.DELETED


def test_deleting_what_does_not_exist_is_no_error(cluster: Cluster) -> None:
    cluster.delete("nobody")


def test_logs_of_what_does_not_exist_are_an_error(cluster: Cluster) -> None:
    with pytest.raises(ElasticDLError, match="no pod nobody"):
        cluster.logs("nobody")


def test_pods_beyond_the_capacity_wait_in_order_of_creation(cluster: Cluster, observer: Observer) -> None:
    for index in range(4):
        cluster.create(worker(f"w-{index}", FOREVER))
    cluster.create(master("m", FOREVER))  # needs no slot
    observer.phase("m", PodPhase.RUNNING)
    pods = {pod.name: pod for pod in cluster.list()}
    assert [pods[f"w-{index}"].phase for index in range(4)] == [PodPhase.RUNNING] * 2 + [PodPhase.PENDING] * 2
    assert pods["w-3"].message == "0 of 2 slots free"
    cluster.delete("w-1")
    observer.phase("w-2", PodPhase.RUNNING)
    assert {pod.name: pod.phase for pod in cluster.list()}["w-3"] is PodPhase.PENDING


def test_a_waiting_pod_can_be_deleted(cluster: Cluster, observer: Observer) -> None:
    for index in range(3):
        cluster.create(worker(f"w-{index}", FOREVER))
    cluster.delete("w-2")
    assert observer.deleted("w-2").reason is EndReason.DELETED


def test_taking_a_slot_preempts_the_youngest_worker(runtime: Processes, observer: Observer) -> None:
    for name, role in [("w-0", Role.WORKER), ("ps-0", Role.PS)]:
        runtime.cluster.create(worker(name, FOREVER, role=role))
    observer.phase("ps-0", PodPhase.RUNNING)
    runtime.set_slots(1)
    preempted = observer.ended_pod("w-0")
    assert (preempted.phase, preempted.reason) == (PodPhase.FAILED, EndReason.PREEMPTED)
    runtime.cluster.create(worker("w-1", FOREVER))
    runtime.cluster.create(worker("w-2", FOREVER))
    runtime.set_slots(3)
    observer.phase("w-2", PodPhase.RUNNING)
    runtime.set_slots(2)
    assert observer.until(lambda event: event.pod.reason is EndReason.PREEMPTED).pod.name == "w-2"
    phases = {pod.name: pod.phase for pod in runtime.cluster.list()}
    assert (phases["ps-0"], phases["w-1"]) == (PodPhase.RUNNING, PodPhase.RUNNING)


def test_a_failed_pod_is_restarted_in_place(cluster: Cluster, observer: Observer, tmp_path: Path) -> None:
    script = f'echo life; echo x >> {tmp_path}/lives; test "$(wc -l < {tmp_path}/lives)" -ge 3'
    created = cluster.create(master("m", script, restart_policy=RestartPolicy.ON_FAILURE))
    ended = observer.ended_pod("m")
    assert (ended.uid, ended.restarts, ended.reason) == (created.uid, 2, EndReason.COMPLETED)
    assert [line for line in cluster.logs("m").splitlines() if line == "life"] == ["life"] * 3
    pauses = [event.pod.message.split(": ")[0] for event in observer.seen if "starts again" in event.pod.message]
    assert pauses == ["starts again in 0.2 s", "starts again in 0.4 s"]


def test_a_killed_pod_is_restarted_in_place(runtime: Processes, observer: Observer) -> None:
    runtime.cluster.create(master("m", FOREVER, restart_policy=RestartPolicy.ON_FAILURE))
    first = observer.phase("m", PodPhase.RUNNING)
    runtime.signal(first, signal.SIGKILL)
    second = observer.until(lambda event: event.pod.restarts == 1).pod
    assert second.phase is PodPhase.RUNNING
    assert second.pid not in (0, first.pid)


def test_a_pod_between_two_lives_can_be_deleted(cluster: Cluster, observer: Observer) -> None:
    cluster.create(master("m", "exit 1", restart_policy=RestartPolicy.ON_FAILURE))
    observer.until(lambda event: "starts again in 0.8 s" in event.pod.message)
    cluster.delete("m")
    assert observer.deleted("m").reason is EndReason.DELETED


def test_a_watch_begins_with_what_exists(cluster: Cluster, observer: Observer) -> None:
    cluster.create(worker("w-0", "true"))
    cluster.create(worker("w-1", FOREVER))
    observer.ended_pod("w-0")
    late = Observer(cluster)
    late.phase("w-1", PodPhase.RUNNING)
    assert [(event.type, event.pod.name) for event in late.seen] == [
        (EventType.ADDED, "w-0"),
        (EventType.ADDED, "w-1"),
    ]


def test_two_watchers_see_the_same(cluster: Cluster, observer: Observer) -> None:
    second = Observer(cluster)
    cluster.create(worker("w-0", "exit 4"))
    for watcher in (observer, second):
        assert watcher.ended_pod("w-0").exit_code == 4
    assert second.seen == observer.seen


def test_closing_ends_a_watch_without_an_error(runtime: Processes, observer: Observer) -> None:
    runtime.stop()
    assert observer.ended.wait(10)
    with pytest.raises(ElasticDLError):
        runtime.cluster.list()


def test_the_rest_of_a_pod_ends_with_its_leader(cluster: Cluster, observer: Observer, wire: Wire) -> None:
    script = f"sleep 1000 & sleep 1000 & echo $! > {wire.path}"
    cluster.create(worker("w-0", script))
    straggler = int(wire.read()[0])
    observer.ended_pod("w-0")
    assert have_ended([straggler])


def test_the_slots_tool_frees_a_slot(tmp_path: Path) -> None:
    agent = LocalAgent(tmp_path, slots=1)
    observer = Observer(agent.cluster)
    agent.cluster.create(worker("w-0", FOREVER))
    agent.cluster.create(worker("w-1", FOREVER))
    subprocess.run([sys.executable, "-m", "elasticdl.cluster.slots", agent.socket, "2"], check=True)
    observer.phase("w-1", PodPhase.RUNNING)
    agent.stop()
