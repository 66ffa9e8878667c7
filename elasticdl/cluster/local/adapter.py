"""The adapter of the port `Cluster` for the local runtime: pods are processes of this machine, owned by the agent.

It only communicates; the agent and its kubelet own every process.

The protocol with the agent, over its Unix socket, is one JSON object per line.  A request is ``{"verb": …, …}``, an
answer ``{"ok": …}`` or ``{"error": {"what": …, "hint": …}}``; after the verb ``watch`` the connection has only events.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from elasticdl.cluster.cluster import (
    CannotResize,
    EndReason,
    EventType,
    Pod,
    PodEvent,
    PodPhase,
    PodSpec,
    RestartPolicy,
)
from elasticdl.protocol import Role
from elasticdl_client.errors import ElasticDLError

_ANSWER_TIMEOUT_S = 30.0
_MAX_LOG_BYTES = 1 << 20  # see the port; a job of weeks prints gigabytes


class ProcessCluster:
    """The local runtime's cluster.  Thread-safe.

    Args:
        socket_path: Path of the agent's socket, which the agent prints.
    """

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._lock = threading.Lock()  # one request at a time on its connection
        self._connection: _Connection | None = None
        self._open_lock = threading.Lock()  # guards the two attributes below
        self._open: set[_Connection] = set()
        self._closed = False

    def create(self, spec: PodSpec) -> Pod:
        return pod_from_message(self._ask({"verb": "create", "spec": asdict(spec)}))

    def delete(self, name: str, grace_s: float | None = None) -> None:
        self._ask({"verb": "delete", "name": name, "grace_s": grace_s})

    def list(self) -> list[Pod]:
        return [pod_from_message(message) for message in self._ask({"verb": "list"})]

    def watch(self) -> Iterator[PodEvent]:
        """See the port; the watch has begun when this returns, and `close` ends it without an error.

        Raises:
            ElasticDLError: the agent is gone; raised here or by the iterator.
        """
        connection = self._connect()
        connection.send({"verb": "watch"})
        return self._events(connection)

    def resize(self, spec: PodSpec) -> int:
        raise CannotResize("The processes of one machine share its memory.")

    def logs(self, name: str) -> str:
        path = Path(self._ask({"verb": "log_path", "name": name}))
        try:
            with path.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _MAX_LOG_BYTES))
                return log.read(_MAX_LOG_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def set_slots(self, slots: int | None) -> None:
        """Set how many PS and worker pods may run at once, for tests and demonstrations.

        The youngest workers above it are preempted.  None: unlimited.
        """
        self._ask({"verb": "set_slots", "slots": slots})

    def wait_for_standby(self, timeout_s: float) -> None:
        """Wait until pods of the current framework can be forked from the standby.  For tests and benchmarks.

        Raises:
            ElasticDLError: the standby is not ready in time.
        """
        connection = self._connect()
        try:
            connection.send({"verb": "wait_for_standby"})
            if connection.receive(timeout_s) is None:
                raise _agent_is_gone(self._socket_path)
        finally:
            self._release(connection)

    def close(self) -> None:
        """Close all watches and the connection; the pods keep running."""
        with self._open_lock:
            self._closed = True
            for connection in self._open:
                connection.interrupt()

    def _events(self, connection: _Connection) -> Iterator[PodEvent]:
        try:
            while (message := connection.receive(None)) is not None:
                yield PodEvent(EventType(message["type"]), pod_from_message(message["pod"]))
        finally:
            self._release(connection)
        if not self._closed:
            raise _agent_is_gone(self._socket_path)

    def _ask(self, request: Message) -> Any:
        with self._lock:
            if self._connection is None:
                self._connection = self._connect()
            answer = None
            try:
                self._connection.send(request)
                answer = self._connection.receive(_ANSWER_TIMEOUT_S)
            finally:
                if answer is None:
                    self._release(self._connection)
                    self._connection = None
        if answer is None:
            raise _agent_is_gone(self._socket_path)
        if "error" in answer:
            raise ElasticDLError(answer["error"]["what"], answer["error"]["hint"])
        return answer["ok"]

    def _connect(self) -> _Connection:
        with self._open_lock:
            if self._closed:
                raise ElasticDLError("This connection to the agent has been closed.")
            connection = _Connection(self._socket_path)
            self._open.add(connection)
            return connection

    def _release(self, connection: _Connection) -> None:
        with self._open_lock:
            self._open.discard(connection)
            connection.close()


class _Connection:
    """A connection to the agent that sends and receives messages."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise _agent_is_gone(path) from error
        self._lines: BinaryIO = self._socket.makefile("rb")

    def send(self, message: Message) -> None:
        try:
            self._socket.sendall(encode(message))
        except OSError as error:
            raise _agent_is_gone(self._path) from error

    def receive(self, timeout_s: float | None) -> Message | None:
        """Return the next message; None at the end of the connection."""
        try:
            self._socket.settimeout(timeout_s)
            line = self._lines.readline()
        except TimeoutError as error:
            raise ElasticDLError(f"The agent has not answered within {timeout_s:g} s.") from error
        except OSError:
            return None
        return decode(line) if line.endswith(b"\n") else None

    def interrupt(self) -> None:
        """End a `receive` in another thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the agent has already closed it
            return

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


def _agent_is_gone(path: str) -> ElasticDLError:
    return ElasticDLError(
        f"The agent of the local runtime does not answer at {path}: the job has ended.",
        "Start the job again; see agent.log among the job's logs for the reason.",
    )


Message = dict[str, Any]

MAX_LINE_BYTES = 16 << 20


def encode(message: Message) -> bytes:
    """Return a message as one line, with its newline."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message of one line.

    Raises:
        ValueError: the line is not a JSON object.
    """
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"not an object: {line[:80]!r}")
    return message


def spec_from_message(message: Message) -> PodSpec:
    """Return the `PodSpec` of a message: the inverse of `asdict`, after JSON.

    Raises:
        KeyError, TypeError, ValueError: a field is missing, unknown, or has an invalid value.
    """
    typed = {
        "role": Role(message["role"]),
        "command": tuple(message["command"]),
        "restart_policy": RestartPolicy(message["restart_policy"]),
    }
    return PodSpec(**(message | typed))


def pod_from_message(message: Message) -> Pod:
    """Return the `Pod` of a message: the inverse of `asdict`, after JSON."""
    typed = {
        "role": Role(message["role"]),
        "phase": PodPhase(message["phase"]),
        "reason": EndReason(message["reason"]),
    }
    return Pod(**(message | typed))
