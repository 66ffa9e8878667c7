"""Calls to a Kubernetes API server, with time-outs, retries, and explained errors; JSON in, JSON out.

It knows nothing of pods.  Objects stay the plain dicts that the server sends, so every version of the server is
understood, and nothing is lost between reading and writing.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from urllib3.exceptions import HTTPError

from elasticdl_client.errors import ElasticDLError
from elasticdl_client.kubernetes.api import ClusterError
from elasticdl_client.kubernetes.api_client import ApiClient

Object = dict[str, Any]
Query = dict[str, str | int]

PATIENCE_S = 10.0  # how long a call is retried
ATTEMPT_S = 6.0  # limit of one attempt
_CONNECT_S = 3.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 3.0
_LONGEST_STREAM_PAUSE_S = 5.0
_POOL_SIZE = 32  # connections kept open: for threads that create pods in parallel, and for watches
_CONTENT_TYPES = {"PATCH": "application/strategic-merge-patch+json"}
_QUOTA = "exceeded quota"
_FOR_NOW = (429, 500, 502, 503, 504)
_NO_RIGHT = re.compile(r'User "(?P<user>[^"]+)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)"')
_FORBIDDEN = re.compile(r'^\w+ "[^"]*" is forbidden: ')


class Refusal(ClusterError):
    """The server has rejected a call.

    Attributes:
        reason: The server's reason: AlreadyExists, Conflict, …; may be empty.
        message: The server's message.
        retry_after_s: How long the server wants the client to wait; 0 if it does not say.
    """

    def __init__(self, what: str, hint: str, status: int, said: Object, retry_after_s: float) -> None:
        super().__init__(what, hint, status)
        self.reason = str(said.get("reason") or "")
        self.message = str(said.get("message") or "")
        self.retry_after_s = retry_after_s

    @property
    def exceeds_quota(self) -> bool:
        return self.status == 403 and _QUOTA in self.message


class Closed(ElasticDLError):
    """The connection was closed by its owner."""

    def __init__(self) -> None:
        super().__init__("This connection to the cluster has been closed.")


class ApiCalls:
    """Counts the answers of API servers.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def count(self, method: str, status: str) -> None:
        """Count an answer, or with the status `none` a call without one; see `ApiClient.count_by`."""
        with self._lock:
            self._counts[method, status] += 1

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the number of calls by (HTTP method, status); the status `none` means no answer."""
        with self._lock:
            return dict(self._counts)


class ApiServer:
    """Calls for one namespace of a cluster.  Thread-safe.

    Args:
        api_client: How the server is reached; its connections are not used.
        namespace: Namespace that paths are relative to.
        calls: Counts the calls.
    """

    def __init__(self, api_client: ApiClient, namespace: str, calls: ApiCalls | None = None) -> None:
        self._client = api_client.again(_POOL_SIZE)
        if calls is not None:
            self._client.count_by(calls.count)
        self._namespace = namespace
        self._server = api_client.access.server
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._streams: set[Any] = set()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def pause(self, seconds: float) -> None:
        """Wait, but return at once when the connection is closed."""
        self._closed.wait(seconds)

    def namespaced(self, rest: str) -> str:
        """Return the path of an object in the namespace, such as ``pods/w-0``."""
        return f"/api/v1/namespaces/{self._namespace}/{rest}"

    def call(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: Object | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Object:
        """Make a call, and retry it while the server is temporarily unavailable.

        Raises:
            Refusal: the server rejects the call.
            ClusterError: it does not answer within `patience_s`.
            Closed: this connection is closed.
        """
        answer = json.loads(self._persist(method, path, query, body, patience_s))
        assert isinstance(answer, dict)
        return answer

    def text(self, path: str, query: Query | None = None, patience_s: float = PATIENCE_S) -> str:
        """Like `call`, for an answer that is not JSON, such as a log."""
        return self._persist("GET", path, query, None, patience_s).decode(errors="replace")

    @contextmanager
    def stream(self, path: str, query: Query, silence_s: float) -> Iterator[Iterator[Object]]:
        """Yield the lines of an endless answer as they come; `close` ends it from another thread.

        Args:
            path: Path to watch.
            query: Query parameters.
            silence_s: Seconds without a byte after which the stream counts as broken.

        Raises:
            ClusterError: the stream cannot be opened, or, from the iterator, is broken.
        """
        response = self._send("GET", path, query, None, silence_s)
        with self._lock:
            self._streams.add(response)
        try:
            if self.closed:
                raise Closed
            yield self._lines(response)
        finally:
            with self._lock:
                self._streams.discard(response)
            response.close()
            response.release_conn()

    def close(self) -> None:
        """Close all streams; calls raise `Closed` from now on."""
        self._closed.set()
        with self._lock:
            for response in self._streams:
                with suppress(ValueError, RuntimeError, OSError):  # the stream has just ended by itself
                    response.shutdown()
        self._client.close()

    def _persist(self, method: str, path: str, query: Query | None, body: Object | None, patience_s: float) -> bytes:
        deadline = time.monotonic() + patience_s
        pause_s = _FIRST_PAUSE_S
        while True:
            left_s = deadline - time.monotonic()
            try:
                return self._attempt(method, path, query, body, max(0.5, min(ATTEMPT_S, left_s)))
            except ClusterError as error:
                asked_s = error.retry_after_s if isinstance(error, Refusal) else 0.0
                wait_s = max(pause_s, asked_s)
                if not _is_for_now(method, error) or time.monotonic() + wait_s >= deadline:
                    raise
            self.pause(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _attempt(self, method: str, path: str, query: Query | None, body: Object | None, timeout_s: float) -> bytes:
        response = self._send(method, path, query, body, timeout_s)
        try:
            return bytes(response.data)
        except (HTTPError, OSError) as error:
            raise self._unreachable(error) from error

    def _send(self, method: str, path: str, query: Query | None, body: Object | None, timeout_s: float) -> Any:
        """Send a request; return the answer after its head, an error after its whole body."""
        if self.closed:
            raise Closed
        parameters = list((query or {}).items())
        bounds = (min(_CONNECT_S, timeout_s), timeout_s)
        try:
            kind = _CONTENT_TYPES.get(method, "application/json")
            answer = self._client.send(method, path, parameters, body, content_type=kind, timeout_s=bounds)
            if not 200 <= answer.status <= 299:
                raise self._refused(answer.status, answer.data, answer.headers.get("Retry-After", ""))
        except (HTTPError, OSError) as error:
            raise self._unreachable(error) from error
        return answer

    def _lines(self, response: Any) -> Iterator[Object]:
        rest = b""
        try:
            for chunk in response.stream(amt=None):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield json.loads(line)
        except (HTTPError, OSError, ValueError, AttributeError) as error:
            # AttributeError: `close` has removed the socket during a read
            if isinstance(error, AttributeError) and not self.closed:
                raise
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> ElasticDLError:
        if self.closed:
            return Closed()
        return ClusterError(
            f"The API server of the cluster ({self._server}) does not answer: {_innermost(error)}.",
            "`kubectl cluster-info` shows whether it is running.",
        )

    def _refused(self, status: int, body: bytes, retry_after: str) -> Refusal:
        said: Object = {}
        with suppress(ValueError):
            parsed = json.loads(body)
            said = parsed if isinstance(parsed, dict) else {}
        message = str(said.get("message") or body.decode(errors="replace").strip() or f"HTTP status {status}")
        what, hint = self._explain(status, message)
        retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0
        return Refusal(what, hint, status, {**said, "message": message}, retry_after_s)

    def _explain(self, status: int, message: str) -> tuple[str, str]:
        """Return the meaning of an error for the user, and what to do."""
        if status == 401:
            return "The cluster rejects the credentials (401 Unauthorized).", "They may have expired."
        if status == 403 and (denied := _NO_RIGHT.search(message)):
            who, verb, resource = denied["user"], denied["verb"], denied["resource"]
            return (
                f"{who} has no right to {verb} {resource} in namespace {self._namespace}.",
                "`elasticdl rbac --print` shows the rights that a job needs.",
            )
        if status == 403 and _QUOTA in message:
            return _FORBIDDEN.sub("", message), "Raise the quota of the namespace, or wait until others have ended."
        return _FORBIDDEN.sub("", message), ""


class StreamPauses:
    """How long to wait before a stream is opened again: longer each time, unless the last one was open for a while.

    Args:
        first_s: The shortest pause.
        lasting_s: After a stream that was open for this long there is no pause.
    """

    def __init__(self, first_s: float, lasting_s: float) -> None:
        self._first_s = first_s
        self._lasting_s = lasting_s
        self._opened_at = math.inf
        self._pause_s = 0.0

    def opened(self) -> None:
        """Note that the server has answered without an error; of several calls for a stream, the first counts."""
        self._opened_at = min(self._opened_at, time.monotonic())

    def next_s(self) -> float:
        """Return the pause after a stream, or after a failed attempt to open one."""
        has_lasted = time.monotonic() - self._opened_at >= self._lasting_s
        self._opened_at = math.inf
        self._pause_s = 0.0 if has_lasted else min(max(self._first_s, 2 * self._pause_s), _LONGEST_STREAM_PAUSE_S)
        return self._pause_s


def _is_for_now(method: str, error: ClusterError) -> bool:
    if isinstance(error, Refusal):
        collided = method == "POST" and error.reason == "Conflict"  # two creations have updated one quota at once
        return error.status in _FOR_NOW or collided
    return True


def _innermost(error: BaseException) -> str:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text.splitlines()[0].rstrip(".")
