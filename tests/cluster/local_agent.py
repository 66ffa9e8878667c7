"""Parts of the tests of the local runtime: an agent, an observer of its events, and pipes to its pods."""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from elasticdl.cluster.cluster import Cluster, EventType, Pod, PodEvent, PodPhase
from elasticdl.cluster.local.adapter import ProcessCluster
from elasticdl_client.errors import ElasticDLError

TIMEOUT_S = 120.0


class LocalAgent:
    """An agent process whose client is this test, and a connection to it."""

    def __init__(self, job_dir: Path, slots: int = 0, standby_timeout_s: float = 10.0) -> None:
        self.job_dir = job_dir
        command = [
            sys.executable,
            "-m",
            "elasticdl.cluster.local.agent",
            "--job_dir",
            str(job_dir),
            "--slots",
            str(slots),
        ]
        command += ["--standby_timeout_s", str(standby_timeout_s)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.socket = socket_of(self.process.stdout.readline())
        self.cluster = ProcessCluster(self.socket)

    def log(self) -> str:
        return (self.job_dir / "logs" / "agent.log").read_text()

    def stop(self) -> None:
        self.cluster.close()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(TIMEOUT_S)


def socket_of(line: str | bytes) -> str:
    """The socket in the line that an agent prints."""
    return str(json.loads(line)["socket"])


class Observer:
    """Watches a cluster and waits for what a test expects; remembers everything it has seen."""

    def __init__(self, cluster: Cluster) -> None:
        self.seen: list[PodEvent] = []
        self.ended = threading.Event()
        self.error: ElasticDLError | None = None
        self._arrived: queue.Queue[PodEvent] = queue.Queue()
        self._watch = cluster.watch()
        threading.Thread(target=self._pump, daemon=True).start()

    def _pump(self) -> None:
        try:
            for event in self._watch:
                self._arrived.put(event)
            self.ended.set()
        except ElasticDLError as error:
            self.error = error

    def until(self, expected: Callable[[PodEvent], bool]) -> PodEvent:
        """The next event that is expected."""
        while True:
            event = self._arrived.get(timeout=TIMEOUT_S)
            self.seen.append(event)
            if expected(event):
                return event

    def phase(self, name: str, *phases: PodPhase) -> Pod:
        """Waits until the pod is observed in one of the phases."""
        return self.until(lambda event: event.pod.name == name and event.pod.phase in phases).pod

    def latest(self) -> dict[str, PodEvent]:
        """The last event seen of every pod, by name."""
        return {event.pod.name: event for event in self.seen}

    def ended_pod(self, name: str) -> Pod:
        return self.phase(name, PodPhase.SUCCEEDED, PodPhase.FAILED)

    def deleted(self, name: str) -> Pod:
        return self.until(lambda event: event.pod.name == name and event.type is EventType.DELETED).pod


class Wire:
    """A named pipe: a pod prints into it, the test waits for the words."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        path.chmod(0o666)
        self.path = str(path)

    def read(self) -> list[str]:
        """Waits for one writer and returns the words that it has written."""
        with open(self.path) as pipe:
            return pipe.read().split()


def have_ended(pids: Sequence[int], timeout_s: float = 30.0) -> bool:
    """Whether all these processes, children of whomever, end within the time."""
    poll = select.poll()
    waiting: set[int] = set()
    for pid in pids:
        try:
            waiting.add(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    left = len(waiting)
    try:
        while left:
            ready = poll.poll(timeout_s * 1000)
            if not ready:
                return False
            for fd, _ in ready:
                poll.unregister(fd)
            left -= len(ready)
        return True
    finally:
        for fd in waiting:
            os.close(fd)
