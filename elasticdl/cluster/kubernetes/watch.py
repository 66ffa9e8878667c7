"""Watching pods: list, then watch from there, until closed; missed changes are reported as if they had been seen.

Three generators, one job each: `events` connects again and again; `_list_and_watch` knows the resource version, and
returns where only a new list helps; `_stream` is one call.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Iterator

from elasticdl.cluster.cluster import EventType, Pod, PodEvent
from elasticdl.cluster.kubernetes.api import ATTEMPT_S, ApiServer, Closed, Query, Refusal
from elasticdl.cluster.kubernetes.pod_cache import PodCache
from elasticdl.cluster.kubernetes.pods import Object, has_ended
from elasticdl_client.errors import ElasticDLError

_LOG = logging.getLogger(__name__)
_STREAM_S = 15  # after it the server ends a stream; one that is silent beyond that is broken
_SILENCE_S = 3.0
_LIST_AGAIN_S = 300.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0
_GONE = 410


class PodWatch:
    """One observer's view of a job's pods.

    Args:
        api: where to look.
        selector: the labels of the job's pods.
        memory: shared by all observers of the job.
    """

    def __init__(self, api: ApiServer, selector: str, memory: PodCache) -> None:
        self._api = api
        self._selector = selector
        self._memory = memory
        self._known: dict[str, Pod] = {}
        self._leaving: dict[str, Object] = {}  # told to end, and not seen to have ended
        self._pause_s = 0.0
        self._trouble = ""

    def events(self) -> Iterator[PodEvent]:
        """ADDED for what exists, then every change, until the connection is closed; never an error."""
        while not self._api.closed:
            try:
                yield from self._list_and_watch()
            except Closed:
                return
            except ElasticDLError as error:
                self._say_trouble(error.what)
                self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
                self._api.pause(self._pause_s)

    def _list_and_watch(self) -> Iterator[PodEvent]:
        """Until the server has forgotten the version that we know, or it is time for a look at everything."""
        query: Query = {"labelSelector": self._selector}
        listed = self._api.call("GET", self._api.namespaced("pods"), query, patience_s=ATTEMPT_S)
        yield from self._compared(listed["items"])
        version = str(listed["metadata"]["resourceVersion"])
        list_again_at = time.monotonic() + _LIST_AGAIN_S
        while version and time.monotonic() < list_again_at and not self._api.closed:
            version = yield from self._stream(version)
            yield from self._overdue()

    def _stream(self, version: str) -> Generator[PodEvent, None, str]:
        """One call; ends with the server's time-out, or before it when a pod will be overdue earlier.

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

    def _seen(self, kind: EventType, shown: Object) -> Iterator[PodEvent]:
        uid = shown["metadata"]["uid"]
        known = self._known.get(uid)
        if kind is EventType.DELETED:
            self._leaving.pop(uid, None)
            if self._known.pop(uid, None) is not None and known is not None:
                yield PodEvent(kind, self._memory.gone(known, shown))
            return
        pod = self._memory.read(shown)
        if pod is None:
            return
        self._known[uid] = pod
        if has_ended(pod):
            self._leaving.pop(uid, None)
        elif shown["metadata"].get("deletionTimestamp"):
            self._leaving[uid] = shown
        if known is None:
            yield PodEvent(EventType.ADDED, pod)
        elif known != pod:
            yield PodEvent(EventType.MODIFIED, pod)

    def _overdue(self) -> Iterator[PodEvent]:
        now = time.monotonic()
        for uid, shown in list(self._leaving.items()):
            if self._memory.overdue_at(uid) <= now:
                yield from self._seen(EventType.MODIFIED, shown)

    def _until_overdue(self) -> int:
        """Whole seconds until the next pod is overdue, at least 1, at most the length of a stream."""
        first = min((self._memory.overdue_at(uid) for uid in self._leaving), default=math.inf)
        return math.ceil(min(max(1.0, first - time.monotonic()), _STREAM_S))

    def _say_trouble(self, what: str) -> None:
        if what != self._trouble:
            _LOG.warning("Pods cannot be watched for the moment: %s", what)
            self._trouble = what

    def _all_well(self) -> None:
        self._pause_s = 0.0
        if self._trouble:
            _LOG.info("Pods are watched again.")
            self._trouble = ""
