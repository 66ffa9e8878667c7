"""The objects of jobs in a cluster as JSON of the API: listed by label, read as `PodStatus`, and deleted.

This module decides nothing.

Objects are plain dictionaries with the API's names, so those of any server version can be read.

`delete_job` deletes a job: its master first, then the owner of the other objects, then objects without an owner.
`PodStatus` has a pod's role, its phase, and the API's reason why it is pending or has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from elasticdl_client.errors import JobError
from elasticdl_client.job_status import RUNS_AGAIN, PodStatus
from elasticdl_client.jobs.store import JobInfo
from elasticdl_client.kubernetes import names, resources
from elasticdl_client.kubernetes.api import ClusterError, Connection
from elasticdl_client.kubernetes.api_client import kind_path

Object = Mapping[str, Any]
KINDS = ("pod", "config_map", "secret", "service", "network_policy")
_PLURALS = {"network_policy": "network policies"}


def list_objects(
    connection: Connection, kind: str, namespace: str, job: str = "", *, without: str = ""
) -> list[Object]:
    """Return the objects of all jobs, or of one job.

    Args:
        connection: Connection to the cluster.
        kind: One of `KINDS`.
        namespace: Empty: all namespaces.
        job: Name of the job; empty: all jobs.
        without: A label; objects that have it are left out.

    Raises:
        ClusterError: The cluster does not answer, or refuses.
    """
    selector = f"{names.APP_LABEL}={names.APP},{names.JOB_LABEL}" + (f"={job}" if job else "")
    selector += f",!{without}" if without else ""
    where = f"in namespace {namespace}" if namespace else "of all namespaces"
    with connection.doing(f"list the {words(kind)} {where}"):
        return list(connection.get(_path(kind, namespace), [("labelSelector", selector)])["items"])


def delete_object(
    connection: Connection, kind: str, namespace: str, name: str, options: Mapping[str, Any] | None = None
) -> None:
    """Delete an object; it is no error if the object does not exist.

    Args:
        connection: Connection to the cluster.
        kind: One of `KINDS`.
        namespace: Namespace of the object.
        name: Name of the object.
        options: DeleteOptions of the API, by their JSON names.

    Raises:
        ClusterError: the cluster does not answer, or refuses.
    """
    try:
        with connection.doing(f"delete the {words(kind).removesuffix('s')} {name} in namespace {namespace}"):
            connection.delete(_path(kind, namespace, name), options)
    except ClusterError as error:
        if error.status != 404:
            raise


def read_pod(connection: Connection, namespace: str, name: str) -> Object | None:
    """Return a pod; None if it does not exist.

    Raises:
        ClusterError: the cluster does not answer, or refuses.
    """
    try:
        with connection.doing(f"read the pod {name} in namespace {namespace}"):
            pod: Object = connection.get(_path("pod", namespace, name))
    except ClusterError as error:
        if error.status != 404:
            raise
        return None
    return pod


def words(kind: str) -> str:
    """Return the plural name of a kind, for messages."""
    return _PLURALS.get(kind, kind.replace("_", " ") + "s")


def _path(kind: str, namespace: str, name: str = "") -> str:
    return kind_path(kind.title().replace("_", ""), name, namespace)


_LOOK_S = 0.5
_FORBIDDEN = 403


def delete_job(connection: Connection, job: JobInfo, wait_s: float | None) -> None:
    """Delete a job and, unless `wait_s` is None, wait until none of its objects is left.

    Raises:
        JobError: something of it is still there.
        ClusterError: the cluster does not answer, or refuses.
    """
    master, owner = names.pod_name(job.name, "master", 0), names.job_object(job.name)
    delete_object(connection, "pod", job.namespace, master)  # first: it would replace the pods that are deleted
    delete_object(connection, "config_map", job.namespace, owner, {"propagationPolicy": "Background"})
    left: list[str] = []

    def is_gone() -> bool:
        left[:] = _delete_orphans(connection, job)
        return not left

    if not is_gone() and wait_s is not None and not wait_until(is_gone, wait_s):
        shown = ", ".join(left[:5]) + (", …" if len(left) > 5 else "")
        raise JobError(
            f"After {wait_s:g} s there is still something of job {job.name}: {shown}.",
            "It goes by itself. A pod of a lost node goes with "
            f"`kubectl delete pod POD -n {job.namespace} --grace-period=0 --force`.",
        )


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether a condition becomes true in time; check it twice a second."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(_LOOK_S)
    return True


def _delete_orphans(connection: Connection, job: JobInfo) -> list[str]:
    """Delete the objects of a job that the garbage collector leaves; return all that still exist, as kind/name."""
    left = []
    for kind in KINDS:
        for thing in _visible(connection, kind, job):
            metadata = thing["metadata"]
            left.append(f"{kind.replace('_', '')}/{metadata['name']}")
            if not metadata.get("ownerReferences") and not metadata.get("deletionTimestamp"):
                delete_object(connection, kind, job.namespace, metadata["name"])
    return left


def _visible(connection: Connection, kind: str, job: JobInfo) -> list[Object]:
    """Return the objects of a kind; none if the user may not list them: then the garbage collector must delete them."""
    try:
        return list_objects(connection, kind, job.namespace, job.name)
    except ClusterError as error:
        if error.status != _FORBIDDEN or kind in ("pod", "config_map"):
            raise
        return []


_ROLES = ("master", "ps", "worker")
_LONGEST_MESSAGE = 500
IN_THE_MAKING = ("ContainerCreating", "PodInitializing")


def label(pod: Mapping[str, Any], name: str) -> str:
    """Return a label of an object; empty if it is not set."""
    return str((pod["metadata"].get("labels") or {}).get(name, ""))


def is_going(pod: Mapping[str, Any]) -> bool:
    """Return whether an object is being deleted."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def sort_key(pod: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return a sort key: master, parameter servers, workers, each by number."""
    role, index = label(pod, names.ROLE_LABEL), label(pod, names.INDEX_LABEL)
    number = int(index) if index.isdecimal() else 0
    return (_ROLES.index(role) if role in _ROLES else len(_ROLES), number, str(pod["metadata"]["name"]))


def container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the status of the pod's main container; empty while there is none."""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    own = names.own_container(pod["metadata"]["name"], [one["name"] for one in pod["spec"]["containers"]])
    return next((status for status in statuses if status.get("name") == own), {})


def is_being_made(pod: Mapping[str, Any]) -> bool:
    """Return whether the kubelet is creating the container, or tries to; only Events say what it waits for."""
    state = container(pod).get("state") or {}
    reason = (state.get("waiting") or {}).get("reason", "")
    is_placed = _phase(pod) == "Pending" and "nodeName" in pod["spec"] and not is_going(pod)
    return is_placed and reason in ("", *IN_THE_MAKING)


def pod_status(pod: Mapping[str, Any]) -> PodStatus:
    """Return the status of a pod."""
    status = pod.get("status", {})
    return PodStatus(
        name=str(pod["metadata"]["name"]),
        role=label(pod, names.ROLE_LABEL),
        phase=_phase(pod),
        message=_message(pod, status)[:_LONGEST_MESSAGE],
        restarts=int(container(pod).get("restartCount", 0)),
    )


def _phase(pod: Mapping[str, Any]) -> str:
    """Return the pod's phase; that of its main container if that has ended and the pod's phase is not updated yet."""
    phase = str(pod.get("status", {}).get("phase", "Pending"))
    ended = (container(pod).get("state") or {}).get("terminated")
    if phase == "Running" and ended and pod["spec"].get("restartPolicy") == "Never":
        return "Failed" if ended.get("exitCode") else "Succeeded"
    return phase


def _message(pod: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    parts = ["Terminating"] if is_going(pod) else []
    state = container(pod).get("state") or {}
    waiting, terminated = state.get("waiting"), state.get("terminated")
    before = (container(pod).get("lastState") or {}).get("terminated")
    disrupted = _condition(status, "DisruptionTarget", "True") or _condition(status, "TerminationTarget", "True")
    if disrupted:  # PreemptionByScheduler, EvictionByEvictionAPI, DeletionByTaintManager, Kueue's WorkloadEvicted…
        parts.append(_joined(disrupted))
    elif status.get("phase") == "Failed" and status.get("reason"):  # Evicted, NodeLost, DeadlineExceeded
        parts.append(_joined(status))
    elif terminated:
        parts.append(_ending(terminated))
    elif waiting:
        parts.append(_joined(waiting) + (f"; before: {_ending(before)}" if before else ""))
    elif status.get("phase") == "Pending":
        parts.append(resources.why_gated(pod) or _joined(_condition(status, "PodScheduled", "False")))
    elif before:
        parts.append(f"{RUNS_AGAIN}before: {_ending(before)}")
    return "; ".join(part for part in parts if part)


def _condition(status: Mapping[str, Any], kind: str, value: str) -> Mapping[str, Any]:
    """Return the pod's condition of this type if it has this value; else an empty mapping."""
    found = (one for one in status.get("conditions") or () if (one.get("type"), one.get("status")) == (kind, value))
    return next(found, {})


def _ending(terminated: Mapping[str, Any]) -> str:
    reason = str(terminated.get("reason") or "")
    code = terminated.get("exitCode", 0)
    return reason if reason == "Completed" or code == 0 else f"{reason or 'Error'}, exit code {code}"


def _joined(thing: Mapping[str, Any]) -> str:
    reason, message = str(thing.get("reason") or ""), str(thing.get("message") or "").strip()
    return f"{reason}: {message}" if reason and message else reason or message
