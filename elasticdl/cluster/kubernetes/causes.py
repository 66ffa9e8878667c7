"""Why pods have ended, from the cluster: their Events, their logs, and whether their node still exists.

Servers before 1.26 report the preemption of a pod only in Events.  The answers help people and the accounting, but are
never needed: a question that fails, or takes long, counts as unanswered.
"""

from __future__ import annotations

import logging
import threading
import time

from elasticdl.cluster.cluster import MAX_LOG_BYTES, EndReason
from elasticdl.cluster.kubernetes.api import ApiServer, Query, Refusal
from elasticdl.cluster.kubernetes.pods import Cause, Object, container_of
from elasticdl_client.errors import ElasticDLError

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 2.0
_RECENT_S = 1.5  # an Event may come this long after the deletion that it explains
_SECOND_LOOK_S = 0.3
_PAUSE_S = 10.0  # pause after an unanswered question
_LOG_LINES = 400
_TELLING = {
    "Preempted": EndReason.PREEMPTED,
    "Evicted": EndReason.EVICTED,
    "TaintManagerEviction": EndReason.NODE_LOST,
}
_SELF_EXPLAINING = (1, 26)  # since this version, pods have the condition DisruptionTarget


class Causes:
    """Asks the cluster for causes, and caches the answers."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._lock = threading.Lock()  # guards the attributes below
        self._found: dict[str, Cause] = {}
        self._needed: bool | None = None  # whether Events are needed; None: not known yet
        self._may_see_nodes = True
        self._paused_until = 0.0
        self._waited_at = 0.0

    def of(self, uid: str, deleted_s: float | None) -> Cause:
        """Return the cause in the Events of a pod; without a reason if they have none.

        Args:
            uid: Uid of the pod.
            deleted_s: Seconds since its deletion was seen; None if it is not being deleted.
        """
        with self._lock:
            if uid in self._found:
                return self._found[uid]
        try:
            if not self._are_needed():
                return Cause()
            cause = self._ask(uid)
            if cause.reason is EndReason.NONE and deleted_s is not None and deleted_s < _RECENT_S and self._may_wait():
                self._api.pause(_SECOND_LOOK_S)
                cause = self._ask(uid)
        except ElasticDLError as error:
            self._not_answered(error)
            return Cause()
        if cause.reason is not EndReason.NONE:
            with self._lock:
                self._found[uid] = cause
        return cause

    def node_is_gone(self, node: str) -> bool:
        """Return whether a node no longer exists; False without the right to ask."""
        if not node or not self._may_see_nodes or self._is_paused():
            return False
        try:
            self._api.call("GET", f"/api/v1/nodes/{node}", patience_s=_TIMEOUT_S)
        except Refusal as error:
            self._may_see_nodes = error.status != 403
            return error.status == 404
        except ElasticDLError as error:
            self._not_answered(error)
        return False

    def end_of_log(self, pod: Object) -> str:
        """Return the last lines of a pod's log; empty if they cannot be read."""
        if self._is_paused():
            return ""
        path = self._api.namespaced(f"pods/{pod['metadata']['name']}/log")
        query: Query = {"container": container_of(pod), "tailLines": _LOG_LINES}
        try:
            return self._api.text(path, query, _TIMEOUT_S)[-MAX_LOG_BYTES:]
        except Refusal:  # the node or the container is gone
            return ""
        except ElasticDLError as error:
            self._not_answered(error)
            return ""

    def forget(self, uid: str) -> None:
        with self._lock:
            self._found.pop(uid, None)

    def _are_needed(self) -> bool:
        if self._is_paused():
            return False
        if self._needed is None:
            version = self._api.call("GET", "/version", patience_s=_TIMEOUT_S)
            numbers = [int("".join(filter(str.isdigit, version[part])) or 0) for part in ("major", "minor")]
            self._needed = tuple(numbers) < _SELF_EXPLAINING
        return self._needed

    def _ask(self, uid: str) -> Cause:
        query: dict[str, str | int] = {"fieldSelector": f"involvedObject.uid={uid}"}
        listed = self._api.call("GET", self._api.namespaced("events"), query, patience_s=_TIMEOUT_S)
        for event in listed["items"]:
            if event.get("reason") in _TELLING:
                return Cause(_TELLING[event["reason"]], event.get("message") or "")
        return Cause()

    def _is_paused(self) -> bool:
        with self._lock:
            return time.monotonic() < self._paused_until

    def _may_wait(self) -> bool:
        """Return whether to wait for Events: rarely, so that the ends of many pods are not delayed one by one."""
        with self._lock:
            now = time.monotonic()
            may = now - self._waited_at > _RECENT_S
            self._waited_at = now if may else self._waited_at
            return may

    def _not_answered(self, error: ElasticDLError) -> None:
        with self._lock:
            if isinstance(error, Refusal) and error.status == 403:
                self._needed = False
            self._paused_until = time.monotonic() + _PAUSE_S
        if not self._api.closed:
            _LOG.warning("Why pods have ended cannot be asked: %s", error.what)
