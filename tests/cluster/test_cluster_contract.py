"""The contract of the port `Cluster`, on real processes and on a real Kubernetes; every adapter passes it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_agent import LocalAgent, Observer, Wire
from pod_specs import master, worker
from real_cluster import Pods

from elasticdl.cluster.cluster import Cluster, EndReason, EventType, Pod, PodPhase, RestartPolicy
from elasticdl.protocol import Role
from elasticdl_client.errors import ElasticDLError

PHASES = [PodPhase.PENDING, PodPhase.RUNNING, PodPhase.SUCCEEDED]


class Processes:
    """The local runtime, as the contract sees an adapter."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._agent = LocalAgent(directory)
        self.cluster: Cluster = self._agent.cluster

    def signal(self, pod: Pod, number: signal.Signals) -> None:
        os.kill(pod.pid, number)

    def stop(self) -> None:
        self._agent.stop()

    clean_up = stop


Runtime = Processes | Pods


@pytest.fixture(
    params=[Processes, pytest.param(Pods, marks=pytest.mark.cluster)],
    ids=["local", "kubernetes"],
)
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runtime]:
    adapter = request.param(tmp_path)
    yield adapter
    adapter.clean_up()


@pytest.fixture
def cluster(runtime: Runtime) -> Cluster:
    return runtime.cluster


@pytest.fixture
def wire(runtime: Runtime) -> Wire:
    return Wire(runtime.directory / "wire")


def test_a_pod_runs_to_its_end(cluster: Cluster, observer: Observer) -> None:
    created = cluster.create(worker("w-0", "echo out; echo err >&2", labels={"job": "mnist"}, index=7))
    ended = observer.ended_pod("w-0")
    assert (ended.phase, ended.reason, ended.exit_code) == (PodPhase.SUCCEEDED, EndReason.COMPLETED, 0)
    assert (ended.uid, ended.role, ended.index, ended.labels["job"]) == (created.uid, Role.WORKER, 7, "mnist")
    assert sorted(cluster.logs("w-0").split()) == ["err", "out"]  # two streams: they keep no order between them
    assert [event.type for event in observer.seen] == [EventType.ADDED] + [EventType.MODIFIED] * (
        len(observer.seen) - 1
    )
    phases = [event.pod.phase for event in observer.seen]  # a short life may never be seen running
    assert phases == sorted(phases, key=PHASES.index)
    assert phases[0] is PodPhase.PENDING


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
    cluster.create(worker("w-0"))
    with pytest.raises(ElasticDLError, match="w-0 exists already"):
        cluster.create(worker("w-0"))


def test_an_ended_ones_name_may_be_given_again(cluster: Cluster, observer: Observer) -> None:
    first = cluster.create(worker("ps-0", "exit 1"))
    observer.ended_pod("ps-0")
    second = cluster.create(worker("ps-0"))
    assert second.uid != first.uid
    assert observer.deleted("ps-0").uid == first.uid
    assert observer.phase("ps-0", PodPhase.RUNNING).uid == second.uid
    assert [pod.uid for pod in cluster.list()] == [second.uid]


@pytest.mark.parametrize("name", ["../w", "W", "", "a/b", "w-"])
def test_what_is_no_pod_name_is_refused(cluster: Cluster, name: str) -> None:
    with pytest.raises(ElasticDLError, match="cannot be the name"):
        cluster.create(worker(name, "true"))


def test_an_exit_code_is_the_pods_own_fault_and_its_last_lines_are_reported(
    cluster: Cluster, observer: Observer
) -> None:
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
def test_a_signal_from_outside_is_distinguished_from_a_crash(
    runtime: Runtime, observer: Observer, number: signal.Signals, reason: EndReason
) -> None:
    runtime.cluster.create(worker("w-0"))
    runtime.signal(observer.phase("w-0", PodPhase.RUNNING), number)
    ended = observer.ended_pod("w-0")
    assert (ended.phase, ended.reason, ended.exit_code) == (PodPhase.FAILED, reason, 128 + number)


def test_a_process_that_exits_by_sigterm_is_not_at_fault(runtime: Runtime, observer: Observer, wire: Wire) -> None:
    runtime.cluster.create(
        worker("w-0", f"trap 'exit 143' TERM; echo ready > {wire.path}; while :; do sleep 0.05; done")
    )
    wire.read()
    runtime.signal(observer.phase("w-0", PodPhase.RUNNING), signal.SIGTERM)
    ended = observer.ended_pod("w-0")
    assert (ended.phase, ended.reason, ended.exit_code) == (PodPhase.FAILED, EndReason.KILLED, 143)


def test_deletion_lets_a_pod_say_goodbye(cluster: Cluster, observer: Observer, wire: Wire) -> None:
    script = f"trap 'echo goodbye; exit 0' TERM; echo ready > {wire.path}; while :; do sleep 0.05; done"
    cluster.create(worker("w-0", script))
    wire.read()
    observer.phase("w-0", PodPhase.RUNNING)
    assert "goodbye" not in cluster.logs("w-0")
    cluster.delete("w-0")
    gone = observer.deleted("w-0")
    assert gone.reason is EndReason.DELETED
    assert gone.exit_code in (0, None)  # None: some kubelets forget it with the container
    assert cluster.list() == []


def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace(cluster: Cluster, observer: Observer, wire: Wire) -> None:
    script = f"trap '' TERM; echo ready > {wire.path}; while :; do sleep 0.05; done"
    cluster.create(worker("w-0", script, grace_s=0.3))
    wire.read()
    observer.phase("w-0", PodPhase.RUNNING)
    cluster.delete("w-0")
    gone = observer.deleted("w-0")
    assert gone.reason is EndReason.DELETED
    assert gone.exit_code in (128 + signal.SIGKILL, None)


def test_a_second_deletion_may_shorten_the_grace(cluster: Cluster, observer: Observer, wire: Wire) -> None:
    script = f"trap '' TERM; echo ready > {wire.path}; while :; do sleep 0.05; done"
    cluster.create(worker("w-0", script, grace_s=1000))
    wire.read()
    observer.phase("w-0", PodPhase.RUNNING)
    cluster.delete("w-0")
    with pytest.raises(ElasticDLError, match="exists already"):
        cluster.create(worker("w-0"))
    cluster.delete("w-0", grace_s=0)
    assert observer.deleted("w-0").exit_code in (128 + signal.SIGKILL, None)  # None: gone before it was killed


def test_a_stopped_pod_can_be_deleted(runtime: Runtime, observer: Observer) -> None:
    runtime.cluster.create(worker("w-0", grace_s=0.2))
    runtime.signal(observer.phase("w-0", PodPhase.RUNNING), signal.SIGSTOP)
    runtime.cluster.delete("w-0")
    assert observer.deleted("w-0").reason is EndReason.DELETED


def test_deleting_what_does_not_exist_is_no_error(cluster: Cluster) -> None:
    cluster.delete("nobody")


def test_logs_of_what_does_not_exist_are_an_error(cluster: Cluster) -> None:
    with pytest.raises(ElasticDLError, match="no pod unknown"):
        cluster.logs("unknown")


def test_a_failed_pod_is_restarted_in_place(runtime: Runtime, observer: Observer) -> None:
    lives = runtime.directory / "lives"
    script = f'echo life; echo x >> {lives}; test "$(wc -l < {lives})" -ge 2'
    created = runtime.cluster.create(master("m", script, restart_policy=RestartPolicy.ON_FAILURE))
    ended = observer.ended_pod("m")
    assert (ended.uid, ended.restarts, ended.reason) == (created.uid, 1, EndReason.COMPLETED)
    assert lives.read_text().split() == ["x", "x"]
    assert runtime.cluster.logs("m").splitlines()[-1] == "life"


def test_a_killed_pod_is_restarted_in_place(runtime: Runtime, observer: Observer) -> None:
    created = runtime.cluster.create(master("m", restart_policy=RestartPolicy.ON_FAILURE))
    runtime.signal(observer.phase("m", PodPhase.RUNNING), signal.SIGKILL)
    second = observer.until(lambda event: event.pod.restarts == 1).pod
    assert (second.uid, second.phase) == (created.uid, PodPhase.RUNNING)


def test_a_watch_begins_with_what_exists(cluster: Cluster, observer: Observer) -> None:
    cluster.create(worker("w-0"))
    observer.phase("w-0", PodPhase.RUNNING)
    cluster.create(worker("w-1", "true"))
    observer.ended_pod("w-1")
    late = Observer(cluster)
    late.ended_pod("w-1")
    assert [(event.type, event.pod.name, event.pod.phase) for event in late.seen] == [
        (EventType.ADDED, "w-0", PodPhase.RUNNING),
        (EventType.ADDED, "w-1", PodPhase.SUCCEEDED),
    ]


def test_two_watchers_see_the_same(cluster: Cluster, observer: Observer) -> None:
    second = Observer(cluster)
    cluster.create(worker("w-0", "exit 4"))
    for watcher in (observer, second):
        assert watcher.ended_pod("w-0").exit_code == 4
    assert second.seen[-1].pod == observer.seen[-1].pod  # on Kubernetes one may have begun when it had ended: ADDED


def test_closing_ends_a_watch_without_an_error(runtime: Runtime, observer: Observer) -> None:
    runtime.stop()
    assert observer.ended.wait(60)
    with pytest.raises(ElasticDLError):
        runtime.cluster.list()
