"""Requests to an API server: what they carry, and what becomes of its answers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kubernetes.client import Configuration

from elasticdl.cluster.kubernetes.api import ApiServer, Refusal
from elasticdl_client.kubernetes.api import ClusterError, Connection
from elasticdl_client.kubernetes.api_client import ApiClient, ApiError, of_configuration

MERGE = "application/merge-patch+json"


class Recorder:
    """Keeps the one request that it gets and sends an answer of the test's."""

    def __init__(self) -> None:
        self.request: dict[str, Any] = {}
        self.status, self.answer, self.retry_after = 200, b'{"metadata": {"resourceVersion": "7"}}', ""
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_PATCH(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                recorder.request = {"path": self.path, "headers": self.headers, "body": body}
                self.send_response(recorder.status)
                self.send_header("Content-Length", str(len(recorder.answer)))
                self.send_header("Retry-After", recorder.retry_after)
                self.end_headers()
                self.wfile.write(recorder.answer)

            do_GET = do_POST = do_PATCH  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Tests look at the request."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def connection(self) -> Connection:
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{self.server.server_address[1]}"
        configuration.api_key = {"authorization": "Bearer secret"}
        return Connection("here", "x", configuration.host, ApiClient(of_configuration(configuration)))


@pytest.fixture
def server() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.server.shutdown()
    recorder.server.server_close()


def test_a_patch_has_content_type_accept_and_user_agent(server: Recorder) -> None:
    answer = server.connection().patch("/api/v1/namespaces/x/pods/y", {"a": "ü"}, MERGE, accept="application/x")
    assert answer["metadata"]["resourceVersion"] == "7"
    headers = server.request["headers"]
    assert server.request["path"] == "/api/v1/namespaces/x/pods/y"
    assert (headers["Content-Type"], headers["Accept"]) == (MERGE, "application/x")
    assert headers["Authorization"] == "Bearer secret"
    assert json.loads(server.request["body"]) == {"a": "ü"}


def test_a_refused_patch_is_an_error_with_the_servers_words(server: Recorder) -> None:
    server.status, server.answer = 409, b'{"message": "it has changed"}'
    connection = server.connection()
    with pytest.raises(ClusterError, match="it has changed") as caught, connection.doing("write"):
        connection.patch("/api/v1/namespaces/x/configmaps/y", {}, MERGE)
    assert caught.value.status == 409
    assert isinstance(caught.value.__cause__, ApiError)


@pytest.mark.parametrize(
    ("status", "said", "hint"),
    [
        (403, "is forbidden: exceeded quota: pods, requested: pods=1", "wait until other pods"),
        (403, "is forbidden: failed quota: cpus: must specify limits.cpu", "A quota of the namespace counts them"),
        (403, "is forbidden: maximum cpu usage per Container is 750m, but limit is 1", "A LimitRange"),
        (403, "is forbidden: minimum memory usage per Pod is 1Gi, but request is 32Mi", "A LimitRange"),
        (
            422,
            "is invalid: spec.containers[0].resources.requests: must be less than or equal to cpu limit",
            "gives no limit",
        ),
        (403, "is forbidden: a policy: you must specify runAsNonRoot", "Ask the administrator"),
        (422, "is invalid: spec.containers[0].resources.requests: must be an integer", "^$"),
    ],
)
def test_what_a_namespace_allows_a_pod_has_its_hint(server: Recorder, status: int, said: str, hint: str) -> None:
    server.status, server.answer = status, json.dumps({"message": f'pods "x" {said}'}).encode()
    connection = server.connection()
    with pytest.raises(ClusterError) as caught, connection.doing("make a pod"):
        connection.patch("/api/v1/namespaces/x/pods/y", {}, MERGE)
    assert re.search(hint, caught.value.hint)


@pytest.mark.parametrize("said", ["maximum cpu usage per Container is 1", "must be less than or equal to cpu limit"])
def test_a_hint_on_limits_names_the_flags_of_the_pods_role(server: Recorder, said: str) -> None:
    server.status, server.answer = 403, json.dumps({"message": f'pods "x" is forbidden: {said}'}).encode()
    connection = server.connection()
    with pytest.raises(ClusterError) as caught, connection.doing("make a ps pod of this job", "ps"):
        connection.patch("/api/v1/namespaces/x/pods/y", {}, MERGE)
    assert "--ps_resource_limit" in caught.value.hint
    assert "--worker_" not in caught.value.hint


def test_a_query_is_quoted(server: Recorder) -> None:
    server.connection().get("/api", [("labelSelector", "a=b,c"), ("limit", 3)])
    assert server.request["path"] == "/api?labelSelector=a%3Db%2Cc&limit=3"


def test_the_masters_calls_carry_the_same_credentials(server: Recorder) -> None:
    api = ApiServer(server.connection().client, "x")
    api.call("POST", api.namespaced("pods"), {"dryRun": "All"}, {"kind": "Pod"})
    assert server.request["path"] == "/api/v1/namespaces/x/pods?dryRun=All"
    assert server.request["headers"]["Authorization"] == "Bearer secret"
    assert json.loads(server.request["body"]) == {"kind": "Pod"}


def test_the_masters_refused_calls_say_why_and_when_to_come_again(server: Recorder) -> None:
    server.status, server.answer, server.retry_after = 422, b'{"reason": "Invalid", "message": "no"}', "3"
    api = ApiServer(server.connection().client, "x")
    with pytest.raises(Refusal) as caught:
        api.call("GET", api.namespaced("pods"))
    assert (caught.value.status, caught.value.reason, caught.value.retry_after_s) == (422, "Invalid", 3.0)
