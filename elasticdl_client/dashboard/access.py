"""Who may look at the dashboard and what a visitor may do: a token, a host, and for actions a second token."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elasticdl_client import job_dir, worker_range
from elasticdl_client.choices import RUN_MODULE, Runtime
from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.jobs.options import Options
from elasticdl_client.jobs.store import JobInfo, JobStore, Phase

ACTION_HEADER = "x-elasticdl-action"
_HOST = re.compile(r"[a-z0-9]([a-z0-9_.-]*[a-z0-9])?")
_SAFE_METHODS = ("GET", "HEAD")
_HEADERS = {
    # No inline script or style and nothing of another origin: text from a job that became markup could do nothing.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, slots=True)
class Keys:
    """The secrets that open the dashboard.

    Attributes:
        token: Token in the address; hex, at least 32 characters.
        hosts: names that the Host header may have besides localhost and addresses.
        port: for the name of the cookie: browsers send a host's cookies to all of its ports.
        is_public: the server listens on other than loopback addresses, so Host may be any address.
    """

    token: str
    hosts: tuple[str, ...] = ()
    port: int = 0
    is_public: bool = False

    @property
    def cookie(self) -> str:
        return f"elasticdl_dashboard_{self.port}"

    @property
    def session(self) -> str:
        """The cookie's value, of which the token cannot be computed."""
        return self._derived("session")

    @property
    def action(self) -> str:
        """The value of `ACTION_HEADER`."""
        return self._derived("action")

    def _derived(self, purpose: str) -> str:
        return hmac.new(self.token.encode(), purpose.encode(), hashlib.sha256).hexdigest()

    def knows_host(self, header: str) -> bool:
        """Return whether a Host header names this server; its port may be that of a tunnel."""
        try:
            name = urlsplit(f"//{header}").hostname or ""
        except ValueError:
            return False
        if name == "localhost" or name in self.hosts:
            return True
        address = _address(name)
        return address is not None and (self.is_public or address.is_loopback)


class AccessGate:
    """Lets requests with the token through, and sets the headers of every answer."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Return the response to a request that does not pass; one kind exchanges the token for a cookie."""
        if not self._keys.knows_host(request.headers.get("host", "")):
            return _forbidden("The dashboard does not have this name; --hosts gives it one.")
        given = request.query_params.get("token")
        if given is not None:
            if request.method not in _SAFE_METHODS or not _equal(given, self._keys.token):
                return _forbidden("This token is not the dashboard's: its address is printed when it starts.")
            return self._admitted(request)
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _equal(bearer, self._keys.token):
            return None  # no browser sends it by itself, so it stands for the header of actions, too
        if not _equal(request.cookies.get(self._keys.cookie, ""), self._keys.session):
            return _forbidden("Open the dashboard by its whole address, with the token: it is printed when it starts.")
        if request.method not in _SAFE_METHODS and not self._is_of_page(request):
            return _forbidden("Only the dashboard's own page can ask for this.")
        return None

    def _admitted(self, request: Request) -> Response:
        # Lax: a browser that follows a link of another site, as of a terminal in a browser, would not send a strict
        # cookie. It sends a lax one when it opens a page alone, which changes nothing.
        response = RedirectResponse(".", 303)  # relative: there may be a prefix in front
        response.set_cookie(
            self._keys.cookie, self._keys.session, httponly=True, samesite="lax", path=_directory(request.url.path)
        )
        return response

    def _is_of_page(self, request: Request) -> bool:
        origin = request.headers.get("origin")
        if origin is not None and not self._is_own(origin, request.headers.get("host", "")):
            return False
        return _equal(request.headers.get(ACTION_HEADER, ""), self._keys.action)

    def _is_own(self, origin: str, host: str) -> bool:
        """Return whether an origin is that of the page; a proxy may send a Host of its own."""
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return parts.netloc == host or parts.hostname in self._keys.hosts


def hosts_of(names: str) -> tuple[str, ...]:
    """Host names and IP addresses that a comma separates.

    Raises:
        FlagError: one is neither, but the address of a page, or has letters that a browser sends otherwise.
    """
    found = tuple(name.strip().lower() for name in names.split(",") if name.strip())
    for name in found:
        if not _HOST.fullmatch(name) and _address(name) is None:
            hint = "Give names or IP addresses without https:// and port, such as dash.example."
            raise FlagError(f"--hosts: '{name}' is not the name of a host.", hint)
    return tuple(str(_address(name) or name) for name in found)  # as browsers write them, such as fd00::7


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _directory(path: str) -> str:
    return path.rpartition("/")[0] + "/"


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


def _forbidden(why: str) -> Response:
    return PlainTextResponse(f"{why}\n", 403)


_DELETE_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 30.0  # a client that resumes has taken the job's directory by then, or has said why not
_LOOK_S = 0.1


class Action(StrEnum):
    """The name of the command that does the same."""

    DELETE = "delete"
    RESUME = "resume"
    SCALE = "scale"


def possible(job: JobInfo, store: JobStore) -> frozenset[Action]:
    """Return the actions that a job's state and the client's own rights allow.

    Raises:
        ElasticDLError: the cluster does not say what its user may do.
    """
    wanted = {Action.DELETE}
    if job.phase is Phase.STOPPED:
        wanted.add(Action.RESUME)
    if not job.has_ended and _can_be_scaled(job):
        wanted.add(Action.SCALE)
    return frozenset(action for action in wanted if store.may(job, action))


def _can_be_scaled(job: JobInfo) -> bool:
    try:
        return job.spec is not None and worker_range.parse_request(str(job.spec.num_workers), job.spec).least >= 0
    except FlagError:
        return False


def perform(action: Action, job: JobInfo, store: JobStore, options: Options, num_workers: str = "") -> str:
    """Perform the action; return a message for people.

    Args:
        options: Options of the dashboard, for the command that resumes a local job.
        num_workers: New number of workers of the job, as the user has written it.

    Raises:
        ElasticDLError: it cannot be done.
    """
    if action is Action.DELETE:
        store.delete(job, _DELETE_TIMEOUT_S)
        return f"Job {job.name} is deleted."
    if action is Action.SCALE:
        if job.has_ended or job.spec is None:
            raise JobError(f"Job {job.name} is {job.phase.lower()}: it cannot be scaled.")
        number = worker_range.parse_request(num_workers, job.spec)
        return f"Job {job.name} is scaled: workers {store.scale(job, number)} → {number}."
    if job.phase is not Phase.STOPPED:
        raise JobError(f"Job {job.name} is {job.phase.lower()}: there is nothing to resume.")
    if job.runtime is Runtime.LOCAL:
        _resume_here(job, options)
    else:
        store.resume(job)
    return f"Job {job.name} is resumed."


def command(verb: str, job: JobInfo, options: Options, *more: str) -> Sequence[str]:
    """`elasticdl VERB JOB` for this job and no other, as arguments of a process."""
    where = [f"--runtime={job.runtime.value}"]
    if job.runtime is Runtime.LOCAL:
        where.append(f"--job_dir={job.directory}")
    else:
        where.append(f"--namespace={job.namespace}")
        where += [f"--context={job.context}"] if job.context else []
        where += ["--force_use_kube_config_file"] if options.force_use_kube_config_file else []
    return [sys.executable, *RUN_MODULE, "elasticdl_client.main", verb, job.name, *where, *more]


def _resume_here(job: JobInfo, options: Options) -> None:
    directory = Path(job.directory)
    said = directory / "logs" / "resume.txt"
    with said.open("wb") as file:
        client = subprocess.Popen(
            command(Action.RESUME, job, options),
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not job_dir.holders(directory):
        with suppress(subprocess.TimeoutExpired):
            if client.wait(_LOOK_S):
                raise JobError(f"Job {job.name} was not resumed: {said.read_text(errors='replace').strip()[-2000:]}")
            return
        if time.monotonic() > deadline:
            raise JobError(f"Job {job.name} does not start; its client's output is in {said}.")
