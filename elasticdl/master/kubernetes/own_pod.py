"""The pod that the master runs in: its label, and its end.  A failure to set the label is only a warning."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from elasticdl.master.journal import Superseded
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError, Connection

_TIMEOUT_S = (5.0, 5.0)
_KUBELET_S = 10.0  # for the kubelet to end the pod
_LOOK_S = 0.2
_MERGE = "application/merge-patch+json"

logger = logging.getLogger("elasticdl.master")


class OwnPod:
    """The master's pod, by its name; its methods may be called from any thread.

    Attributes:
        created_at: by the API server's clock, in seconds since the Unix epoch; 0 before `look`.
    """

    def __init__(self, connection: Connection, namespace: str, job_name: str) -> None:
        self._connection = connection
        self._namespace = namespace
        self._name = names.pod_name(job_name, "master", 0)
        self.created_at = 0.0

    def look(self, owner_uid: str) -> bool:
        """Whether it has the job's ConfigMap as its owner.

        Raises:
            Superseded: the pod of that name is another one than this process runs in.
            ClusterError: it cannot be read.
        """
        try:
            pod = self._read()
        except ClusterError as error:
            if error.status == 404:
                raise Superseded(f"pod {self._name} was deleted, and its master leaves with it") from error
            raise
        self.created_at = pod.metadata.creation_timestamp.timestamp()
        own, shown = os.environ.get("MY_POD_IP", ""), pod.status.pod_ip or ""
        if own and shown and own != shown:
            raise Superseded(f"pod {self._name} was made again and has the address {shown}; this one has {own}")
        return any(owner.uid == owner_uid for owner in pod.metadata.owner_references or [])

    def label(self, status: str) -> None:
        """Sets the label `status`."""
        self._patch({"metadata": {"labels": {names.STATUS_LABEL: status}}}, f"get the label {status}")

    def end(self) -> None:
        """Ends it for good: the kubelet does not start it again, and its phase becomes Failed.

        A container that exits with 1 would be restarted without end (restartPolicy OnFailure).  So the kubelet is told
        that the pod's time is over; until it has heard that, this process must live, or its log is put aside by that
        of the next one.
        """
        try:
            if self._read().spec.restart_policy == "Never":
                return
            self._patch({"spec": {"activeDeadlineSeconds": 1}}, "be ended")
            self._await_failed()
        except ClusterError as error:
            logger.warning("Pod %s could not be ended: %s", self._name, error.what)

    def _await_failed(self) -> None:
        deadline = time.monotonic() + _KUBELET_S
        while time.monotonic() < deadline:
            pod = self._read()
            if pod.status.phase == "Failed" or not pod.spec.node_name:  # without a node there is no kubelet
                return
            threading.Event().wait(_LOOK_S)

    def _read(self) -> Any:
        with self._connection.doing(f"read pod {self._name} of namespace {self._namespace}"):
            return self._connection.core.read_namespaced_pod(self._name, self._namespace, _request_timeout=_TIMEOUT_S)

    def _patch(self, body: dict[str, Any], what: str) -> None:
        try:
            with self._connection.doing(f"change pod {self._name}"):
                path = f"/api/v1/namespaces/{self._namespace}/pods/{self._name}"
                self._connection.patch(path, body, _MERGE, timeout_s=_TIMEOUT_S)
        except ClusterError as error:
            logger.warning("Pod %s could not %s: %s", self._name, what, error.what)
