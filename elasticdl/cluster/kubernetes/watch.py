"""Watching pods: list, then watch from there, until closed; missed changes are reported as if they had been seen.

`PodWatch` has three generators, one job each: `events` reconnects forever; `_list_and_watch` knows the resource
version, and returns when a new list is needed; `_stream` is one call.

`PodCache` keeps facts beyond the current objects of the API, so that all readers agree: since when a pod is being
deleted (an overdue one is on a lost node), why its image could not be pulled, and how it was first seen to end: later
changes of the object do not change the end of the pod.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

from elasticdl.cluster.cluster import EndReason, EventType, Pod, PodEvent, PodPhase
from elasticdl.cluster.kubernetes.api import ATTEMPT_S, ApiServer, Closed, Query, Refusal, StreamPauses
from elasticdl.cluster.kubernetes.causes import Causes
from elasticdl.cluster.kubernetes.pods import (
    PULL_BACK_OFF,
    PULL_FAILED,
    Cause,
    Object,
    code_of,
    deletion_of,
    disruption_of,
    ended_before_deletion,
    error_is_cut_off,
    has_ended,
    node_is_silent,
    node_of,
    read_pod,
    waiting,
    why_ended,
)
from elasticdl_client.errors import ElasticDLError

_OVERDUE_S = 10.0  # after its grace, on a node that the cluster marks as not ready
_SLOW_S = 30.0  # after its grace, on any node: a running kubelet needs less
_MAX_PODS = 8192
_NEVER = float("inf")
_BY_A_DELETION = (EndReason.COMPLETED, EndReason.ERROR, EndReason.KILLED)  # possible ends of a deleted pod


@dataclass(slots=True)
class _Record:
    name: str = ""
    node: str = ""
    deletion: tuple[str, float] | None = None
    deletion_seen_at: float = _NEVER
    due_at: float = _NEVER
    overdue_at: float = _NEVER
    pull_error: str = ""
    blocked: str = ""
    end: Pod | None = None


class PodCache:
    """Facts about all pods of one job.  Thread-safe.

    Args:
        causes: Finds causes that the object does not show.
    """

    def __init__(self, causes: Causes) -> None:
        self._causes = causes
        self._lock = threading.RLock()
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def read(self, pod_object: Object) -> Pod | None:
        """Return the pod, with the cached facts; None if the object is not a pod of a job."""
        pod = read_pod(pod_object)
        if pod is None:
            return None
        with self._lock:
            record = self._noted(pod, pod_object)
            if record.end is not None and (record.end.reason is EndReason.NODE_LOST or has_ended(pod)):
                code = pod.exit_code if record.end.exit_code is None else record.end.exit_code
                return replace(record.end, labels=pod.labels, exit_code=code)
            if not has_ended(pod):
                return self._living(pod, record)
        pod = self._with_cause(pod, pod_object, record)
        with self._lock:
            record.end = record.end or pod
            return record.end

    def gone(self, pod: Pod, pod_object: Object | None = None) -> Pod:
        """Return the last state of a pod that has left the cluster.

        Args:
            pod: Its state when it was last read.
            pod_object: Its last object; None if its removal was not seen.
        """
        if pod_object is not None:
            pod = self.read(pod_object) or pod
        with self._lock:
            record = self._record(pod.uid)
            pod = record.end or pod
        if not has_ended(pod):
            pod = self._removed(pod, pod_object, record)
        elif pod.reason is EndReason.DELETED:
            pod = self._explained(pod, record)
        with self._lock:
            record.end = pod
        return pod

    def overdue_at(self, uid: str) -> float:
        """Return the monotonic time at which a pod in deletion counts as lost; infinity for other pods."""
        with self._lock:
            return self._record(uid).overdue_at

    def uid_of(self, name: str) -> str:
        """Return the uid of the newest known pod with a name; empty if there is none."""
        with self._lock:
            return next((uid for uid in reversed(self._records) if self._records[uid].name == name), "")

    def _noted(self, pod: Pod, pod_object: Object) -> _Record:
        record = self._record(pod.uid)
        record.name, record.node = pod.name, node_of(pod_object)
        deletion = deletion_of(pod_object)
        if deletion is not None and deletion != record.deletion:
            now = time.monotonic()
            record.deletion_seen_at = min(record.deletion_seen_at, now)
            record.due_at = min(record.due_at, now + deletion[1])
            record.deletion = deletion
        record.overdue_at = record.due_at + (_OVERDUE_S if node_is_silent(pod_object) else _SLOW_S)
        wait = waiting(pod_object)
        if wait.reason == PULL_FAILED and wait.message:
            record.pull_error = wait.message
        elif wait.reason == PULL_BACK_OFF:
            is_known = not record.pull_error or record.pull_error in wait.message
            record.blocked = str(wait) if is_known else f"{wait}: {record.pull_error}"
        return record

    def _living(self, pod: Pod, record: _Record) -> Pod:
        if time.monotonic() >= record.overdue_at:
            message = f"node {record.node} has not ended it in time and counts as lost"
            record.end = replace(pod, phase=PodPhase.FAILED, reason=EndReason.NODE_LOST, message=message, blocked="")
            return record.end
        if pod.phase is PodPhase.PENDING and record.blocked and pod.message.startswith((PULL_FAILED, PULL_BACK_OFF)):
            return replace(pod, message=record.blocked, blocked=record.blocked)  # also while the pull is retried
        if record.deletion is not None and not pod.message:
            return replace(pod, message="it is being deleted")
        return pod

    def _with_cause(self, pod: Pod, pod_object: Object, record: _Record) -> Pod:
        """Add what an ended pod's object lacks: the cause of its deletion, or the rest of a long error."""
        if (
            pod.reason is EndReason.ERROR
            and error_is_cut_off(pod_object)
            and (log := self._causes.end_of_log(pod_object))
        ):
            pod = replace(pod, message=why_ended(pod_object, log).message)
        unexplained = pod.exit_code is None and pod.reason is EndReason.ERROR and not pod_object["status"].get("reason")
        if record.deletion is None and not unexplained:
            return pod
        if not unexplained and (pod.reason not in _BY_A_DELETION or ended_before_deletion(pod_object)):
            return pod
        return self._explained(pod, record)

    def _removed(self, pod: Pod, pod_object: Object | None, record: _Record) -> Pod:
        """Return the end of a pod that was removed before its end was seen."""
        cause = disruption_of(pod_object) if pod_object is not None else Cause()
        code = code_of(pod_object) if pod_object is not None else None
        if cause.reason is EndReason.NONE:
            cause = self._causes.of(pod.uid, self._deleted_for_s(record) or 0.0)
        if cause.reason is EndReason.NONE and code is None and self._causes.node_is_gone(record.node):
            cause = Cause(EndReason.NODE_LOST, f"node {record.node} is gone")
        if cause.reason is EndReason.NONE:
            started = pod.phase is PodPhase.RUNNING
            cause = Cause(EndReason.DELETED, "deleted" if started else "deleted before it started")
        phase = PodPhase.SUCCEEDED if code == 0 else PodPhase.FAILED
        return replace(pod, phase=phase, reason=cause.reason, message=cause.message, exit_code=code, blocked="")

    def _explained(self, pod: Pod, record: _Record) -> Pod:
        cause = self._causes.of(pod.uid, self._deleted_for_s(record))
        if cause.reason is not EndReason.NONE:
            return replace(pod, reason=cause.reason, message=cause.message)
        if record.deletion is not None:
            return replace(pod, reason=EndReason.DELETED)
        return pod

    def _deleted_for_s(self, record: _Record) -> float | None:
        return None if record.deletion is None else time.monotonic() - record.deletion_seen_at

    def _record(self, uid: str) -> _Record:
        if uid not in self._records:
            self._records[uid] = _Record()
            while len(self._records) > _MAX_PODS:
                oldest, _ = self._records.popitem(last=False)
                self._causes.forget(oldest)
        return self._records[uid]


_LOG = logging.getLogger(__name__)
_STREAM_S = 15  # the server ends a stream after this time; if not, the stream is broken
_SILENCE_S = 3.0
_LIST_AGAIN_S = 300.0
_LASTING_S = 0.5  # a stream that ends earlier was not ended by its time-out, which is at least 1 s
_FIRST_PAUSE_S = 0.2
_GONE = 410


class PodWatch:
    """One watch of a job's pods.

    Args:
        api: The API server.
        selector: Label selector of the job's pods.
        memory: The cache, shared by all readers of the job.
    """

    def __init__(self, api: ApiServer, selector: str, memory: PodCache) -> None:
        self._api = api
        self._selector = selector
        self._memory = memory
        self._known: dict[str, Pod] = {}
        self._leaving: dict[str, Object] = {}  # in deletion, not seen to have ended yet
        self._pauses = StreamPauses(_FIRST_PAUSE_S, _LASTING_S)
        self._trouble = ""

    def events(self) -> Iterator[PodEvent]:
        """Yield ADDED for existing pods, then every change, until the connection is closed; raise no errors."""
        while not self._api.closed:
            try:
                yield from self._list_and_watch()
            except Closed:
                return
            except ElasticDLError as error:
                self._log_trouble(error.what)
                self._api.pause(self._pauses.next_s())

    def _list_and_watch(self) -> Iterator[PodEvent]:
        """List, then watch until the server has dropped the known version, or a new list is due."""
        query: Query = {"labelSelector": self._selector}
        listed = self._api.call("GET", self._api.namespaced("pods"), query, patience_s=ATTEMPT_S)
        yield from self._compared(listed["items"])
        version = str(listed["metadata"]["resourceVersion"])
        list_again_at = time.monotonic() + _LIST_AGAIN_S
        while version and time.monotonic() < list_again_at and not self._api.closed:
            version = yield from self._stream(version)
            yield from self._overdue()
            self._api.pause(self._pauses.next_s())

    def _stream(self, version: str) -> Generator[PodEvent, None, str]:
        """Yield the changes of one call; it ends with the server's time-out, or earlier when a pod becomes overdue.

        Returns:
            The version to continue from; empty if there is none.
        """
        length_s = self._until_overdue()
        ends_at = time.monotonic() + length_s
        query: Query = {"watch": 1, "labelSelector": self._selector, "resourceVersion": version}
        query |= {"timeoutSeconds": length_s, "allowWatchBookmarks": "true"}
        try:
            with self._api.stream(self._api.namespaced("pods"), query, length_s + _SILENCE_S) as lines:
                self._all_well()
                for line in lines:
                    if line["type"] == "ERROR":
                        return self._ended_by(line["object"])
                    version = str(line["object"]["metadata"]["resourceVersion"])
                    if line["type"] != "BOOKMARK":
                        yield from self._seen(EventType(line["type"]), line["object"])
                    if time.monotonic() + self._until_overdue() < ends_at - 1:
                        return version
        except Refusal as error:
            if error.status == _GONE:
                return ""
            raise
        return version

    def _ended_by(self, status: Object) -> str:
        if status.get("code") != _GONE:
            raise ElasticDLError(f"The watch of pods was ended: {status.get('message', status)}")
        return ""

    def _compared(self, pods: list[Object]) -> Iterator[PodEvent]:
        """Yield the changes since the last known state."""
        listed = {pod["metadata"]["uid"] for pod in pods}
        for uid in [uid for uid in self._known if uid not in listed]:
            self._leaving.pop(uid, None)
            yield PodEvent(EventType.DELETED, self._memory.gone(self._known.pop(uid)))
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"])):
            yield from self._seen(EventType.MODIFIED, pod)

    def _seen(self, kind: EventType, pod_object: Object) -> Iterator[PodEvent]:
        uid = pod_object["metadata"]["uid"]
        known = self._known.get(uid)
        if kind is EventType.DELETED:
            self._leaving.pop(uid, None)
            if self._known.pop(uid, None) is not None and known is not None:
                yield PodEvent(kind, self._memory.gone(known, pod_object))
            return
        pod = self._memory.read(pod_object)
        if pod is None:
            return
        self._known[uid] = pod
        if has_ended(pod):
            self._leaving.pop(uid, None)
        elif pod_object["metadata"].get("deletionTimestamp"):
            self._leaving[uid] = pod_object
        if known is None:
            yield PodEvent(EventType.ADDED, pod)
        elif known != pod:
            yield PodEvent(EventType.MODIFIED, pod)

    def _overdue(self) -> Iterator[PodEvent]:
        now = time.monotonic()
        for uid, pod_object in list(self._leaving.items()):
            if self._memory.overdue_at(uid) <= now:
                yield from self._seen(EventType.MODIFIED, pod_object)

    def _until_overdue(self) -> int:
        """Return the seconds until the next pod is overdue, from 1 to the length of a stream."""
        first = min((self._memory.overdue_at(uid) for uid in self._leaving), default=math.inf)
        return math.ceil(min(max(1.0, first - time.monotonic()), _STREAM_S))

    def _log_trouble(self, what: str) -> None:
        if what != self._trouble:
            _LOG.warning("Pods cannot be watched for the moment: %s", what)
            self._trouble = what

    def _all_well(self) -> None:
        self._pauses.opened()
        if self._trouble:
            _LOG.info("Pods are watched again.")
            self._trouble = ""
