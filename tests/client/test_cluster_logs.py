"""Following the log of a pod through the lives of its container, by what its kubelet and the API server say."""

from __future__ import annotations

import contextlib
import json
import queue
from collections.abc import Iterator
from typing import Any

from elasticdl_client.jobs.cluster_logs import _PodReader, _Position
from elasticdl_client.jobs.store import LogLine
from elasticdl_client.kubernetes.api import Connection

FIRST = ["begins", "ends with 5"]
SECOND = ["begins", "ends with 0"]


class Answer:
    """Of the API server: an object, or a log with time stamps."""

    status = 200

    def __init__(self, data: bytes) -> None:
        self.data = data

    def stream(self, **_: object) -> Iterator[bytes]:
        yield self.data

    def close(self) -> None:
        pass


def pod(life: str, phase: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "m", "namespace": "n", "uid": "u"},
        "spec": {"containers": [{"name": "m"}]},
        "status": {"phase": phase, "containerStatuses": [{"name": "m", "containerID": life}]},
    }


def log(lines: list[str], minute: int) -> bytes:
    return "".join(f"2026-01-01T00:{minute:02}:{n:02}Z {line}\n" for n, line in enumerate(lines)).encode()


class Core:
    """A server that shows a container's second life later than its kubelet gives its log: a kubelet writes late."""

    def __init__(self) -> None:
        self.shown = [pod("a", "Running")] * 4 + [pod("b", "Succeeded")] * 2  # each log is opened between two looks
        self.logs = [log(FIRST, 1), log(SECOND[:1], 2), log(SECOND, 2)]
        self.asked_for_a_part: list[bool] = []

    def read_namespaced_pod(self, *_: object, **__: object) -> Answer:
        return Answer(json.dumps(self.shown.pop(0)).encode())

    def read_namespaced_pod_log(self, *_: object, **options: object) -> Answer:
        self.asked_for_a_part.append("since_seconds" in options)
        return Answer(self.logs.pop(0))


class Connected(Connection):
    """To that server."""

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        yield


def test_lines_of_a_life_that_the_server_does_not_show_yet_are_read_once() -> None:
    core = Core()
    lines: queue.SimpleQueue[LogLine] = queue.SimpleQueue()
    reader = _PodReader(Connected("c", "n", "https://s", None, core), pod("a", "Running"), _Position(-1, 0.0), lines)
    reader.thread.join(60)
    assert [lines.get_nowait().text for _ in range(lines.qsize())] == FIRST + SECOND
    assert core.asked_for_a_part == [False, True, False]
