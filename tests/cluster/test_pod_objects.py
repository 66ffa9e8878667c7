"""Readings of a pod's object: words of servers and kubelets that the tests' cluster does not use."""

from __future__ import annotations

from typing import Any

import pytest

from elasticdl.cluster.cluster import EndReason, PodPhase
from elasticdl.cluster.kubernetes.pods import ended_before_deletion, node_is_silent, read_pod
from elasticdl.protocol import Role
from elasticdl_client.kubernetes.names import pod_labels


def shown(phase: str, state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    """A pod's object, as a server shows it."""
    metadata = {"name": "w-0", "uid": "u", "labels": pod_labels("job", "worker", 3)}
    containers = [{"name": "sidecar"}, {"name": "w-0", "resources": {"limits": {"memory": "1Gi"}}}]
    statuses = [
        {"name": "sidecar", "restartCount": 7, "state": {"terminated": {"exitCode": 0}}},
        {"name": "w-0", "restartCount": 2, "state": state},
    ]
    return {
        "metadata": metadata,
        "spec": {"containers": containers, "nodeName": "n"},
        "status": {"phase": phase, **({"containerStatuses": statuses} if state else {}), **status},
    }


def terminated(code: int, **more: Any) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, **more}}


def disruption(reason: str) -> list[dict[str, Any]]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "it had to go"}]


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("PreemptionByScheduler", EndReason.PREEMPTED),
        ("EvictionByEvictionAPI", EndReason.EVICTED),
        ("TerminationByKubelet", EndReason.EVICTED),
        ("DeletionByTaintManager", EndReason.NODE_LOST),
        ("DeletionByPodGC", EndReason.NODE_LOST),
        ("AWordToCome", EndReason.EVICTED),
    ],
)
def test_a_disruption_says_why_a_pod_has_ended(word: str, reason: EndReason) -> None:
    pod = read_pod(shown("Failed", terminated(137), conditions=disruption(word)))
    assert pod is not None
    assert (pod.reason, pod.message, pod.exit_code, pod.node) == (reason, "it had to go", 137, "n")


def test_a_pod_that_runs_has_no_reason_yet_whatever_is_planned_for_it() -> None:
    pod = read_pod(shown("Running", {"running": {}}, conditions=disruption("PreemptionByScheduler")))
    assert pod is not None
    assert (pod.phase, pod.reason, pod.exit_code) == (PodPhase.RUNNING, EndReason.NONE, None)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("Evicted", EndReason.EVICTED),
        ("Preempting", EndReason.PREEMPTED),
        ("NodeLost", EndReason.NODE_LOST),
        ("OutOfmemory", EndReason.EVICTED),
        ("Shutdown", EndReason.EVICTED),
        ("DeadlineExceeded", EndReason.ERROR),
    ],
)
def test_the_kubelets_word_says_why_a_pod_has_ended(word: str, reason: EndReason) -> None:
    pod = read_pod(shown("Failed", reason=word, message="the node was low on memory"))
    assert pod is not None
    assert (pod.reason, pod.message, pod.exit_code) == (reason, "the node was low on memory", None)


@pytest.mark.parametrize(
    ("code", "word", "reason", "message"),
    [
        (0, "Completed", EndReason.COMPLETED, ""),
        (1, "Error", EndReason.ERROR, "exit code 1; its last lines:\nno such file"),
        (137, "Error", EndReason.KILLED, "killed by SIGKILL"),
        (143, "Error", EndReason.KILLED, "killed by SIGTERM"),
        (137, "OOMKilled", EndReason.OOM_KILLED, "killed because memory ran out (limit 1Gi)"),
        *((code, "Error", EndReason.ERROR, None) for code in (132, 134, 135, 136, 139, 255)),
    ],
)
def test_an_exit_code_says_why_a_pod_has_ended(code: int, word: str, reason: EndReason, message: str | None) -> None:
    said = {"message": "no such file\n"} if reason is EndReason.ERROR else {}
    pod = read_pod(shown("Failed" if code else "Succeeded", terminated(code, reason=word, **said)))
    assert pod is not None
    assert (pod.reason, pod.exit_code) == (reason, code)
    assert message is None or pod.message == message


def test_the_container_of_the_pods_name_counts_beside_others() -> None:
    pod = read_pod(shown("Running", {"running": {}}))
    assert pod is not None
    assert (pod.role, pod.index, pod.restarts) == (Role.WORKER, 3, 2)


def test_a_pod_without_a_role_is_none_of_the_jobs() -> None:
    other = shown("Running")
    other["metadata"]["labels"] = {"app": "elasticdl"}
    assert read_pod(other) is None


def test_a_pod_that_ended_before_it_was_deleted_has_ended_by_itself() -> None:
    pod = shown("Failed", terminated(1, finishedAt="2024-01-01T00:00:09Z"))
    pod["metadata"] |= {"deletionTimestamp": "2024-01-01T00:00:40Z", "deletionGracePeriodSeconds": 30}
    assert ended_before_deletion(pod)
    pod["metadata"]["deletionTimestamp"] = "2024-01-01T00:00:39Z"
    assert not ended_before_deletion(pod)


def test_a_pod_whose_status_lacks_its_containers_end_is_not_said_to_have_never_run() -> None:
    pod = shown("Failed", {"waiting": {"reason": "ContainerCreating"}})  # of one that was deleted while it ran
    found = read_pod(pod)
    assert found is not None
    assert found.message == "its status does not say how its containers ended, or whether they ran"


def test_a_pod_that_was_deleted_between_two_lives_was_deleted() -> None:
    pod = shown("Failed", terminated(1, finishedAt="2024-01-01T00:00:09Z"))
    pod["metadata"] |= {"deletionTimestamp": "2024-01-01T00:00:40Z", "deletionGracePeriodSeconds": 30}
    pod["spec"]["restartPolicy"] = "OnFailure"
    assert not ended_before_deletion(pod)
    pod["status"]["reason"] = "DeadlineExceeded"  # there was no life to come
    assert ended_before_deletion(pod)


@pytest.mark.parametrize(("code", "phase"), [(0, PodPhase.SUCCEEDED), (1, PodPhase.FAILED)])
def test_a_pod_ends_with_its_own_container_whatever_runs_beside_it(code: int, phase: PodPhase) -> None:
    pod = shown("Running", terminated(code))
    pod["spec"]["restartPolicy"] = "Never"
    read = read_pod(pod)
    assert read is not None
    assert (read.phase, read.exit_code) == (phase, code)
    pod["spec"]["restartPolicy"] = "OnFailure"
    again = read_pod(pod)
    assert again is not None
    assert (again.phase, again.exit_code) == (PodPhase.RUNNING, None)


def test_how_a_native_sidecar_ends_says_nothing_of_its_pod() -> None:
    pod = shown("Failed", terminated(0), initContainerStatuses=[{"name": "mesh", "state": terminated(137)}])
    pod["spec"]["initContainers"] = [{"name": "mesh", "restartPolicy": "Always"}]
    read = read_pod(pod)
    assert read is not None
    assert (read.reason, read.exit_code) == (EndReason.COMPLETED, 0)
    pod["spec"]["initContainers"] = [{"name": "mesh"}]
    read = read_pod(pod)
    assert read is not None
    assert (read.reason, read.exit_code) == (EndReason.KILLED, 137)


def test_a_node_is_silent_when_the_cluster_and_the_kubelet_disagree() -> None:
    pod = shown("Running", {"running": {}}, conditions=[{"type": "Ready", "status": "False"}])
    for status in pod["status"]["containerStatuses"]:
        status["ready"] = True
    assert node_is_silent(pod)
    pod["status"]["containerStatuses"][1]["ready"] = False
    assert not node_is_silent(pod)


def test_a_pod_that_a_queue_holds_back_says_so_and_is_not_blocked() -> None:
    held = shown("Pending", conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}])
    held["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team-a"
    held["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    pod = read_pod(held)
    assert pod is not None
    assert (pod.phase, pod.message, pod.blocked) == (PodPhase.PENDING, "waiting in queue team-a", "")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Preempted to accommodate a higher priority Workload", EndReason.PREEMPTED),
        ("The ClusterQueue is stopped", EndReason.EVICTED),
    ],
)
def test_a_pod_that_a_queue_takes_back_had_to_go(said: str, reason: EndReason) -> None:
    target = [{"type": "TerminationTarget", "status": "True", "reason": "WorkloadEvicted", "message": said}]
    pod = read_pod(shown("Failed", terminated(143), conditions=target))
    assert pod is not None
    assert (pod.reason, pod.message) == (reason, said)
