"""Access to the dashboard: a token, a host, and for actions a second token.

Every request passes `AccessGate`, that for a picture, too.  The token of the address is exchanged for a cookie that the
page's scripts cannot read; both are compared in constant time.  The Host header must name this server, or a page of
another site could reach it under that site's name (DNS rebinding).  Actions need a header that only the page itself
can set.  Nothing here knows what is behind.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ACTION_HEADER = "x-elasticdl-action"
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
        token: of the address; hex, at least 32 characters.
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
        """Whether a Host header names this server; its port may be that of a tunnel."""
        try:
            name = urlsplit(f"//{header}").hostname or ""
        except ValueError:
            return False
        if name == "localhost" or name in self.hosts:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.is_public or address.is_loopback


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
        """The answer to a request that does not pass; the exchange of the token for a cookie is one, too."""
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
        response = RedirectResponse(".", 303)  # relative: there may be a prefix in front
        response.set_cookie(
            self._keys.cookie, self._keys.session, httponly=True, samesite="strict", path=_directory(request.url.path)
        )
        return response

    def _is_of_page(self, request: Request) -> bool:
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            return False
        return _equal(request.headers.get(ACTION_HEADER, ""), self._keys.action)


def hosts_of(names: str) -> tuple[str, ...]:
    """Host names that a comma separates."""
    return tuple(name.strip().lower() for name in names.split(",") if name.strip())


def _directory(path: str) -> str:
    return path.rpartition("/")[0] + "/"


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


def _forbidden(why: str) -> Response:
    return PlainTextResponse(f"{why}\n", 403)
