"""The end of a job in a cluster: its master first, then what owns the rest, then whatever has no owner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elasticdl_client.errors import JobError
from elasticdl_client.jobs.cluster_objects import KINDS, Object, delete_object, list_objects
from elasticdl_client.jobs.job import JobInfo
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError, Connection

_LOOK_S = 0.5
_FORBIDDEN = 403


def delete(connection: Connection, job: JobInfo, wait_s: float | None) -> None:
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
