"""The job's events as Events of Kubernetes, for `kubectl describe` and `kubectl get events`.

The journal is authoritative: an Event is created some seconds after the journal contains its content.  Events of one
kind and subject are one Event if they are of one generation of the master and of the same few seconds; its name has
the number of the first.  So every generation groups them alike, and the API refuses those of an earlier one.  A thread
does that; a job without the right to create Events runs without them and logs that once.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

from elasticdl_client.job_events import EventHistory, EventKind, JobEvent, describe, since
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError, Connection
from elasticdl_client.kubernetes.api_client import object_path
from elasticdl_client.kubernetes.events import COMPONENT

_LOOK_S = 1.0
_SETTLED_S = 3.0  # the journal is written once a second: it contains older events
_WINDOW_S = 5.0  # events of a kind and subject within it are one Event
_AHEAD_S = 60.0  # an event further in the future is of a generation whose clock was ahead
_CAUGHT_UP_S = 600.0  # a new generation publishes events up to this age; the previous one has published older ones
_MAX_MESSAGE = 1000  # bytes; Kubernetes takes 1,024
_TIMEOUT_S = (5.0, 5.0)
_NEW_LIVES = (EventKind.JOB_RESUMED, EventKind.MASTER_RESTARTED)
_ROUTINE = frozenset({EventKind.EPOCH_STARTED, EventKind.JOB_WAITING, EventKind.WORKER_REGISTERED})

logger = logging.getLogger("elasticdl.master")


@dataclass(frozen=True, slots=True)
class Owner:
    """The ConfigMap of a job."""

    namespace: str
    job_name: str
    uid: str


@dataclass(frozen=True, slots=True)
class _Group:
    """Events of one kind about one object, published together."""

    first: JobEvent
    last: JobEvent
    count: int


class EventPublisher:
    """Publishes the events of one job until it is closed.

    Args:
        connection: Connection to the cluster.
        owner: ConfigMap of the job.
        history: Returns the events so far; called in a thread of this object's own.
        pod_uid: Returns the uid of a pod by its name; empty if unknown: then its events are shown with the job.
    """

    def __init__(
        self,
        connection: Connection,
        owner: Owner,
        history: Callable[[], EventHistory],
        pod_uid: Callable[[str], str],
    ) -> None:
        self._connection = connection
        self._owner = owner
        self._history = history
        self._pod_uid = pod_uid
        self._published = 0  # number of the newest published event
        self._oldest = time.time() - _CAUGHT_UP_S
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Publish the remaining events, within a time."""
        self._closed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        complaint = ""
        while True:
            is_last = self._closed.wait(_LOOK_S)
            try:
                self._publish(is_last=is_last)
                complaint = ""
            except ClusterError as error:
                if not error.unreachable:
                    logger.warning(
                        "The job's events are not shown by kubectl, only by `elasticdl events %s`: %s",
                        self._owner.job_name,
                        error.what,
                    )
                    return
                if error.what != complaint:
                    logger.warning("The job's events are published later: %s", error.what)
                complaint = error.what
            if is_last:
                return

    def _publish(self, *, is_last: bool) -> None:
        """Create the Events of the windows that are over.

        Args:
            is_last: Also those of the present window.

        Raises:
            ClusterError: The API does not answer, or refuses; the next call tries again to create the rest.
        """
        history, now = self._history().events, time.time()

        def is_over(event: JobEvent) -> bool:
            end = (_window(event) + 1) * _WINDOW_S
            return is_last or end + _SETTLED_S <= now or event.at > now + _AHEAD_S

        new = list(takewhile(is_over, since(history, self._published)))
        wanted = [e for e in new if e.kind not in _ROUTINE and _window(e) * _WINDOW_S >= self._oldest]
        for group in _grouped(wanted, [e.number for e in history if e.kind in _NEW_LIVES]):
            self._create(group)
        if new:  # only now: a repeated attempt has the same names
            self._published = new[-1].number

    def _create(self, group: _Group) -> None:
        body, namespace = self._manifest(group), self._owner.namespace
        try:
            with self._connection.doing(f"create an Event in namespace {namespace}"):
                self._connection.create(object_path("events", namespace=namespace), body, timeout_s=_TIMEOUT_S)
        except ClusterError as error:
            if error.status != 409:  # an earlier generation has created it
                raise

    def _manifest(self, group: _Group) -> dict[str, Any]:
        event = group.last
        involved = self._involved(event.subject)
        stamp = f"{self._owner.job_name}.{self._owner.uid[:8]}.{group.first.number}"
        message = describe(event) if involved["kind"] == "Pod" else f"{event.subject}: {describe(event)}"
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"elasticdl-{stamp}", "namespace": self._owner.namespace},
            "involvedObject": involved,
            "reason": event.kind.value,
            "message": message.encode()[:_MAX_MESSAGE].decode(errors="ignore"),
            "type": "Warning" if event.is_trouble else "Normal",
            "source": {"component": COMPONENT},
            "firstTimestamp": _timestamp(group.first.at),
            "lastTimestamp": _timestamp(event.at),
            "count": group.count,
        }

    def _involved(self, subject: str) -> dict[str, str]:
        job_name, namespace = self._owner.job_name, self._owner.namespace
        role, _, index = subject.partition("-")
        pod = names.pod_name(job_name, role, int(index)) if role in ("worker", "ps") and index.isdecimal() else ""
        if pod and (uid := self._pod_uid(pod)):
            return {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": pod, "uid": uid}
        kind = {"apiVersion": "v1", "kind": "ConfigMap", "namespace": namespace}
        return {**kind, "name": names.job_object(job_name), "uid": self._owner.uid}


def _window(event: JobEvent) -> int:
    return int(event.at // _WINDOW_S)


def _grouped(events: Iterable[JobEvent], restarts: Sequence[int]) -> list[_Group]:
    """Return a group per subject, kind, generation of the master and window, in the order of their first events.

    Args:
        events: Events to publish.
        restarts: Numbers of the events with which generations of the master have begun.
    """
    groups: dict[tuple[str, EventKind, int, int], _Group] = {}
    for event in events:
        key = (event.subject, event.kind, bisect_right(restarts, event.number), _window(event))
        before = groups.get(key)
        groups[key] = _Group(event, event, 1) if before is None else _Group(before.first, event, before.count + 1)
    return list(groups.values())


def _timestamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
