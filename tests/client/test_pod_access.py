"""The API server as a pod reaches it: with the files of its service account, and without the package kubernetes."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from elasticdl_client.certificates import make_certificate
from elasticdl_client.kubernetes import api_client, names
from elasticdl_client.kubernetes.api import IN_CLUSTER, ClusterError, connect
from elasticdl_client.kubernetes.api_client import of_pod
from tests.ready_client import REPOSITORY


class SecureServer:
    """An API server with a certificate of its own for `localhost` that shows the credentials of each call.

    Attributes:
        authority: the certificate that signs its own.
        port: of `localhost`.
    """

    def __init__(self, directory: Path) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps({"credentials": self.headers["Authorization"]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Tests look at the answers."""

        files = make_certificate()
        for name, content in files.items():
            (directory / name).write_text(content)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(directory / names.CERTIFICATE_KEY, directory / names.PRIVATE_KEY_KEY)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.authority = files[names.AUTHORITY_KEY]
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a service account of a pod in the cluster of such a server."""
    monkeypatch.setattr(names, "TLS_NAME", "localhost")
    server = SecureServer(tmp_path)
    directory = tmp_path / "account"
    directory.mkdir()
    for name, content in {"token": "first\n", "ca.crt": server.authority, "namespace": "team"}.items():
        (directory / name).write_text(content)
    monkeypatch.setattr("elasticdl_client.kubernetes.api.SERVICE_ACCOUNT", directory)
    monkeypatch.setattr("elasticdl_client.kubernetes.api.of_pod", lambda: of_pod(directory))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "localhost")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # for addresses outside the cluster
    yield directory
    server.close()


def test_a_pod_shows_its_token_to_the_server_that_its_authority_has_signed(account: Path) -> None:
    connection = connect()
    assert (connection.context, connection.namespace) == (IN_CLUSTER, "team")
    assert connection.get("/api") == {"credentials": "Bearer first"}


def test_a_token_that_the_kubelet_has_replaced_is_read_again(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connect()
    (account / "token").write_text("second\n")
    assert connection.get("/api") == {"credentials": "Bearer first"}
    monkeypatch.setattr(api_client, "_TOKEN_S", 0.0)
    assert connection.get("/api") == {"credentials": "Bearer second"}


def test_a_server_of_another_authority_is_not_shown_the_token(account: Path) -> None:
    (account / "ca.crt").write_text(make_certificate()[names.AUTHORITY_KEY])
    connection = connect()
    with pytest.raises(ClusterError, match=r"cannot be reached: .*CERTIFICATE_VERIFY_FAILED"), connection.doing("look"):
        connection.get("/api")


@pytest.mark.parametrize("name", ["token", "ca.crt", "namespace"])
def test_a_service_account_that_is_not_whole_is_named(account: Path, name: str) -> None:
    (account / name).unlink()
    with pytest.raises(ClusterError, match=f"without a usable service account: .*{name}"):
        connect()


def test_an_ipv6_address_of_the_server_has_brackets(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert connect().server == "https://[fd00::1]:443"


def test_a_master_on_kubernetes_starts_without_the_package(account: Path) -> None:
    """Its import takes a pod longer than all else of its start."""
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from elasticdl.master.kubernetes.environment import ApiClient, ApiServer\n"
        "from elasticdl_client.kubernetes.api_client import of_pod\n"
        f"api = ApiServer(ApiClient(of_pod(Path({str(account)!r}))), 'team')\n"
        "print(api.call('GET', '/api')['credentials'], 'kubernetes' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.stdout == "Bearer first False\n", done.stderr
