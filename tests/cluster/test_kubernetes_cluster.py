"""What only Kubernetes does to pods, and what its API server does to us; on a real one."""

from __future__ import annotations

import copy
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hollow_node import HollowNode
from kubernetes import client
from kubernetes.utils.quantity import parse_quantity
from local_agent import Observer
from real_cluster import JOB, NOWHERE, Manifests, Namespace, Pods
from tcp_proxy import TcpProxy

from elasticdl.cluster.cluster import EndReason, EventType, PodEvent, PodPhase, PodSpec, RestartPolicy, Role
from elasticdl.cluster.kubernetes import KubernetesCluster
from elasticdl.cluster.kubernetes_api import ApiServer
from elasticdl.cluster.kubernetes_causes import Causes
from elasticdl.cluster.kubernetes_memory import PodMemory
from elasticdl.cluster.kubernetes_watch import PodWatch
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.kubernetes.names import JOB_LABEL

pytestmark = pytest.mark.cluster

FOREVER = "exec sleep 1000"


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    adapter = Pods(tmp_path)
    yield adapter
    adapter.clean_up()


@pytest.fixture
def namespace(pods: Pods) -> Namespace:
    return pods.namespace


@pytest.fixture
def manifests(pods: Pods) -> Manifests:
    return pods.manifests


@pytest.fixture
def cluster(pods: Pods) -> KubernetesCluster:
    return pods.cluster


@pytest.fixture
def observer(cluster: KubernetesCluster) -> Observer:
    return Observer(cluster)


@pytest.fixture
def proxy(namespace: Namespace) -> Iterator[TcpProxy]:
    host, _, port = namespace.connection.server.removeprefix("https://").rpartition(":")
    between = TcpProxy(host, int(port))
    yield between
    between.close()


@pytest.fixture
def distant(namespace: Namespace, manifests: Manifests, proxy: TcpProxy) -> Iterator[KubernetesCluster]:
    """The same pods, seen through the proxy."""
    configuration = copy.deepcopy(namespace.connection.client.configuration)
    configuration.host = f"https://127.0.0.1:{proxy.port}"
    cluster = KubernetesCluster(namespace.name, JOB, manifests.of, client.ApiClient(configuration))
    yield cluster
    cluster.close()


def worker(name: str, script: str = FOREVER, **more: Any) -> PodSpec:
    return PodSpec(**({"name": name, "role": Role.WORKER, "index": 0, "command": ("sh", "-c", script)} | more))


def latest(observer: Observer) -> dict[str, PodEvent]:
    """The last event of every pod, by name."""
    return {event.pod.name: event for event in observer.seen}


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs something in a thread; its result, or its error, is in the list when the thread has ended."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except ElasticDLError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


# Why pods end ------------------------------------------------------------------------------------------------------


@pytest.fixture
def slot(namespace: Namespace) -> Iterator[dict[str, Any]]:
    """The resources of a container that takes a place of which the node has one."""
    name = f"example.com/{namespace.name}"
    paths = [f"/status/{kind}/{name.replace('/', '~1')}" for kind in ("capacity", "allocatable")]
    node = namespace.core.list_node(label_selector="kubernetes.io/hostname=node-0").items[0].metadata.name
    namespace.core.patch_node_status(node, [{"op": "add", "path": path, "value": "1"} for path in paths])
    yield {"resources": {"requests": {name: "1"}, "limits": {name: "1"}}}
    namespace.core.patch_node_status(node, [{"op": "remove", "path": path} for path in paths])


@pytest.fixture
def high(namespace: Namespace) -> Iterator[str]:
    """A PriorityClass above the default."""
    api = client.SchedulingV1Api(namespace.connection.client)
    api.create_priority_class({"metadata": {"name": namespace.name}, "value": 1000})
    yield namespace.name
    api.delete_priority_class(namespace.name)


def test_a_pod_that_gives_way_to_a_more_important_one_is_preempted(
    cluster: KubernetesCluster, observer: Observer, manifests: Manifests, slot: dict[str, Any], high: str
) -> None:
    manifests.container = slot
    cluster.create(worker("low"))
    observer.phase("low", PodPhase.RUNNING)
    manifests.spec = {"priorityClassName": high}
    cluster.create(worker("high"))
    ended = observer.ended_pod("low")
    assert (ended.phase, ended.reason) == (PodPhase.FAILED, EndReason.PREEMPTED)
    assert "high" in ended.message
    observer.until(lambda _: latest(observer)["low"].type is EventType.DELETED)
    assert latest(observer)["low"].pod.reason is EndReason.PREEMPTED
    if latest(observer)["high"].pod.phase is not PodPhase.RUNNING:
        observer.phase("high", PodPhase.RUNNING)


def test_an_evicted_pod_has_not_ended_by_its_own_fault(
    cluster: KubernetesCluster, observer: Observer, namespace: Namespace
) -> None:
    cluster.create(worker("w-0"))
    observer.phase("w-0", PodPhase.RUNNING)
    version = client.VersionApi(namespace.connection.client).get_code()
    tells = (int(version.major), int("".join(filter(str.isdigit, version.minor)))) >= (1, 26)
    eviction = {"apiVersion": f"policy/{'v1' if tells else 'v1beta1'}", "kind": "Eviction", "metadata": {"name": "w-0"}}
    namespace.core.create_namespaced_pod_eviction("w-0", namespace.name, eviction, _preload_content=False)
    assert observer.ended_pod("w-0").reason is (EndReason.EVICTED if tells else EndReason.DELETED)
    assert observer.deleted("w-0").phase is PodPhase.FAILED


def test_a_pod_beyond_its_memory_is_oom_killed(
    cluster: KubernetesCluster, observer: Observer, manifests: Manifests
) -> None:
    manifests.container = {"resources": {"requests": {"cpu": "10m"}, "limits": {"memory": "48Mi"}}}
    cluster.create(worker("w-0", command=("python", "-c", "bytearray(10**9)")))
    ended = observer.ended_pod("w-0")
    assert (ended.phase, ended.reason, ended.exit_code) == (PodPhase.FAILED, EndReason.OOM_KILLED, 137)
    assert "48Mi" in ended.message


def test_a_pod_between_two_lives_can_be_deleted(cluster: KubernetesCluster, observer: Observer) -> None:
    spec = worker("m", "echo why >&2; exit 1", role=Role.MASTER, restart_policy=RestartPolicy.ON_FAILURE)
    cluster.create(spec)
    waiting = observer.until(lambda event: "CrashLoopBackOff" in event.pod.message).pod
    assert waiting.phase is PodPhase.RUNNING
    assert waiting.message.endswith("why")
    cluster.delete("m")
    assert observer.deleted("m").reason is EndReason.DELETED


def test_a_pod_that_somebody_else_deletes_is_told_before_it_is_gone(
    cluster: KubernetesCluster, observer: Observer, namespace: Namespace
) -> None:
    cluster.create(worker("w-0"))
    observer.phase("w-0", PodPhase.RUNNING)
    namespace.core.delete_namespaced_pod("w-0", namespace.name)
    leaving = observer.until(lambda event: event.pod.message == "it is being deleted").pod
    assert (leaving.phase, leaving.reason) == (PodPhase.RUNNING, EndReason.NONE)
    assert observer.deleted("w-0").reason is EndReason.DELETED


def test_a_pod_on_a_lost_node_ends_as_lost_and_its_name_is_free(
    cluster: KubernetesCluster, observer: Observer, manifests: Manifests
) -> None:
    with HollowNode() as node:
        manifests.spec = node.placement
        first = cluster.create(worker("ps-0", role=Role.PS, grace_s=1))
        observer.phase("ps-0", PodPhase.RUNNING)
        node.kill()
        lost = observer.ended_pod("ps-0")
        assert (lost.phase, lost.reason) == (PodPhase.FAILED, EndReason.NODE_LOST)
        assert node.name in lost.message
        assert [(pod.uid, pod.reason) for pod in cluster.list()] == [(first.uid, EndReason.NODE_LOST)]
        manifests.spec = {}
        second = cluster.create(worker("ps-0", role=Role.PS))
        gone = observer.deleted("ps-0")
        assert (gone.uid, gone.reason) == (first.uid, EndReason.NODE_LOST)
        assert observer.phase("ps-0", PodPhase.RUNNING).uid == second.uid


# Why pods wait -----------------------------------------------------------------------------------------------------


def test_a_pod_that_fits_nowhere_says_so_and_can_be_deleted(
    cluster: KubernetesCluster, observer: Observer, manifests: Manifests
) -> None:
    manifests.spec = NOWHERE
    cluster.create(worker("w-0"))
    pending = observer.until(lambda event: event.pod.message != "").pod
    assert (pending.phase, pending.blocked) == (PodPhase.PENDING, "")
    assert "nodes are available" in pending.message
    assert cluster.logs("w-0") == ""
    cluster.delete("w-0")
    gone = observer.deleted("w-0")
    assert (gone.phase, gone.reason) == (PodPhase.FAILED, EndReason.DELETED)


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ({"image": "no-such-image:1", "imagePullPolicy": "Never"}, ["ErrImageNeverPull", "no-such-image:1"]),
        ({"image": "registry.invalid/a:1", "imagePullPolicy": "Always"}, ["ImagePullBackOff", "registry.invalid"]),
        ({"image": "NO IMAGE"}, ["InvalidImageName", "NO IMAGE"]),
        (
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "no-such-secret", "key": "a"}}}]},
            ["CreateContainerConfigError", "no-such-secret"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_pod_that_cannot_start_until_somebody_acts_is_blocked(
    cluster: KubernetesCluster, observer: Observer, manifests: Manifests, container: dict[str, Any], words: list[str]
) -> None:
    manifests.container = container
    cluster.create(worker("w-0"))
    pod = observer.until(lambda event: event.pod.blocked != "").pod
    assert pod.phase is PodPhase.PENDING
    assert all(word in pod.blocked for word in words)
    assert pod.message == pod.blocked


def test_a_failed_pull_is_told_with_its_reason(
    cluster: KubernetesCluster, observer: Observer, manifests: Manifests
) -> None:
    manifests.container = {"image": "registry.invalid/a:1", "imagePullPolicy": "Always"}
    cluster.create(worker("w-0"))
    blocked = observer.until(lambda event: event.pod.blocked != "").pod.blocked
    why = next(event.pod.message for event in observer.seen if event.pod.message.startswith("ErrImagePull"))
    assert blocked.endswith(why.removeprefix("ErrImagePull: "))


# Creating ----------------------------------------------------------------------------------------------------------


def test_a_hundred_pods_are_accepted_in_parallel_within_ten_seconds(
    cluster: KubernetesCluster, observer: Observer, manifests: Manifests
) -> None:
    manifests.spec = NOWHERE
    specs = [worker(f"w-{index}", index=index) for index in range(100)]
    begin = time.monotonic()
    with ThreadPoolExecutor(16) as threads:
        created = list(threads.map(cluster.create, specs))
    assert time.monotonic() - begin < 10
    expected = {pod.uid for pod in created}
    observer.until(lambda _: expected <= {event.pod.uid for event in observer.seen})
    assert {pod.uid for pod in cluster.list()} == expected


def test_a_quota_is_told_in_the_servers_words_and_can_be_raised(
    cluster: KubernetesCluster, namespace: Namespace, manifests: Manifests
) -> None:
    manifests.spec = NOWHERE
    namespace.core.create_namespaced_resource_quota(
        namespace.name, {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    )
    quotas = {"namespace": namespace.name}
    listing = namespace.core.list_namespaced_resource_quota
    namespace.await_object(
        lambda **more: listing(**quotas, **more), lambda quota: quota["status"].get("used", {}).get("pods") == "0"
    )
    cluster.create(worker("w-0"))
    with pytest.raises(ElasticDLError) as refused:
        cluster.create(worker("w-1"))
    assert refused.value.what.startswith("exceeded quota: few, requested: pods=1")
    namespace.core.patch_namespaced_resource_quota("few", namespace.name, {"spec": {"hard": {"pods": "2"}}})
    namespace.await_object(
        lambda **more: listing(**quotas, **more), lambda quota: quota["status"].get("hard", {}).get("pods") == "2"
    )
    assert cluster.create(worker("w-1")).name == "w-1"


def test_a_missing_right_is_named(namespace: Namespace, manifests: Manifests) -> None:
    token = namespace.core.create_namespaced_service_account_token("default", namespace.name, {"spec": {}})
    configuration = copy.deepcopy(namespace.connection.client.configuration)
    configuration.cert_file = configuration.key_file = None
    configuration.api_key = {"BearerToken": f"Bearer {token.status.token}"}
    cluster = KubernetesCluster(namespace.name, JOB, manifests.of, client.ApiClient(configuration))
    with pytest.raises(ElasticDLError, match=f"{namespace.name}:default has no right to create pods"):
        cluster.create(worker("w-0"))
    assert cluster.max_memory() is None
    cluster.close()


def test_what_the_server_finds_wrong_with_a_pod_is_told(cluster: KubernetesCluster, manifests: Manifests) -> None:
    manifests.spec = {"priorityClassName": "no-such-priority"}
    with pytest.raises(ElasticDLError, match="no-such-priority"):
        cluster.create(worker("w-0"))


def test_a_creation_whose_answer_is_lost_is_no_error(
    distant: KubernetesCluster, cluster: KubernetesCluster, observer: Observer, manifests: Manifests, proxy: TcpProxy
) -> None:
    manifests.spec = NOWHERE
    distant.list()
    proxy.mute()
    creating, results = in_background(lambda: distant.create(worker("w-0")))
    made = observer.until(lambda event: event.type is EventType.ADDED).pod
    proxy.cut()
    proxy.repair()
    creating.join()
    assert [pod.uid for pod in results] == [made.uid]
    assert [pod.uid for pod in cluster.list()] == [made.uid]


def test_a_creation_waits_for_a_server_that_is_away_for_a_moment(
    distant: KubernetesCluster, manifests: Manifests, proxy: TcpProxy
) -> None:
    manifests.spec = NOWHERE
    proxy.refuse()
    creating, results = in_background(lambda: distant.create(worker("w-0")))
    creating.join(2)
    assert creating.is_alive()
    proxy.repair()
    creating.join()
    assert [pod.name for pod in results] == ["w-0"]


def test_a_server_that_stays_away_is_an_error_that_names_it(distant: KubernetesCluster, proxy: TcpProxy) -> None:
    proxy.refuse()
    begin = time.monotonic()
    with pytest.raises(ElasticDLError, match=f"127.0.0.1:{proxy.port}.*refused"):
        distant.create(worker("w-0"))
    assert time.monotonic() - begin < 13


def test_a_deletion_hits_the_pod_that_was_known_and_no_later_one(
    cluster: KubernetesCluster, namespace: Namespace, manifests: Manifests
) -> None:
    manifests.spec = NOWHERE
    cluster.create(worker("w-0"))
    other = KubernetesCluster(namespace.name, JOB, manifests.of)
    other.delete("w-0")
    later = other.create(worker("w-0"))
    cluster.delete("w-0")
    assert [pod.uid for pod in other.list()] == [later.uid]
    other.close()


# Watching ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["cut", "stall", "refuse"])
def test_what_happens_while_a_watch_is_down_is_told_afterwards(
    distant: KubernetesCluster,
    cluster: KubernetesCluster,
    namespace: Namespace,
    manifests: Manifests,
    proxy: TcpProxy,
    fault: str,
) -> None:
    manifests.spec = NOWHERE
    observer = Observer(distant)
    for name in ("goes", "changes", "stays"):
        cluster.create(worker(name))
    observer.until(lambda _: len({event.pod.name for event in observer.seen}) == 3)
    getattr(proxy, fault)()
    cluster.delete("goes")
    namespace.core.patch_namespaced_pod("changes", namespace.name, {"metadata": {"labels": {"new": "label"}}})
    comes = cluster.create(worker("comes"))
    missed = threading.Event()
    missed.wait(2)  # the watch is down and tries
    proxy.repair()
    expected = {(EventType.DELETED, "goes"), (EventType.MODIFIED, "changes"), (EventType.ADDED, "comes")}
    observer.until(lambda _: expected <= {(event.type, event.pod.name) for event in observer.seen})
    final = latest(observer)
    assert final["goes"].pod.reason is EndReason.DELETED
    assert final["changes"].pod.labels["new"] == "label"
    assert final["comes"].pod.uid == comes.uid
    added = [event.pod.name for event in observer.seen if event.type is EventType.ADDED]
    assert sorted(added) == ["changes", "comes", "goes", "stays"]


def test_a_pod_that_ended_while_nobody_watched_has_its_reason(
    distant: KubernetesCluster, cluster: KubernetesCluster, observer: Observer, proxy: TcpProxy
) -> None:
    late = Observer(distant)
    cluster.create(worker("w-0", "exit 3"))
    cluster.create(worker("w-1"))
    late.until(lambda _: {event.pod.name for event in late.seen} == {"w-0", "w-1"})
    proxy.refuse()
    observer.until(lambda _: {"w-0"} <= {event.pod.name for event in observer.seen if event.pod.exit_code == 3})
    cluster.delete("w-1", grace_s=0)
    observer.deleted("w-1")
    proxy.repair()
    late.until(lambda _: {event.pod.phase for event in latest(late).values()} == {PodPhase.FAILED})
    final = latest(late)
    assert (final["w-0"].type, final["w-0"].pod.reason) == (EventType.MODIFIED, EndReason.ERROR)
    assert (final["w-1"].type, final["w-1"].pod.reason) == (EventType.DELETED, EndReason.DELETED)


def test_closing_ends_a_watch_of_a_server_that_is_silent(distant: KubernetesCluster, proxy: TcpProxy) -> None:
    observer = Observer(distant)
    distant.list()
    proxy.stall()
    distant.close()
    assert observer.ended.wait(30)  # it may wait for the head of an answer
    assert observer.error is None


class LongAgo(ApiServer):
    """An API server whose first list of pods is as old as the cluster; it is also what an `Observer` watches."""

    lists = 0

    def call(self, method: str, path: str, *arguments: Any, **named: Any) -> Any:
        answer = super().call(method, path, *arguments, **named)
        if path.endswith("/pods"):
            self.lists += 1
            if self.lists == 1:
                answer["metadata"]["resourceVersion"] = "1"
        return answer

    def watch(self) -> Iterator[PodEvent]:
        return PodWatch(self, f"{JOB_LABEL}={JOB}", PodMemory(Causes(self))).events()


def test_a_version_that_the_server_has_forgotten_leads_to_a_new_list(
    cluster: KubernetesCluster, namespace: Namespace, manifests: Manifests
) -> None:
    manifests.spec = NOWHERE
    cluster.create(worker("w-0"))
    server = LongAgo(namespace.connection.client, namespace.name)
    observer = Observer(server)  # type: ignore[arg-type]
    observer.until(lambda event: event.type is EventType.ADDED)
    cluster.create(worker("w-1"))
    observer.until(lambda event: event.pod.name == "w-1")
    assert [event.pod.name for event in observer.seen if event.type is EventType.ADDED] == ["w-0", "w-1"]
    assert server.lists == 2
    server.close()


# Limits ------------------------------------------------------------------------------------------------------------


def test_the_memory_that_a_pod_can_have_is_the_largest_nodes(cluster: KubernetesCluster, namespace: Namespace) -> None:
    nodes = namespace.core.list_node().items
    most = cluster.max_memory()
    assert most is not None
    assert 2**30 < most <= max(parse_quantity(node.status.capacity["memory"]) for node in nodes)


def test_the_memory_that_a_pod_can_have_is_bounded_by_its_namespace(
    cluster: KubernetesCluster, namespace: Namespace
) -> None:
    limit = {"type": "Container", "max": {"memory": "1Gi"}}
    namespace.core.create_namespaced_limit_range(
        namespace.name, {"metadata": {"name": f"limit-{uuid.uuid4().hex[:4]}"}, "spec": {"limits": [limit]}}
    )
    assert cluster.max_memory() == 2**30
