"""The history of a namespace: every pod's phases over time and every container's log, deleted pods' too."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from tests.e2e_kubernetes.kubectl import HOLLOW, core
from tests.e2e_kubernetes.mirror import Mirror
from tests.e2e_kubernetes.pods import PodView

_LOOK_S = 0.5
_COLUMNS = 96
_ROWS = 24
_MARKS = {"Pending": "·", "Running": "█", "Succeeded": "✓", "Failed": "✗", "Terminating": "░"}


@dataclass(slots=True)
class Recorder:
    """Looks at a namespace twice a second until it is closed.

    Attributes:
        mirror: where it looks.
    """

    namespace: str
    directory: Path
    mirror: Mirror = field(init=False)
    _seen: list[tuple[float, dict[str, str]]] = field(default_factory=list)
    _following: set[str] = field(default_factory=set)
    _complete: set[str] = field(default_factory=set)
    _closed: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> Recorder:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.mirror = Mirror(self.namespace)
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(30)
            self.mirror.close()

    def _look_on(self) -> None:
        while not self._closed.wait(_LOOK_S):
            pods = [PodView.of(pod) for pod in self.mirror.pods()]
            self._seen.append((time.monotonic(), {pod.key: pod.state for pod in pods}))
            for pod in pods:
                if not pod.node.startswith(HOLLOW):  # where nothing runs, nothing is printed
                    self._keep_log(pod)

    def _keep_log(self, pod: PodView) -> None:
        life = f"{pod.name}.{pod.uid[:5]}.{pod.restarts}"
        if not (pod.container_running or pod.container_ended) or life in self._following | self._complete:
            return
        self._following.add(life)
        threading.Thread(target=self._follow, args=(pod, life), daemon=True).start()

    def _follow(self, pod: PodView, life: str) -> None:
        with contextlib.suppress(ApiException, HTTPError, OSError):
            stream = core().read_namespaced_pod_log(
                pod.name, self.namespace, follow=True, _preload_content=False, _request_timeout=(3, 3600)
            )
            chunks = stream.stream()
            first = next(chunks, b"")
            if not first.startswith(b"unable to retrieve"):  # the container is gone; its lines so far stay
                with (self.directory / f"{life}.log").open("ab") as log:
                    known = log.tell()  # of a stream before this one, which begins anew; the file only ever grows
                    for chunk in itertools.chain([first], chunks):
                        log.write(chunk[known:])
                        log.flush()
                        self.mirror.note()
                        known = max(0, known - len(chunk))
            if pod.container_ended:
                self._complete.add(life)
        self._following.discard(life)

    def log(self, pod_name: str) -> str:
        """Everything that pods of this name have printed, one life after the other."""
        lives = sorted(self.directory.glob(f"{pod_name}.*.log"), key=lambda path: path.stat().st_ctime)
        return "".join(path.read_text(errors="replace") for path in lives)

    def ends_of_logs(self, num_lines: int = 40) -> str:
        parts = []
        for path in sorted(self.directory.glob("*.log")):
            parts += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-num_lines:]]
        return "\n".join(parts)

    def timeline(self, wanted: Callable[[str], bool] = lambda name: True) -> str:
        """Pods against time, a row each: · pending, █ running, ░ terminating, ✓ succeeded, ✗ failed."""
        if not self._seen:
            return "(nothing was seen)"
        began, ended = self._seen[0][0], self._seen[-1][0]
        step_s = max(1, math.ceil((ended - began + 0.001) / _COLUMNS))
        rows: dict[str, list[str]] = {}
        for at, states in self._seen:
            column = int((at - began) / step_s)
            for key, state in states.items():
                if wanted(key):
                    row = rows.setdefault(key, [" "] * (int((ended - began) / step_s) + 1))
                    row[column] = _MARKS.get(state, "?")
        width = max((len(_label(key)) for key in rows), default=0)
        axis = "".join(f"{s * step_s:<10}" for s in range(0, int((ended - began) / step_s) + 1, 10))
        lines = [f"{'seconds':>{width}} {axis.rstrip()}"]
        lines += [f"{_label(key):>{width}} {''.join(row)}" for key, row in list(rows.items())[:_ROWS]]
        return "\n".join(lines + [f"… and {len(rows) - _ROWS} more pods"] * (len(rows) > _ROWS))


def _label(key: str) -> str:
    return key.rpartition(".")[0]


def describe_events(namespace: str, last: int = 60) -> str:
    """The namespace's newest events, one line each."""
    events: list[Any] = core().list_namespaced_event(namespace, _request_timeout=(3, 20)).items
    events.sort(key=lambda e: str(e.last_timestamp or e.event_time or e.metadata.creation_timestamp))
    return "\n".join(
        f"{e.last_timestamp or e.event_time:%H:%M:%S} {e.involved_object.name} {e.reason}: {e.message}"
        for e in events[-last:]
    )
