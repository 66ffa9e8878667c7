"""The logs of a job's pods in a cluster, past and new lines.

One thread reads each pod, and the pods are listed every second.

A stream that breaks is opened again at its last line.  When a container is restarted, or a pod replaced, the stream of
the next run is opened.
"""

from __future__ import annotations

import logging
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from elasticdl_client.errors import JobError
from elasticdl_client.job_status import JobStatus
from elasticdl_client.jobs import cluster_objects
from elasticdl_client.jobs.cluster_objects import Object, list_objects, read_pod
from elasticdl_client.jobs.store import JobInfo, LogLine, LogRequest, Phase
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError, Connection
from elasticdl_client.kubernetes.api_client import CONNECT_TIMEOUT_S, object_path

_LOOK_S = 1.0
_SILENCE_S = 300.0  # a stream without a line for so long is opened again: its connection may be dead
_LAST_LINES_S = 10.0  # time for the streams of the job's pods to end after the end of the job
_MAX_REST = 1 << 16  # bytes of an incomplete line that are kept
_OF_ALL_PODS = (401, 403)  # HTTP statuses of errors that the next pod's call would get, too
_BEFORE_ALL = (0.0, "")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)")
_OVERLAP_S = 30.0  # how much further back than its last line a reopened stream begins


def lines(
    connection: Connection, job: JobInfo, request: LogRequest, find: Callable[[], JobInfo | None]
) -> Iterator[LogLine]:
    """Yield the requested log lines.

    Args:
        connection: Connection to the cluster.
        job: The job to read.
        request: Filters: role, tail, since, previous; and whether to follow.
        find: Returns the current state of the job, None once it is deleted.

    Raises:
        JobError: No pod matches, or none has printed anything yet.
        ClusterError: The cluster does not answer, or refuses.
    """
    if request.follow:
        _expect_many_streams()
        return _Follower(connection, job, request, find).lines()
    return _printed(connection, job, request)


def _expect_many_streams() -> None:
    """Silence the warning about a full connection pool: each stream keeps one connection."""
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)


def _printed(connection: Connection, job: JobInfo, request: LogRequest) -> Iterator[LogLine]:
    everything = _pods(connection, job)
    found = [pod for pod in everything if request.takes(_role(pod))]
    if request.role and not found:
        there = ", ".join(_role(pod) for pod in everything)
        raise JobError(
            f'pod "elasticdl-{job.name}-{request.role}" of job {job.name} not found',
            f"There are {there}; the log of a pod goes with it."
            if there
            else f"The job has no pods; see `elasticdl status {job.name}`.",
        )
    if request.previous:
        found = _with_life_before(found, request)
    for pod in found:
        name = str(pod["metadata"]["name"])
        if not cluster_objects.container(pod).get("containerID"):
            why = cluster_objects.pod_status(pod).message or "it has not started"
            if not request.is_of_many:
                raise JobError(f"Pod {name} has printed nothing yet: {why}.", f"See `elasticdl status {job.name}`.")
            continue
        options = _part(request.tail, request.since_s)
        options |= {"previous": "true"} if request.previous else {}
        options |= {"timestamps": "true"} if request.timestamps else {}
        try:
            with connection.doing(f"read the log of pod {name} in namespace {job.namespace}"):
                response = _open(connection, pod, options)
                yield from (_line(name, text, request.timestamps) for text in _split(response))
        except ClusterError as error:
            if error.status == 0:
                read_pod(connection, job.namespace, name)  # raises if the cluster, not this pod, is unreachable
                what = f"The log of pod {name} has broken off, or its node does not answer."
                error = ClusterError(what, f"See `elasticdl status {job.name}`.")
            if not request.is_of_many or error.status in _OF_ALL_PODS:
                raise error
            _note(error.what)  # the pod was deleted after it was listed, or its node does not answer


def _line(pod: str, text: str, has_stamp: bool) -> LogLine:
    stamp, _, rest = text.partition(" ") if has_stamp and text[:1].isdecimal() else ("", "", text)
    return LogLine(pod, rest, stamp)


def _with_life_before(found: list[Object], request: LogRequest) -> list[Object]:
    """Return the pods whose container has an earlier run, which `--previous` reads.

    Raises:
        JobError: No container was restarted.
    """
    again = [pod for pod in found if (cluster_objects.container(pod).get("lastState") or {}).get("terminated")]
    if not again:
        which = "No pod of these" if request.is_of_many else f"Pod {found[0]['metadata']['name']} never"
        raise JobError(
            f"{which} was started again: there is no earlier log.",
            "A lost worker's or server's successor is another pod, and the log of a pod goes with it; "
            "--log_file_path keeps them on a volume.",
        )
    return again


def _part(tail: int, since_s: float) -> dict[str, str | int]:
    """Return the API options that limit the output to the last lines or seconds."""
    options: dict[str, str | int] = {"tailLines": tail} if tail >= 0 else {}
    return options | ({"sinceSeconds": max(1, round(since_s))} if since_s else {})


def _pods(connection: Connection, job: JobInfo) -> list[Object]:
    return sorted(list_objects(connection, "pod", job.namespace, job.name), key=cluster_objects.sort_key)


def _role(pod: Object) -> str:
    role, index = cluster_objects.label(pod, names.ROLE_LABEL), cluster_objects.label(pod, names.INDEX_LABEL)
    return role if role == "master" else f"{role}-{index}"


def _open(
    connection: Connection,
    pod: Object,
    options: Mapping[str, str | int],
    timeout_s: tuple[float, float] | None = None,
) -> Any:
    path = object_path("pods", pod["metadata"]["name"], pod["metadata"]["namespace"]) + "/log"
    query = {"container": cluster_objects.container(pod)["name"], **options}
    return connection.open(path, list(query.items()), timeout_s)


def _split(response: Any) -> Iterator[str]:
    rest = b""
    try:
        for block in response.stream(amt=None, decode_content=False):
            *whole, rest = (rest + block).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
            overwritten, _, newest = rest.rpartition(b"\r")
            if len(rest) > _MAX_REST and overwritten:  # a progress bar may write over one line for hours
                yield (line := overwritten.decode(errors="replace"))
                stamp = line.partition(" ")[0]
                rest = stamp.encode() + b" " + newest if _time_of(stamp) else newest
        if rest:
            yield rest.decode(errors="replace")
    finally:
        response.close()


class _Position:
    """A reader's position in the logs of a container's runs, by the kubelet's time stamps.

    Stamps need not grow: a node's clock may be set back. So they are compared only at the beginning of a new stream.
    """

    def __init__(self, tail: int, since_s: float) -> None:
        self._tail = tail
        self._since_s = since_s
        self._stamp, self._time = "", _BEFORE_ALL  # of the last line taken
        self._num_taken = 0  # lines taken with exactly this time
        self._num_seen = 0  # how many of them the current stream has repeated
        self._is_behind = False  # the current stream repeats lines that were read before
        self._read_at: float | None = None  # None: no line of this run was read yet

    @property
    def stamp(self) -> str:
        """The time stamp of the last line taken."""
        return self._stamp

    def begin_next_life(self) -> None:
        """Start at the beginning of the next run's log.

        Lines read before the API server showed the restart are skipped: the kubelet serves them earlier.
        """
        self._tail, self._since_s, self._read_at = -1, 0.0, None

    def options(self) -> dict[str, str | int]:
        """Return the options of a new stream: from this position on, with some overlap before it."""
        self._num_seen, self._is_behind = 0, bool(self._stamp)
        if self._read_at is not None:
            return {"sinceSeconds": int(time.monotonic() - self._read_at + _OVERLAP_S)}
        return _part(self._tail, self._since_s)

    def take(self, line: str) -> str | None:
        """Return the text of a stamped line; None if it was read before or has no stamp (a message of the kubelet)."""
        stamp, _, text = line.partition(" ")
        at = _time_of(stamp)
        if at is None or (self._is_behind and self._was_read(at)):
            return None
        self._num_taken = self._num_taken + 1 if at == self._time else 1
        self._stamp, self._time, self._is_behind, self._read_at = stamp, at, False, time.monotonic()
        return text

    def _was_read(self, at: tuple[float, str]) -> bool:
        if at == self._time:
            self._num_seen += 1
            self._is_behind = self._num_seen < self._num_taken
        return at <= self._time


def _time_of(stamp: str) -> tuple[float, str] | None:
    """Return seconds since the Unix epoch and the digits of the fraction, which a float would round; None: no stamp."""
    found = _STAMP.fullmatch(stamp)
    if found is None:
        return None
    return datetime.fromisoformat(found[1] + found[3]).timestamp(), (found[2] or "").ljust(9, "0")


def _note(what: str) -> None:
    print(f"note: {what}", file=sys.stderr, flush=True)


class _PodReader:
    """Reads one pod, identified by its uid, through all runs of its container, and puts its lines into a queue."""

    def __init__(
        self,
        connection: Connection,
        pod: Object,
        position: _Position,
        lines: queue.SimpleQueue[LogLine],
        say: Callable[[str], None] = _note,
    ) -> None:
        self._connection = connection
        self._say = say
        self._is_closed = False
        self._name, self._namespace = str(pod["metadata"]["name"]), str(pod["metadata"]["namespace"])
        self._uid = pod["metadata"]["uid"]
        self._position = position
        self._lines = lines
        self.thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        life, position = "", self._position
        while not self._is_closed:
            try:
                pod = self._look()
                if pod is None:
                    return
                current = cluster_objects.container(pod).get("containerID", "")
                if current not in ("", life):
                    if life:
                        position.begin_next_life()
                    life = current
                if life:
                    self._read(pod, position)
                if not _may_print(pod):  # it had ended before this read, so the read was complete
                    return
            except ClusterError as error:
                if not error.unreachable and error.status not in (400, 404):  # its container, or it, is being replaced
                    self._say(error.what)
                    return
            threading.Event().wait(_LOOK_S)

    def close(self) -> None:
        """Let the thread end with the next line that the pod prints; that line and later ones are dropped."""
        self._is_closed = True

    def _read(self, pod: Object, position: _Position) -> None:
        with self._connection.doing(f"read the log of pod {self._name}"):
            options = {"follow": "true", "timestamps": "true", **position.options()}
            response = _open(self._connection, pod, options, (CONNECT_TIMEOUT_S, _SILENCE_S))
            if self._look() is None:  # logs are read by name, which a successor may have
                response.close()
                return
            for line in _split(response):
                if self._is_closed:
                    response.close()
                    return
                if (text := position.take(line)) is not None:
                    self._lines.put(LogLine(self._name, text, position.stamp))

    def _look(self) -> Object | None:
        """Return the pod of this reader; None once it is deleted."""
        pod = read_pod(self._connection, self._namespace, self._name)
        return pod if pod is not None and pod["metadata"]["uid"] == self._uid else None


class PodLogs:
    """Log lines of a job's workers for a client that follows the job; one thread reads each worker.

    Args:
        connection: Connection to the cluster.
        namespace: Namespace of the job.
        prefix: Prefix of the pods' names, `elasticdl-JOB-`.
    """

    def __init__(self, connection: Connection, namespace: str, prefix: str) -> None:
        self._connection = connection
        self._namespace = namespace
        self._prefix = prefix
        self._deadline: float | None = None  # when to stop waiting for the last lines of all workers
        _expect_many_streams()

    def workers(self, status: JobStatus) -> list[str]:
        """Return the workers that have started."""
        started = [pod for pod in status.pods if pod.role == "worker" and pod.phase != "Pending"]
        return [pod.name.removeprefix(self._prefix) for pod in started]

    def open(self, worker: str, *, from_now: bool) -> _PodLines | None:
        """Start to read a worker; return None while it has no container, or if the cluster does not answer."""
        try:
            pod = read_pod(self._connection, self._namespace, f"{self._prefix}{worker}")
        except ClusterError as error:
            if not error.unreachable:
                raise
            return None
        if pod is None or not cluster_objects.container(pod).get("containerID"):
            return None
        lines: queue.SimpleQueue[LogLine] = queue.SimpleQueue()
        position = _Position(0 if from_now else -1, 0.0)
        reader = _PodReader(
            self._connection, pod, position, lines, lambda what: lines.put(LogLine(worker, f"note: {what}"))
        )
        return _PodLines(reader, lines, self._wait_for_end)

    def _wait_for_end(self, reader: _PodReader) -> None:
        """Wait for a pod's last lines; all pods together share one time limit."""
        if self._deadline is None:
            self._deadline = time.monotonic() + _LAST_LINES_S
        reader.thread.join(max(0.0, self._deadline - time.monotonic()))


class _PodLines:
    """The lines of one pod; `lines` returns those since the previous call."""

    def __init__(
        self, reader: _PodReader, lines: queue.SimpleQueue[LogLine], wait_for_end: Callable[[_PodReader], None]
    ) -> None:
        self._reader = reader
        self._queue = lines
        self._wait_for_end = wait_for_end

    def lines(self, *, last: bool) -> list[str]:
        if last:
            self._wait_for_end(self._reader)
        found = list[str]()
        while not self._queue.empty():  # this is the only consumer
            found.append(self._queue.get().text)
        return found

    def close(self) -> None:
        self._reader.close()


class _Follower:
    def __init__(
        self, connection: Connection, job: JobInfo, request: LogRequest, find: Callable[[], JobInfo | None]
    ) -> None:
        self._connection = connection
        self._job = job
        self._request = request
        self._find = find
        self._lines: queue.SimpleQueue[LogLine] = queue.SimpleQueue()
        self._readers: dict[str, _PodReader] = {}
        self._said = ""

    def lines(self) -> Iterator[LogLine]:
        """Yield lines until the job, or the only requested pod, has ended."""
        asked, look_at, deadline = (self._request.tail, self._request.since_s), 0.0, float("inf")
        while True:
            if time.monotonic() >= look_at:
                if self._look(*asked):
                    deadline = min(deadline, time.monotonic() + _LAST_LINES_S)
                asked, look_at = (-1, 0.0), time.monotonic() + _LOOK_S
            try:
                yield self._lines.get(timeout=_LOOK_S / 4)
            except queue.Empty:
                reads = any(reader.thread.is_alive() for reader in self._readers.values())
                if time.monotonic() > deadline or (deadline < float("inf") and not reads and self._lines.empty()):
                    return

    def _look(self, tail: int, since_s: float) -> bool:
        """Start readers for new pods; return whether no more pods will come."""
        try:
            found = _pods(self._connection, self._job)
            wanted = [pod for pod in found if self._request.takes(_role(pod))]
            for pod in wanted:
                if (uid := pod["metadata"]["uid"]) not in self._readers:
                    position = _Position(tail, since_s)
                    self._readers[uid] = _PodReader(self._connection, pod, position, self._lines)
            return self._is_over(found, wanted)
        except ClusterError as error:
            if not error.unreachable:
                raise
            self._say(error.what)
            return False

    def _is_over(self, found: list[Object], wanted: list[Object]) -> bool:
        master = next((pod for pod in found if _role(pod) == "master"), None)
        if master is not None and cluster_objects.label(master, names.STATUS_LABEL) in ("Finished", "Failed"):
            return True
        if self._request.role.startswith("worker-") and self._readers and not any(map(_may_print, wanted)):
            return True  # a worker's successor has another number
        if master is not None and cluster_objects.pod_status(master).phase in ("Pending", "Running"):
            return False
        job = self._find()
        if job is None or job.has_ended:
            return True
        if job.phase is Phase.STOPPED:
            self._say(f"{job.note} `elasticdl resume {job.name}` continues it.")
        return False

    def _say(self, what: str) -> None:
        if what != self._said:
            self._said = what
            _note(what)


def _may_print(pod: Object) -> bool:
    return cluster_objects.pod_status(pod).phase in ("Pending", "Running")
