"""Following the logs of pods by what their kubelets and the API server say."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any

from elasticdl_client.job_status import JobStatus, PodStatus
from elasticdl_client.jobs.cluster_logs import PodLogs, _PodReader, _Position, _split
from elasticdl_client.jobs.store import LogLine
from elasticdl_client.kubernetes.api import ClusterError, Connection
from elasticdl_client.kubernetes.api_client import Query
from elasticdl_client.script_output import ScriptOutput, Shown

PREFIX = "elasticdl-job-"
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

    release_conn = close


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

    def send(self, method: str, path: str, query: Query, *_: object, **__: object) -> Answer:
        """See `ApiClient`."""
        if path == "/api/v1/namespaces/n/pods/m":
            return Answer(json.dumps(self.shown.pop(0)).encode())
        assert (method, path) == ("GET", "/api/v1/namespaces/n/pods/m/log")
        self.asked_for_a_part.append("sinceSeconds" in dict(query))
        return Answer(self.logs.pop(0))


def connected(server: Any) -> Connection:
    """A connection to such a server."""
    return Connection("c", "n", "https://s", server)


def test_lines_of_a_life_that_the_server_does_not_show_yet_are_read_once() -> None:
    core = Core()
    lines: queue.SimpleQueue[LogLine] = queue.SimpleQueue()
    reader = _PodReader(connected(core), pod("a", "Running"), _Position(-1, 0.0), lines)
    reader.thread.join(60)
    assert [lines.get_nowait().text for _ in range(lines.qsize())] == FIRST + SECOND
    assert core.asked_for_a_part == [False, True, False]


def taken(position: _Position, *lines: str) -> list[str]:
    """The texts of the lines that a new stream brings."""
    position.options()
    return [text for line in lines if (text := position.take(line)) is not None]


def test_no_line_is_lost_where_the_clock_of_a_node_goes_back() -> None:
    summer = ["2026-10-25T02:59:58.1+02:00 a", "2026-10-25T02:59:59.000000200+02:00 b"]
    winter = ["2026-10-25T02:00:00+01:00 c", "2026-10-25T02:00:01.5+01:00 d"]
    position = _Position(-1, 0.0)
    assert taken(position, *summer, *winter[:1]) == ["a", "b", "c"]
    assert taken(position, *summer, *winter) == ["d"]
    set_back = "2026-10-25T01:59:00+01:00 e"
    assert taken(position, winter[1], set_back) == ["e"]
    assert position.stamp == set_back.split()[0]


def test_lines_of_one_microsecond_are_read_once() -> None:
    lines = [f"2026-01-01T00:00:00.00000{digits}Z {digits}" for digits in ("1001", "1002", "1002", "1003")]
    position = _Position(-1, 0.0)
    assert taken(position, *lines[:2]) == ["1001", "1002"]
    assert taken(position, *lines) == ["1002", "1003"]


def test_a_progress_bar_without_an_end_is_passed_on() -> None:
    parts = [b"2026-01-01T00:00:00Z 0 %", *(b"\r%d %%" % k + b" " * 1000 for k in range(100)), b"\n"]
    lines = list(_split(Parts(parts)))
    assert len(lines) > 1
    assert max(map(len, lines)) < 100_000
    position = _Position(-1, 0.0)
    assert taken(position, *lines)[-1].split("\r")[-1].startswith("99 %")


class Parts(Answer):
    """A log that comes in parts."""

    def __init__(self, parts: list[bytes]) -> None:
        super().__init__(b"")
        self.parts = parts

    def stream(self, **_: object) -> Iterator[bytes]:
        yield from self.parts


class Workers:
    """A server of workers' pods that have ended, each with a log of its own; worker-3 may not be read."""

    def __init__(self) -> None:
        self.options: dict[str, dict[str, str | int]] = {}

    def send(self, method: str, path: str, query: Query, *_: object, **__: object) -> Answer:
        """See `ApiClient`."""
        name, _, wanted = path.removeprefix("/api/v1/namespaces/n/pods/").partition("/")
        if not wanted:
            shown = pod("a", "Succeeded")
            shown["metadata"]["name"] = name
            return Answer(json.dumps(shown).encode())
        assert (method, wanted) == ("GET", "log")
        self.options[name] = dict(query)
        if name == "elasticdl-job-worker-3":
            raise ClusterError("User jo cannot get pods/log.", status=403)
        return Answer(log([f"I am {name[-1]}", "Traceback (most recent call last):", "  it broke", "E: x"], 1))


def output_of(server: Workers, shown: Shown) -> ScriptOutput:
    return ScriptOutput(PodLogs(connected(server), "n", PREFIX), PREFIX, 4, shown)


def status_of(*workers: int, rank_0: int = 1) -> JobStatus:
    pods = [PodStatus(f"{PREFIX}worker-{k}", "worker", "Running") for k in workers]
    return JobStatus("job", pods=(*pods, PodStatus(f"{PREFIX}worker-9", "worker", "Pending")), world=(rank_0,))


def test_a_followed_job_shows_the_output_of_rank_0_and_of_its_successor_from_then_on() -> None:
    server = Workers()
    output = output_of(server, Shown.RANK_0)
    assert output.lines(status_of(1, 2), last=True) == ["[worker-1] I am 1"]
    output.lines(status_of(2, rank_0=2), last=True)
    assert "tailLines" not in server.options["elasticdl-job-worker-1"]
    assert server.options["elasticdl-job-worker-2"]["tailLines"] == 0


def test_a_followed_job_shows_the_output_of_all_workers_and_what_it_may_not_read() -> None:
    lines = output_of(Workers(), Shown.ALL_WORKERS).lines(status_of(1, 2, 3), last=True)
    assert lines == ["[worker-1] I am 1", "[worker-2] I am 2", "[worker-3] note: User jo cannot get pods/log."]
