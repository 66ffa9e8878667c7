"""Why pods of Kubernetes wait and why they end, in its own words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from explained_pods import diagnoses_of, diagnosis_of
from hollow_node import HollowNode
from kubernetes import client
from local_agent import Observer
from pod_specs import worker
from real_cluster import NOWHERE, Manifests, Namespace

from elasticdl.cluster.cluster import CannotResize, EndReason, EventType, PodEvent, PodPhase, RestartPolicy
from elasticdl.cluster.kubernetes.adapter import KubernetesCluster
from elasticdl.protocol import Role
from elasticdl_client.explain.diagnosis import Trouble

pytestmark = pytest.mark.cluster


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
    api = client.SchedulingV1Api(namespace.core.api_client)
    api.create_priority_class({"metadata": {"name": namespace.name}, "value": 1000})
    yield namespace.name
    api.delete_priority_class(namespace.name)


def _as_worker(event: PodEvent) -> PodEvent:
    return replace(event, pod=replace(event.pod, role=Role.WORKER))


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
    diagnosis = diagnosis_of(observer.seen, "low")
    assert diagnosis.trouble is Trouble.PREEMPTED
    assert "high" in str(diagnosis.evidence["message"])
    observer.until(lambda _: observer.latest()["low"].type is EventType.DELETED)
    assert observer.latest()["low"].pod.reason is EndReason.PREEMPTED
    if observer.latest()["high"].pod.phase is not PodPhase.RUNNING:
        observer.phase("high", PodPhase.RUNNING)


def test_an_evicted_pod_has_not_ended_by_its_own_fault(
    cluster: KubernetesCluster, observer: Observer, namespace: Namespace
) -> None:
    cluster.create(worker("w-0"))
    observer.phase("w-0", PodPhase.RUNNING)
    version = client.VersionApi(namespace.core.api_client).get_code()
    tells = (int(version.major), int("".join(filter(str.isdigit, version.minor)))) >= (1, 26)
    eviction = {"apiVersion": f"policy/{'v1' if tells else 'v1beta1'}", "kind": "Eviction", "metadata": {"name": "w-0"}}
    namespace.core.create_namespaced_pod_eviction("w-0", namespace.name, eviction, _preload_content=False)
    assert observer.ended_pod("w-0").reason is (EndReason.EVICTED if tells else EndReason.DELETED)
    assert observer.deleted("w-0").phase is PodPhase.FAILED
    assert diagnosis_of(observer.seen, "w-0").trouble is (Trouble.EVICTED if tells else Trouble.DELETED)


def test_the_users_line_is_shown_for_an_error_longer_than_a_pods_kept_log(
    cluster: KubernetesCluster, observer: Observer
) -> None:
    nested = "for _ in range(30): nested = [nested]\n"
    script = f"import copy, threading\nnested = threading.Lock()\n{nested}copy.deepcopy(nested)"
    cluster.create(worker("w-0", command=("python", "-c", script)))
    ended = observer.ended_pod("w-0")
    assert ended.message == (
        "exit code 1: TypeError: cannot pickle '_thread.lock' object\n  File \"<string>\", line 4, in <module>"
    )
    diagnosis = diagnosis_of(observer.seen, "w-0")
    assert (diagnosis.trouble, diagnosis.evidence["exit_code"]) == (Trouble.PROGRAM_FAILED, 1)
    assert "line 4, in <module>" in "\n".join(diagnosis.why)


def test_a_pod_beyond_its_memory_is_oom_killed(
    cluster: KubernetesCluster, observer: Observer, manifests: Manifests
) -> None:
    manifests.container = {"resources": {"requests": {"cpu": "10m"}, "limits": {"memory": "48Mi"}}}
    # Docker learns of the kernel's kill and of the container's end by two ways: when the first is the slower one, the
    # kubelet has reported a plain kill by then, for good.  So three pods may try.
    for name in ("w-0", "w-1", "w-2"):
        cluster.create(worker(name, command=("python", "-c", "bytearray(10**9)")))
        ended = observer.ended_pod(name)
        assert (ended.phase, ended.exit_code) == (PodPhase.FAILED, 137)
        if ended.reason is not EndReason.KILLED:
            break
    assert ended.reason is EndReason.OOM_KILLED
    assert "48Mi" in ended.message
    diagnosis = diagnosis_of(observer.seen, ended.name)
    assert diagnosis.trouble is Trouble.OUT_OF_MEMORY
    assert "48Mi" in str(diagnosis.evidence["message"])


def test_a_pod_runs_on_whether_the_server_resizes_it_or_not(
    cluster: KubernetesCluster, observer: Observer, manifests: Manifests, namespace: Namespace
) -> None:
    version = client.VersionApi(namespace.core.api_client).get_code()
    has_resize = (int(version.major), int("".join(filter(str.isdigit, version.minor)))) >= (1, 33)
    manifests.container = {"resources": {"requests": {"cpu": "10m"}, "limits": {"memory": "48Mi"}}}
    cluster.create(worker("w-0"))
    uid = observer.phase("w-0", PodPhase.RUNNING).uid
    manifests.container = {"resources": {"requests": {"cpu": "10m"}, "limits": {"memory": "64Mi"}}}
    if has_resize:
        assert cluster.resize(worker("w-0")) == 64 << 20
    else:
        with pytest.raises(CannotResize):
            cluster.resize(worker("w-0"))
    assert [(pod.uid, pod.phase, pod.restarts) for pod in cluster.list()] == [(uid, PodPhase.RUNNING, 0)]


def test_a_pod_between_two_lives_can_be_deleted(cluster: KubernetesCluster, observer: Observer) -> None:
    spec = worker("m", "echo why >&2; exit 1", role=Role.MASTER, restart_policy=RestartPolicy.ON_FAILURE)
    cluster.create(spec)
    waiting = observer.until(lambda event: "CrashLoopBackOff" in event.pod.message).pod
    assert waiting.phase is PodPhase.RUNNING
    assert waiting.message.endswith("why")
    cluster.delete("m")
    assert observer.deleted("m").reason is EndReason.DELETED


def test_a_pod_that_another_client_deletes_is_reported_before_it_is_gone(
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
        diagnosis = next(one for one in diagnoses_of([_as_worker(event) for event in observer.seen], "ps-0"))
        assert (diagnosis.trouble, diagnosis.evidence["node"]) == (Trouble.NODE_LOST, node.name)
        assert [(pod.uid, pod.reason) for pod in cluster.list()] == [(first.uid, EndReason.NODE_LOST)]
        manifests.spec = {}
        second = cluster.create(worker("ps-0", role=Role.PS))
        gone = observer.deleted("ps-0")
        assert (gone.uid, gone.reason) == (first.uid, EndReason.NODE_LOST)
        assert observer.phase("ps-0", PodPhase.RUNNING).uid == second.uid


def test_a_pod_that_fits_nowhere_says_so_and_can_be_deleted(
    cluster: KubernetesCluster, observer: Observer, manifests: Manifests
) -> None:
    manifests.spec = NOWHERE
    cluster.create(worker("w-0"))
    pending = observer.until(lambda event: event.pod.message != "").pod
    assert (pending.phase, pending.blocked) == (PodPhase.PENDING, "")
    assert "nodes are available" in pending.message
    assert diagnosis_of(observer.seen, "w-0").trouble is Trouble.NO_MATCHING_NODE
    assert cluster.logs("w-0") == ""
    cluster.delete("w-0")
    gone = observer.deleted("w-0")
    assert (gone.phase, gone.reason) == (PodPhase.FAILED, EndReason.DELETED)


@pytest.mark.parametrize(
    ("container", "words", "trouble"),
    [
        (
            {"image": "no-such-image:1", "imagePullPolicy": "Never"},
            ["ErrImageNeverPull", "no-such-image:1"],
            Trouble.IMAGE_NOT_FOUND,
        ),
        (
            {"image": "registry.invalid/a:1", "imagePullPolicy": "Always"},
            ["ImagePullBackOff", "registry.invalid"],
            Trouble.IMAGE_NOT_FOUND,
        ),
        ({"image": "NO IMAGE"}, ["InvalidImageName", "NO IMAGE"], Trouble.IMAGE_NOT_FOUND),
        (
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "no-such-secret", "key": "a"}}}]},
            ["CreateContainerConfigError", "no-such-secret"],
            Trouble.CONTAINER_NOT_CREATED,
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_pod_that_cannot_start_without_intervention_is_blocked(
    cluster: KubernetesCluster,
    observer: Observer,
    manifests: Manifests,
    container: dict[str, Any],
    words: list[str],
    trouble: Trouble,
) -> None:
    manifests.container = container
    cluster.create(worker("w-0"))
    pod = observer.until(lambda event: event.pod.blocked != "").pod
    assert pod.phase is PodPhase.PENDING
    assert all(word in pod.blocked for word in words)
    assert pod.message == pod.blocked
    diagnosis = diagnosis_of(observer.seen, "w-0")
    assert (diagnosis.trouble, diagnosis.is_fatal) == (trouble, True)
    assert diagnosis.evidence["message"] == pod.blocked


def test_a_failed_pull_is_reported_with_its_reason(
    cluster: KubernetesCluster, observer: Observer, manifests: Manifests
) -> None:
    manifests.container = {"image": "registry.invalid/a:1", "imagePullPolicy": "Always"}
    cluster.create(worker("w-0"))
    blocked = observer.until(lambda event: event.pod.blocked != "").pod.blocked
    tries = [event.pod.message for event in observer.seen if event.pod.message.startswith("ErrImagePull")]
    assert blocked.endswith(tries[-1].removeprefix("ErrImagePull: "))  # each may have failed in other words
