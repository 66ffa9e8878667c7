"""Identities of workloads on this machine: servers of short-lived credentials, and the storage that checks them.

Credentials are refused some seconds after they were issued.  The end that they name is later, by as much as clients
renew them ahead of it: so clients renew them while a test runs, as they do in months elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs

from tests.storage.faulty_proxy import FaultyProxy

ROLE = "arn:aws:iam::123456789012:role/training"
RENEWED_S = 2.0
REFUSED_S = 12.0  # after it was issued; long enough for a request of a busy machine
_AHEAD_S = 900  # botocore begins to renew then


@dataclass
class Issuer:
    """Make tokens, and know which of them are still good.

    Attributes:
        lifetime_s: of each.
        prefix: of each.
    """

    lifetime_s: float = REFUSED_S
    prefix: str = ""
    _issued: dict[str, float] = field(default_factory=dict)

    def issue(self) -> str:
        """Return a new token."""
        token = self.prefix + secrets.token_hex(12).upper()
        self._issued[token] = time.monotonic()
        return token

    def is_good(self, token: str) -> bool:
        """Whether a token is of this issuer, and not too old."""
        return time.monotonic() - self._issued.get(token, float("-inf")) <= self.lifetime_s

    def __len__(self) -> int:
        return len(self._issued)

    @property
    def num_expired(self) -> int:
        """How many tokens are refused by now."""
        return sum(not self.is_good(token) for token in list(self._issued))


@contextlib.contextmanager
def projected_token(path: Path, issuer: Issuer) -> Iterator[None]:
    """A file with a token that is replaced before it ends, as the kubelet does."""
    ended = threading.Event()

    def write() -> None:
        part = path.with_suffix(".part")
        part.write_text(issuer.issue())
        part.replace(path)

    def renew() -> None:
        while not ended.wait(RENEWED_S):
            write()

    write()
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclass
class AwsIdentity(FaultyProxy):
    """STS, the agent of EKS Pod Identity, and a gate before a server of S3, all at one address.

    Attributes:
        tokens: of the service account.
        keys: that were given for them.
        ahead_s: the end that credentials name is later than that of their renewal by this.
        answer_of: status of each answer of STS and of the agent; 200: they give credentials.
        refused: the codes of the refusals.
    """

    tokens: Issuer = field(default_factory=Issuer)
    keys: Issuer = field(default_factory=lambda: Issuer(prefix="ASIA"))
    ahead_s: float = _AHEAD_S + RENEWED_S
    answer_of: Callable[[], int] = lambda: 200
    refused: list[str] = field(default_factory=list)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        signed = re.search(r"Credential=(\w+)/", handler.headers.get("Authorization", ""))
        if handler.path == "/":
            length = int(handler.headers.get("Content-Length", 0))
            self._assume(handler, parse_qs(handler.rfile.read(length).decode()))
        elif handler.path == "/credentials":
            self._give(handler, handler.headers.get("Authorization", ""))
        elif signed is None or handler.headers.get("X-Amz-Security-Token") != f"of-{signed[1]}":
            self._refuse(handler, 403, "AccessDenied", "Access Denied")
        elif not self.keys.is_good(signed[1]):
            self._refuse(handler, 400, "ExpiredToken", "The provided token has expired.")
        else:
            super().answer(handler)

    def _assume(self, handler: BaseHTTPRequestHandler, asked: dict[str, list[str]]) -> None:
        """AssumeRoleWithWebIdentity of STS."""
        if (status := self.answer_of()) != 200:
            self._refuse(handler, status, "ServiceUnavailable", "Try again.")
        elif asked["RoleArn"] != [ROLE]:
            self._refuse(handler, 403, "AccessDenied", "Not authorized to perform sts:AssumeRoleWithWebIdentity")
        elif not self.tokens.is_good(asked["WebIdentityToken"][0]):
            self._refuse(handler, 400, "ExpiredTokenException", "Token expired: current date/time must be before it")
        else:
            fields = "".join(f"<{name}>{value}</{name}>" for name, value in self._credentials("SessionToken").items())
            result = f"<AssumeRoleWithWebIdentityResult><Credentials>{fields}</Credentials>"
            result += "</AssumeRoleWithWebIdentityResult>"
            name = "AssumeRoleWithWebIdentityResponse"
            text = f'<{name} xmlns="https://sts.amazonaws.com/doc/2011-06-15/">{result}</{name}>'
            send(handler, 200, text, "text/xml")

    def _give(self, handler: BaseHTTPRequestHandler, token: str) -> None:
        """The agent of EKS Pod Identity."""
        status = self.answer_of()
        if status == 200 and not self.tokens.is_good(token):
            status = 400
        if status == 200:
            send(handler, 200, json.dumps(self._credentials("Token")), "application/json")
        else:
            self._refuse(handler, status, "AgentException", "no credentials for this pod")

    def _credentials(self, name_of_token: str) -> dict[str, str]:
        key = self.keys.issue()
        end = datetime.fromtimestamp(time.time() + self.ahead_s, UTC).isoformat(timespec="milliseconds")
        return {"AccessKeyId": key, "SecretAccessKey": "secret", name_of_token: f"of-{key}", "Expiration": end}

    def _refuse(self, handler: BaseHTTPRequestHandler, status: int, code: str, message: str) -> None:
        self.refused.append(code)
        handler.close_connection = True  # the body was not read
        error = f"<Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error>"
        is_sts = handler.path == "/"
        send(handler, status, f"<ErrorResponse>{error}</ErrorResponse>" if is_sts else error, "text/xml")


def send(handler: BaseHTTPRequestHandler, status: int, text: str, kind: str) -> None:
    """Send a whole answer."""
    body = text.encode()
    handler.send_response(status)
    for name, value in (("Content-Type", kind), ("Content-Length", str(len(body)))):
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)
