"""Faults of a job on Kubernetes, with the rights of a user of its namespace: pods are deleted without grace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elasticdl_client.chaos.faults import Fault, FaultKind, Victim
from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.jobs import cluster_objects
from elasticdl_client.jobs.cluster_objects import delete_object, list_objects, read_pod
from elasticdl_client.jobs.store import JobInfo
from elasticdl_client.kubernetes import names, rbac
from elasticdl_client.kubernetes.api import ClusterError, Connection
from elasticdl_client.kubernetes.rbac import Right

_RIGHTS = (Right("", "pods", ("delete", "list")),)
_MASTER_RIGHTS = (Right("", "pods", ("create", "delete", "get", "list")),)
_CONFLICT = 409
_IMPOSSIBLE = {
    FaultKind.STOP: "--stop is for local jobs: the first process of a container ignores SIGSTOP from inside, and users "
    "of a namespace have no access to its nodes.",
    FaultKind.FILL_DISK: "--fill_disk is for local jobs: the volume of a job in a cluster is not mounted here.",
}


class ClusterFaults:
    """A fault injector (see `FaultInjector`).

    Args:
        connection: Connection to the cluster.
        job: in it.
        make_master: gives the job a new master when its pod is gone, as `elasticdl resume` does.
    """

    def __init__(self, connection: Connection, job: JobInfo, make_master: Callable[[], object]) -> None:
        self._connection = connection
        self._job = job
        self._make_master = make_master

    def check(self, faults: Sequence[Fault]) -> None:
        """See `FaultInjector`."""
        for fault in faults:
            if fault.kind in _IMPOSSIBLE:
                raise FlagError(_IMPOSSIBLE[fault.kind], "Give --kill alone.")
        needed = _MASTER_RIGHTS if any(fault.role == "master" for fault in faults) else _RIGHTS
        missing = rbac.missing_of_user(self._connection, self._job.namespace, needed)
        if missing:
            raise JobError(
                f"These rights in the namespace {self._job.namespace} are missing: {rbac.described(missing)}.",
                "`elasticdl rbac --print --for=user --user=NAME` prints a Role that has them.",
            )

    def running(self, role: str) -> list[Victim]:
        """See `FaultInjector`."""
        found = list_objects(self._connection, "pod", self._job.namespace, self._job.name)
        return [
            Victim(
                role if role == "master" else f"{role}-{cluster_objects.label(pod, names.INDEX_LABEL)}",
                str(pod["metadata"]["name"]),
                role,
                int(cluster_objects.label(pod, names.INDEX_LABEL) or 0),
                str(pod["metadata"]["uid"]),
            )
            for pod in sorted(found, key=cluster_objects.sort_key)
            if cluster_objects.label(pod, names.ROLE_LABEL) == role
            and cluster_objects.pod_status(pod).phase == "Running"
            and not cluster_objects.is_going(pod)
        ]

    def inject(self, fault: Fault, victim: Victim | None) -> None:
        """See `FaultInjector`; a master's pod, which nothing else replaces, is made again at once."""
        assert victim is not None, fault
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": victim.uid}}
        try:
            delete_object(self._connection, "pod", self._job.namespace, victim.name, options)
        except ClusterError as error:
            if error.status == _CONFLICT:  # its successor has the name already
                return
            raise
        if fault.role == "master":
            self._make_master()

    def undo(self, fault: Fault, victim: Victim | None) -> None:
        """See `FaultInjector`; all faults here are kills, and a master without a pod is what one can leave behind."""
        assert victim is not None, fault
        if fault.role == "master" and read_pod(self._connection, self._job.namespace, victim.name) is None:
            self._make_master()

    def newest_checkpoint(self) -> int:
        """See `FaultInjector`; the job's volume is not mounted here."""
        return 0
