"""Identities of workloads on this machine: servers of short-lived credentials, and the storage that checks them.

Credentials are refused some seconds after they were issued.  The end that they name is later, by as much as clients
renew them ahead of it: so clients renew them while a test runs, as they do in months elsewhere.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import secrets
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
            _send(handler, 200, text, "text/xml")

    def _give(self, handler: BaseHTTPRequestHandler, token: str) -> None:
        """The agent of EKS Pod Identity."""
        status = self.answer_of()
        if status == 200 and not self.tokens.is_good(token):
            status = 400
        if status == 200:
            _send(handler, 200, json.dumps(self._credentials("Token")), "application/json")
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
        _send(handler, status, f"<ErrorResponse>{error}</ErrorResponse>" if is_sts else error, "text/xml")


@dataclass
class GoogleIdentity(FaultyProxy):
    """The metadata server of GKE, and a gate before a server of Google Cloud Storage, at one address.

    Attributes:
        tokens: that were given.
        ahead_s: the end that tokens name is later than that of their renewal by this.
        answer_of: status of each answer about a token; 200: there is one.
        refused: the statuses of the refusals.
    """

    tokens: Issuer = field(default_factory=Issuer)
    ahead_s: float = 300 + RENEWED_S  # gcsfs begins to renew 300 s ahead
    answer_of: Callable[[], int] = lambda: 200
    refused: list[int] = field(default_factory=list)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        path = handler.path.partition("?")[0]
        if handler.headers.get("Metadata-Flavor") == "Google":
            self._tell(handler, path)
        elif not self.tokens.is_good(handler.headers.get("Authorization", "").removeprefix("Bearer ")):
            self._refuse(handler, 401)
        else:
            super().answer(handler)

    def _tell(self, handler: BaseHTTPRequestHandler, path: str) -> None:
        if path.endswith("/token"):
            if (status := self.answer_of()) != 200:
                self._refuse(handler, status)
                return
            token = {"access_token": self.tokens.issue(), "expires_in": int(self.ahead_s), "token_type": "Bearer"}
            _send(handler, 200, json.dumps(token), "application/json", {"Metadata-Flavor": "Google"})
            return
        account = {"email": "training@project.iam.gserviceaccount.com", "scopes": [], "aliases": ["default"]}
        found = {"/computeMetadata/v1/project/project-id": "project", "/": ""}.get(path)
        if "/service-accounts/" in path:
            found = json.dumps(account)
        kind = "application/json" if found and found.startswith("{") else "text/plain"
        _send(handler, 404 if found is None else 200, found or "", kind, {"Metadata-Flavor": "Google"})

    def _refuse(self, handler: BaseHTTPRequestHandler, status: int) -> None:
        self.refused.append(status)
        handler.close_connection = True  # the body was not read
        error = {"error": {"code": status, "message": "Invalid Credentials"}}
        _send(handler, status, json.dumps(error), "application/json", {"Metadata-Flavor": "Google"})


_CLAIMS = {"aud": "https://storage.azure.com", "iss": "https://sts.windows.net/ab1f708d-50f6-404c-a006-d71b2ac7a606/"}


class AzureIdentity:
    """Microsoft Entra's endpoint of tokens, by TLS, which gives tokens for the token of a service account.

    Attributes:
        tokens: of the service account; the client reads their file at most every ten minutes.
        ahead_s: the end that tokens name is later than that of their renewal by this.
        lifetime_s: of the tokens that it gives; their own claim has it, which the storage checks.
        given: moments at which tokens were given.
        answer_of: status of each answer; 200: there is a token.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self.tokens = Issuer(3600.0)
        self.ahead_s = 300 + RENEWED_S  # azure-core begins to renew 300 s ahead
        self.lifetime_s = REFUSED_S
        self.given: list[float] = []
        self.answer_of: Callable[[], int] = lambda: 200
        identity = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_POST(self) -> None:
                identity.answer(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        asked = parse_qs(handler.rfile.read(int(handler.headers.get("Content-Length", 0))).decode())
        status = self.answer_of()
        if status == 200 and not self.tokens.is_good(asked["client_assertion"][0]):
            status = 401
        if status != 200:
            error = {"error": "invalid_client", "error_description": "AADSTS700024: the assertion is not valid"}
            _send(handler, status, json.dumps(error), "application/json")
            return
        now = time.time()
        claims = {**_CLAIMS, "iat": int(now) - 5, "nbf": int(now) - 5, "exp": int(now + self.lifetime_s)}
        self.given.append(time.monotonic())
        parts = (json.dumps(part).encode() for part in ({"alg": "none", "typ": "JWT"}, claims))
        token = ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts) + ".c2lnbmVk"
        answer = {"access_token": token, "expires_in": int(self.ahead_s), "token_type": "Bearer"}
        _send(handler, 200, json.dumps(answer), "application/json")

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def self_signed(directory: Path) -> tuple[Path, Path]:
    """Write a certificate of 127.0.0.1 that is its own authority, and its key."""
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def _send(
    handler: BaseHTTPRequestHandler, status: int, text: str, kind: str, headers: dict[str, str] | None = None
) -> None:
    body = text.encode()
    handler.send_response(status)
    for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)
