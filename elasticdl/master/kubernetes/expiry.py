"""The end of a job that has ended: after --ttl_after_finished seconds its master deletes everything of it.

It deletes the ConfigMap that owns the rest, and leaves the rest to the cluster's garbage collector: all pods, the
Services, the Secret and the NetworkPolicy go first, the ConfigMap goes last.
"""

from __future__ import annotations

import logging
import threading
import time

from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError, Connection
from elasticdl_client.kubernetes.commands import grant

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_COLLECTED_S = 120.0  # until the garbage collector ends this pod; else its container would be started again

logger = logging.getLogger("elasticdl.master")


class Expiry:
    """Of one job."""

    def __init__(self, connection: Connection, namespace: str, job_name: str, owner_uid: str, account: str) -> None:
        """
        Args:
            owner_uid: of the job's ConfigMap; one of the same name that was made since is not deleted.
            account: the service account of the master, for messages.
        """
        self._connection = connection
        self._namespace = namespace
        self._name = names.job_object(job_name)
        self._uid = owner_uid
        self._account = account

    def wait(self, ended_at: float, ttl_s: float, stop: threading.Event) -> bool:
        """Delete the job when its time is over, and wait until this pod is terminating; False if it may not be deleted.

        Args:
            ended_at: when the job has ended, in seconds since the Unix epoch.
            ttl_s: seconds that it stays.
            stop: set when this process is terminating: a next life continues the wait.
        """
        left_s = max(0.0, ended_at + ttl_s - time.time())
        logger.info("The job and all its objects are deleted in %.0f s (--ttl_after_finished)", left_s)
        if stop.wait(left_s):
            return True
        if not self._delete(stop):
            return False
        stop.wait(_COLLECTED_S)
        return True

    def _delete(self, stop: threading.Event) -> bool:
        """Delete the owner, again and again while the API server does not answer; return False if it refuses."""
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": self._uid}}
        pause_s = _FIRST_PAUSE_S
        while not stop.is_set():
            try:
                with self._connection.doing(f"delete ConfigMap {self._name} of namespace {self._namespace}"):
                    self._connection.core.delete_namespaced_config_map(self._name, self._namespace, body=body)
                return True
            except ClusterError as error:
                if error.status in (404, 409):  # it is gone, or another job has its name
                    return True
                if not error.unreachable and error.status < 500 and error.status != 429:
                    logger.warning("%s; %s lets it", error.what, grant(self._namespace, self._account))
                    return False
                logger.warning("%s; it is tried again in %.1f s", error.what, pause_s)
            stop.wait(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        return True
