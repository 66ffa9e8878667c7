"""A queue for plain pods that behaves as Kueue's, on a server that Kueue does not run on.

Kueue's integration `pod` needs Kubernetes 1.27, whose pods can have scheduling gates; older servers drop that field.

As Kueue does it:
- each pod with the queue's label gets the label and the finalizer `kueue.x-k8s.io/managed`; the finalizer goes when the
  pod is being deleted or has ended;
- pods are admitted while quota is left: by priority, then by age in whole seconds. The order of pods of the same second
  is arbitrary there; here workers come first, the bad case for a job;
- an admitted pod keeps its quota until it has ended or is gone;
- a pod of higher priority preempts those of lower priority, the newest first: the condition TerminationTarget with
  Kueue's reason and message, then a deletion with the pod's own grace. An evicted pod is not admitted again, nor does
  Kueue make another.

In place of what the server lacks:
- the gate is the name of a scheduler that does not exist, with the condition that newer servers write for gated pods;
- its removal is the binding to the node. Pods with that scheduler and without the label are bound at once;
- the quota counts pods, and is an attribute here, not a ClusterQueue.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kubernetes
from kubernetes.client.exceptions import ApiException

from elasticdl_client.kubernetes.resources import QUEUE_LABEL
from tests.e2e_kubernetes.kubectl import apply as apply_to_cluster
from tests.e2e_kubernetes.kubectl import core, kubectl, list_pods, list_pods_and_version, the_node
from tests.e2e_kubernetes.locks import one_at_a_time, together
from tests.e2e_kubernetes.room import tenant
from tests.e2e_kubernetes.space import Space
from tests.e2e_kubernetes.waiting import wait_until

KUEUE = "kueue"
QUEUE = "team-a"
SCHEDULER = "queue-of-the-tests"
_GROUP = "kueue.x-k8s.io"
_VERSION = "v1beta1"
_MANAGED = f"{_GROUP}/managed"
_DEFINITION = f"localqueues.{_GROUP}"
_LOOK_S = 1
_ENDED = ("Succeeded", "Failed")
_GONE_OR_CHANGED = (404, 409)


def local_queue(name: str, namespace: str) -> dict[str, Any]:
    """Return a LocalQueue as the client looks for it."""
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": f"{_GROUP}/{_VERSION}", "kind": "LocalQueue", "metadata": metadata}


@contextlib.contextmanager
def local_queues() -> Iterator[None]:
    """While the cluster has Kueue's kind LocalQueue; the holder of the lock `KUEUE` knows that it has not."""
    with together(KUEUE, _remove_kind):
        with one_at_a_time(_DEFINITION):
            _define_kind()
        yield


def _define_kind() -> None:
    names = {"kind": "LocalQueue", "plural": "localqueues", "singular": "localqueue"}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": _VERSION, "served": True, "storage": True, "schema": schema}
    annotations = {"api-approved.kubernetes.io": "unapproved, a part of Kueue's"}
    apply_to_cluster(
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": _DEFINITION, "annotations": annotations},
            "spec": {"group": _GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
        }
    )
    kubectl("wait", "--for=condition=Established", f"crd/{_DEFINITION}", "--timeout=60s")
    wait_until("the kind of queues", lambda: _GROUP in _groups())


def _remove_kind() -> None:
    kubectl("delete", "crd", _DEFINITION)
    wait_until("the end of the kind of queues", lambda: _GROUP not in _groups())


def _groups() -> set[str]:
    """The groups of the API, as clients find them."""
    return {group.name for group in kubernetes.client.ApisApi(core().api_client).get_api_versions().groups}


class Queue:
    """The controller of one queue in one namespace; it works from its making until `close`.

    Args:
        namespace: whose pods it looks at.
        places: how many of them may be admitted at a time.

    Attributes:
        places: as above; a change takes effect within a second.
    """

    def __init__(self, namespace: str, places: int) -> None:
        self.places = places
        self._namespace = namespace
        self._node = the_node()
        self._closed = threading.Event()
        self._admitted: list[str] = []  # uids, the newest last
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="queue")
        self._work = self._executor.submit(self._control)

    def close(self) -> None:
        """End it and let go of its pods; raises what ended it before."""
        self._closed.set()
        self._executor.shutdown()
        for pod in list_pods(self._namespace, QUEUE_LABEL):
            self._try(self._let_go, pod)
        self._work.result()

    def service(self, replicas: int, image: str) -> dict[str, Any]:
        """Return a Deployment of high priority whose pods are in the queue."""
        manifest = tenant(replicas, image)
        template = manifest["spec"]["template"]
        template["metadata"]["labels"] = {**template["metadata"]["labels"], QUEUE_LABEL: QUEUE}
        template["spec"]["schedulerName"] = SCHEDULER
        template["spec"]["containers"][0]["resources"] = {}
        return manifest

    def _control(self) -> None:
        while not self._closed.is_set():
            pods, version = list_pods_and_version(self._namespace)
            self._reconcile([pod for pod in pods if pod["spec"]["schedulerName"] == SCHEDULER])
            self._await_change(version)

    def _await_change(self, version: str) -> None:
        stream = kubernetes.watch.Watch()
        for _ in stream.stream(
            core().list_namespaced_pod, self._namespace, resource_version=version, timeout_seconds=_LOOK_S
        ):
            stream.stop()

    def _reconcile(self, pods: list[Any]) -> None:
        queued = [pod for pod in pods if QUEUE_LABEL in pod["metadata"].get("labels", {})]
        for pod in pods:
            if pod not in queued and not _is_bound(pod):
                self._try(self._bind, pod)
        for pod in queued:
            if _is_leaving(pod) or _has_ended(pod):
                self._try(self._let_go, pod)
            elif not _is_bound(pod) and _MANAGED not in pod["metadata"]["labels"]:
                self._try(self._hold, pod)
        holders = [pod for pod in queued if _is_bound(pod) and not _has_ended(pod)]
        waiting = [pod for pod in queued if not _is_bound(pod) and not _is_leaving(pod)]
        waiting.sort(key=_turn)
        free = max(0, self.places - len(holders))
        for pod in waiting[:free]:
            self._try(self._bind, pod)
            self._admitted.append(pod["metadata"]["uid"])
        self._preempt(waiting[free:], holders)

    def _preempt(self, waiting: list[Any], holders: list[Any]) -> None:
        leaving = [pod for pod in holders if _is_leaving(pod)]
        candidates = [pod for pod in holders if pod not in leaving]
        candidates.sort(key=lambda pod: (_priority(pod), -self._admitted.index(pod["metadata"]["uid"])))
        for pod, victim in zip(waiting[len(leaving) :], candidates, strict=False):
            if _priority(victim) < _priority(pod):
                self._try(self._evict, victim, pod["metadata"]["uid"])

    @staticmethod
    def _try(action: Any, *arguments: Any) -> None:
        """Do something to a pod that may be gone or another one by now: the next look finds what is left to do."""
        try:
            action(*arguments)
        except ApiException as error:
            if error.status not in _GONE_OR_CHANGED:
                raise

    def _hold(self, pod: Any) -> None:
        managed = {"metadata": {"labels": {_MANAGED: "true"}, "finalizers": [_MANAGED]}}
        core().patch_namespaced_pod(_name(pod), self._namespace, managed)
        message = "Scheduling is blocked due to non-empty scheduling gates"
        self._set_condition(pod, "PodScheduled", "False", "SchedulingGated", message)

    def _bind(self, pod: Any) -> None:
        body = {"metadata": {"name": _name(pod)}, "target": {"kind": "Node", "name": self._node}}
        core().create_namespaced_pod_binding(  # its answer is not the Binding that the client expects
            _name(pod), self._namespace, body, _preload_content=False
        )

    def _evict(self, pod: Any, preemptor: str) -> None:
        message = (
            f"Preempted to accommodate a workload (UID: {preemptor}, JobUID: UNKNOWN) "
            "due to prioritization in the ClusterQueue"
        )
        self._set_condition(pod, "TerminationTarget", "True", "WorkloadEvictedDueToPreempted", message)
        core().delete_namespaced_pod(_name(pod), self._namespace, body={"preconditions": _of(pod)})

    def _let_go(self, pod: Any) -> None:
        if _MANAGED in pod["metadata"].get("finalizers", []):
            body = {"metadata": {"$deleteFromPrimitiveList/finalizers": [_MANAGED], **_of(pod)}}
            core().patch_namespaced_pod(_name(pod), self._namespace, body)

    def _set_condition(self, pod: Any, kind: str, status: str, reason: str, message: str) -> None:
        condition = {"type": kind, "status": status, "reason": reason, "message": message}
        body = {"metadata": _of(pod), "status": {"conditions": [condition]}}
        core().patch_namespaced_pod_status(_name(pod), self._namespace, body)


def _name(pod: Any) -> str:
    return str(pod["metadata"]["name"])


def _of(pod: Any) -> dict[str, str]:
    return {"uid": pod["metadata"]["uid"]}


def _is_bound(pod: Any) -> bool:
    return "nodeName" in pod["spec"]


def _is_leaving(pod: Any) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _has_ended(pod: Any) -> bool:
    return pod["status"]["phase"] in _ENDED


def _priority(pod: Any) -> int:
    return int(pod["spec"].get("priority", 0))


def _turn(pod: Any) -> tuple[int, str, bool, str]:
    is_worker = "-worker-" in _name(pod)
    return -_priority(pod), pod["metadata"]["creationTimestamp"], not is_worker, _name(pod)


@contextlib.contextmanager
def queue(space: Space, places: int) -> Iterator[Queue]:
    """While the namespace has the queue `QUEUE`, for jobs with --queue and --scheduler_name=SCHEDULER."""
    with local_queues():
        space.apply(local_queue(QUEUE, space.namespace))
        controller = Queue(space.namespace, places)
        try:
            yield controller
        finally:
            controller.close()
