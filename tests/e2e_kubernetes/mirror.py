"""A namespace's pods and ConfigMaps as watches report them: looking at them costs the API server nothing."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from tests.e2e_kubernetes.kubectl import core

_CONNECT_S = 3.0
_SILENCE_S = 30.0  # then the connection is taken for dead, and all is listed again
_PAUSE_S = 0.5  # before that


class Mirror:
    """Follows a namespace until it is closed; it may be a moment behind."""

    def __init__(self, namespace: str) -> None:
        self._changed = threading.Condition()
        self._num_changes = 0
        self._closed = False
        self._pods = _Watch(core().list_namespaced_pod, namespace, self.note)
        self._config_maps = _Watch(core().list_namespaced_config_map, namespace, self.note)

    def pods(self) -> list[dict[str, Any]]:
        return self._pods.objects()

    def config_map(self, name: str) -> dict[str, str]:
        """Return the data of one; empty if there is none."""
        found = next((one for one in self._config_maps.objects() if one["metadata"]["name"] == name), {})
        return dict(found.get("data") or {})

    def note(self) -> None:
        """Wake those that wait for a change: something is new."""
        with self._changed:
            self._num_changes += 1
            self._changed.notify_all()

    def wait_for_change(self, known: int, timeout_s: float) -> int:
        """Return the number of changes once it is not `known` any more, or after the time."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_changes != known, timeout_s)
            return self._num_changes

    def close(self) -> None:
        self._pods.close()
        self._config_maps.close()


class _Watch:
    """The objects of one kind."""

    def __init__(self, listing: Callable[..., Any], namespace: str, note: Callable[[], None]) -> None:
        self._list, self._namespace, self._note = listing, namespace, note
        self._lock = threading.Lock()  # guards the next
        self._objects: dict[str, dict[str, Any]] = {}  # by uid
        self._closed = threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def objects(self) -> list[dict[str, Any]]:
        with self._lock:
            return list(self._objects.values())

    def close(self) -> None:
        """Take no more notice; the connection ends with the watch, at the latest when it has been silent."""
        self._closed.set()

    def _follow(self) -> None:
        while not self._closed.is_set():
            # The API server is away, or has been while it answered.
            with contextlib.suppress(ApiException, HTTPError, OSError, ValueError):
                self._list_and_watch()
            self._closed.wait(_PAUSE_S)

    def _list_and_watch(self) -> None:
        answer = self._list(self._namespace, _request_timeout=(_CONNECT_S, _SILENCE_S), _preload_content=False)
        listed = json.loads(answer.data)
        with self._lock:
            self._objects = {_uid(one): one for one in listed["items"]}
        self._note()
        stream = self._list(
            self._namespace,
            watch=True,
            resource_version=listed["metadata"]["resourceVersion"],
            timeout_seconds=3600,
            _request_timeout=(_CONNECT_S, _SILENCE_S),
            _preload_content=False,
        )
        with contextlib.closing(stream):
            for line in _lines(stream):
                if self._closed.is_set():
                    return
                event = json.loads(line)
                if event["type"] == "ERROR":  # the version is too old: list again
                    return
                self._take(event["type"], event["object"])

    def _take(self, kind: str, found: dict[str, Any]) -> None:
        with self._lock:
            if kind == "DELETED":
                self._objects.pop(_uid(found), None)
            else:
                self._objects[_uid(found)] = found
        self._note()


def _uid(found: dict[str, Any]) -> str:
    return str(found["metadata"]["uid"])


def _lines(stream: Any) -> Iterator[bytes]:
    left = b""
    for chunk in stream.stream(amt=None):
        *whole, left = (left + chunk).split(b"\n")
        yield from whole
