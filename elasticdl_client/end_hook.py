"""--on_end: the status of a job that has ended, posted to a URL of the user's.

The master posts it on Kubernetes, the front of a local job here.  A receiver that fails costs one line, never the job.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus, finite
from elasticdl_client.secret_values import hide_in_flag

_TIMEOUT_S = 10.0  # of an attempt, also where a receiver sends a byte now and then
_PAUSES_S = (1.0, 2.0, 4.0)  # before the three retries
_RETRIED = (408, 425, 429)  # and all of 500 and above


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """The result of a post; `text` is a line for the log."""

    is_done: bool
    text: str


def post(
    spec: JobSpec, status: JobStatus, stop: threading.Event | None = None, pauses_s: Sequence[float] = _PAUSES_S
) -> Delivery | None:
    """Post the status of a job that has ended, with retries; raise nothing.

    Args:
        spec: of the job, with --on_end.
        status: the last one.
        stop: set when this process must end.
        pauses_s: before each retry.

    Returns:
        The result; None: `stop` was set before that was known.
    """
    stop = stop or threading.Event()
    where, body = f"--on_end={hide_in_flag('on_end', spec.on_end)}", _body(spec, status)
    for pause_s in (*pauses_s, None):
        code, trouble = _attempt(spec.on_end, body)
        if 200 <= code < 300:
            return Delivery(True, f"{where} has taken the status ({code})")
        may_pass = not code or code >= 500 or code in _RETRIED
        if pause_s is None or not may_pass:
            return Delivery(False, f"{where} has not taken the status of the job: {trouble}")
        if stop.wait(pause_s):
            return None
    raise AssertionError("the last pause is None")


def _attempt(url: str, body: bytes) -> tuple[int, str]:
    """Return the HTTP status, 0 without an answer in time, and the error."""
    answers: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_send(url, body)), name="on_end", daemon=True).start()
    try:
        return answers.get(timeout=_TIMEOUT_S + 1.0)
    except queue.Empty:
        return 0, f"no answer in {_TIMEOUT_S:g} s"


def _send(url: str, body: bytes) -> tuple[int, str]:
    address, headers = _request(url)
    request = urllib.request.Request(address, body, headers, method="POST")
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT_S) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        error.close()
        return error.code, f"it answered {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return 0, str(error.reason)
    except (OSError, ValueError) as error:  # broken connections; an answer that is no HTTP
        return 0, str(error) or type(error).__name__
    except Exception as error:  # noqa: BLE001  http.client has errors of many kinds, and none may cost the job
        return 0, f"{type(error).__name__}: {error}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _request(url: str) -> tuple[str, dict[str, str]]:
    """Return the URL without user and password, and the headers that carry them."""
    headers = {"Content-Type": "application/json", "User-Agent": "elasticdl"}
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if at:
        token = base64.b64encode(unquote(user).encode()).decode()
        headers["Authorization"] = f"Basic {token}"
    return urlunsplit(parts._replace(netloc=host, fragment="")), headers


def _body(spec: JobSpec, status: JobStatus) -> bytes:
    """JSON with the keys of `elasticdl status --output=json`, except those that depend on the caller."""
    plain = dataclasses.asdict(status)
    phase = plain.pop("phase")
    del plain["job_name"]
    head = {"name": spec.job_name, "runtime": spec.runtime, "namespace": spec.namespace, "phase": phase}
    plain |= {"eta_seconds": None, "updated_at": status.updated_at or time.time()}
    return json.dumps(finite(head | plain), allow_nan=False).encode()
