"""The objects of jobs in a cluster as the API's own JSON: listed by label, deleted, and nothing decided.

Plain dictionaries with the API's names, so objects of any server version are read.

`delete_job` ends a job: its master first, then what owns the rest, then whatever has no owner.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from elasticdl_client.errors import JobError
from elasticdl_client.jobs.store import JobInfo
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError, Connection, checked

Object = Mapping[str, Any]
KINDS = ("pod", "config_map", "secret", "service", "network_policy")
_PLURALS = {"network_policy": "network policies"}


def list_objects(
    connection: Connection, kind: str, namespace: str, job: str = "", *, without: str = ""
) -> list[Object]:
    """The objects of jobs, or of one job.

    Args:
        connection: to the cluster.
        kind: one of `KINDS`.
        namespace: empty: all of them.
        job: empty: of every job.
        without: a label; those that have it are left out.

    Raises:
        ClusterError: the cluster does not answer, or refuses.
    """
    selector = f"{names.APP_LABEL}={names.APP},{names.JOB_LABEL}" + (f"={job}" if job else "")
    selector += f",!{without}" if without else ""
    api = _api(connection, kind)
    where = f"in namespace {namespace}" if namespace else "of all namespaces"
    with connection.doing(f"list the {words(kind)} {where}"):
        if namespace:
            list_them = getattr(api, f"list_namespaced_{kind}")
            response = list_them(namespace, label_selector=selector, _preload_content=False)
        else:
            list_them = getattr(api, f"list_{kind}_for_all_namespaces")
            response = list_them(label_selector=selector, _preload_content=False)
        found = checked(response).data
        return list(json.loads(found)["items"])


def delete_object(connection: Connection, kind: str, namespace: str, name: str, **options: Any) -> None:
    """Deletes an object; one that is gone already is no error.

    Raises:
        ClusterError: the cluster does not answer, or refuses.
    """
    try:
        with connection.doing(f"delete the {words(kind).removesuffix('s')} {name} in namespace {namespace}"):
            delete = getattr(_api(connection, kind), f"delete_namespaced_{kind}")
            checked(delete(name, namespace, _preload_content=False, **options))
    except ClusterError as error:
        if error.status != 404:
            raise


def read_pod(connection: Connection, namespace: str, name: str) -> Object | None:
    """A pod; None if there is none.

    Raises:
        ClusterError: the cluster does not answer, or refuses.
    """
    try:
        with connection.doing(f"read the pod {name} in namespace {namespace}"):
            pod: Object = json.loads(
                checked(connection.core.read_namespaced_pod(name, namespace, _preload_content=False)).data
            )
    except ClusterError as error:
        if error.status != 404:
            raise
        return None
    return pod


def words(kind: str) -> str:
    """A kind for people, in the plural."""
    return _PLURALS.get(kind, kind.replace("_", " ") + "s")


def _api(connection: Connection, kind: str) -> Any:
    if kind != "network_policy":
        return connection.core
    from kubernetes.client import NetworkingV1Api

    return NetworkingV1Api(connection.client)


_LOOK_S = 0.5
_FORBIDDEN = 403


def delete_job(connection: Connection, job: JobInfo, wait_s: float | None) -> None:
    """Deletes a job and, unless `wait_s` is None, waits until nothing of it is left.

    Raises:
        JobError: something of it is still there.
        ClusterError: the cluster does not answer, or refuses.
    """
    master, owner = names.pod_name(job.name, "master", 0), names.job_object(job.name)
    delete_object(connection, "pod", job.namespace, master)  # or it would replace the pods that go
    delete_object(connection, "config_map", job.namespace, owner, propagation_policy="Background")
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
    """Whether it has come true in time; asks twice a second."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(_LOOK_S)
    return True


def _delete_orphans(connection: Connection, job: JobInfo) -> list[str]:
    """Delete the objects of a job that the garbage collector keeps; return all that are left, as kind/name."""
    left = []
    for kind in KINDS:
        for thing in _visible(connection, kind, job):
            metadata = thing["metadata"]
            left.append(f"{kind.replace('_', '')}/{metadata['name']}")
            if not metadata.get("ownerReferences") and not metadata.get("deletionTimestamp"):
                delete_object(connection, kind, job.namespace, metadata["name"])
    return left


def _visible(connection: Connection, kind: str, job: JobInfo) -> list[Object]:
    """The objects of a kind; none where the user may not list them, and the garbage collector has to do."""
    try:
        return list_objects(connection, kind, job.namespace, job.name)
    except ClusterError as error:
        if error.status != _FORBIDDEN or kind in ("pod", "config_map"):
            raise
        return []
