"""HTTP calls to one API server, with its credentials and TLS settings: paths and JSON in, answers out, no models.

The package kubernetes reads kubeconfig files, and makes their connections and credentials (`of_configuration`).  Its
import takes up to half a second of a processor, so a pod does without it (`of_pod`).  Its models, the larger part of
that, are not used: objects stay the plain dicts that the server sends.
"""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from elasticdl_client.version import VERSION

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where a pod finds its own
_TOKEN_S = 60.0  # the kubelet replaces the token of a pod long before it expires
_POOL_SIZE = 10

Query = Sequence[tuple[str, str | int]]


class ApiError(Exception):
    """An answer of the server that is an error.

    Attributes:
        status: HTTP status code.
        reason: HTTP reason phrase.
        body: Body of the response; may be empty.
    """

    def __init__(self, status: int, reason: str, body: str) -> None:
        super().__init__(f"({status}) {reason}")
        self.status = status
        self.reason = reason
        self.body = body


@dataclass(frozen=True, slots=True)
class Access:
    """How an API server is reached.

    Attributes:
        server: its URL.
        authorize: returns the headers with the credentials.
        pool: makes a `urllib3.PoolManager` with the TLS settings that keeps so many connections open.
        configuration: returns the same as a `kubernetes.client.Configuration`, for the parts of that package that make
            connections of their own.
    """

    server: str
    authorize: Callable[[], Mapping[str, str]]
    pool: Callable[[int], Any]
    configuration: Callable[[], Any]


class ApiClient:
    """Sends requests and keeps connections open.  Thread-safe.

    Args:
        access: how the server is reached.
        pool_size: connections that are kept open.
        first_answer_s: how long a call without a time-out waits for each of connection and answer, until the server
            has answered once.
    """

    def __init__(self, access: Access, pool_size: int = _POOL_SIZE, first_answer_s: float = READ_TIMEOUT_S) -> None:
        self.access = access
        self._pool = access.pool(pool_size)
        self._first_answer_s = first_answer_s
        self._has_answered = False
        self._count: Callable[[str, str], None] = lambda method, status: None

    def count_by(self, count: Callable[[str, str], None]) -> None:
        """Call `count` with method and status of each request from now on; the status `none` means no answer."""
        self._count = count

    def again(self, pool_size: int) -> ApiClient:
        """Return a client of the same server with connections of its own."""
        return ApiClient(self.access, pool_size)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._pool.clear()

    def send(
        self,
        method: str,
        path: str,
        query: Query = (),
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = "application/json",
        accept: str = "application/json, */*",
        timeout_s: tuple[float, float] | None = None,
    ) -> Any:
        """Send a request.

        Args:
            method: HTTP method.
            path: Path of the URL, with a leading slash.
            query: its parameters.
            body: Body of the request, sent as JSON.
            content_type: Content type of the body.
            accept: media type of the answer.
            timeout_s: Seconds to connect, and seconds between two reads.

        Returns:
            The `urllib3.HTTPResponse`, of any status, with its body unread.

        Raises:
            HTTPError: of urllib3: there is no answer.
        """
        from urllib3 import Timeout

        if timeout_s is None:
            read_s = READ_TIMEOUT_S if self._has_answered else self._first_answer_s
            timeout_s = (min(CONNECT_TIMEOUT_S, read_s), read_s)
        headers = {"User-Agent": f"elasticdl/{VERSION}", "Accept": accept, **self.access.authorize()}
        if body is not None:
            headers["Content-Type"] = content_type
        status = "none"
        try:
            response = self._pool.request(
                method,
                self.access.server + path + (f"?{urlencode(query)}" if query else ""),
                body=None if body is None else json.dumps(body),
                headers=headers,
                preload_content=False,
                timeout=Timeout(connect=timeout_s[0], read=timeout_s[1]),
            )
            status = str(response.status)
        finally:
            self._count(method, status)
        self._has_answered = True
        return response


def checked(response: Any) -> Any:
    """Return an answer whose body was not read yet.

    Raises:
        ApiError: it is an error.
    """
    if 200 <= response.status < 300:
        return response
    body = ""
    with suppress(AttributeError, ValueError):
        body = response.data.decode(errors="replace")
    raise ApiError(response.status, str(response.reason or ""), body)


def object_path(resource: str, name: str = "", namespace: str = "", group: str = "") -> str:
    """Return the path of an object, or without a name of all objects of a resource.

    Args:
        resource: plural, such as ``pods``.
        name: Name of the object.
        namespace: Namespace of the object; empty: it has none, or all namespaces.
        group: API group and version, such as ``networking.k8s.io/v1``; empty: the core group.
    """
    steps = ["namespaces", namespace, resource, name] if namespace else [resource, name]
    root = f"/apis/{group}" if group else "/api/v1"
    return "/".join([root, *(quote(step, safe="") for step in steps if step)])


def kind_path(kind: str, name: str = "", namespace: str = "") -> str:
    """Return the path of an object, or of all, of a kind that jobs consist of: Pod, ConfigMap, NetworkPolicy …"""
    if kind == "NetworkPolicy":
        return object_path("networkpolicies", name, namespace, "networking.k8s.io/v1")
    return object_path(f"{kind.lower()}s", name, namespace)


def of_configuration(configuration: Any) -> Access:
    """Return the access that a `kubernetes.client.Configuration` describes."""
    from kubernetes.client import ApiClient as PackageClient

    def authorize() -> dict[str, str]:
        settings = configuration.auth_settings().values()
        return {one["key"]: one["value"] for one in settings if one["in"] == "header" and one["value"]}

    def pool(size: int) -> Any:
        sized = copy.deepcopy(configuration)
        sized.connection_pool_maxsize = size
        sized.retries = False  # a broken connection is reported at once; callers retry where they want to
        return PackageClient(sized).rest_client.pool_manager

    return Access(str(configuration.host), authorize, pool, lambda: copy.deepcopy(configuration))


def of_pod(account: Path = SERVICE_ACCOUNT) -> Access:
    """Return the access of the pod that this process runs in, by its service account.

    A proxy of the environment is for addresses outside the cluster, and is not used.

    Args:
        account: directory with the token and the certificate of the server's authority.

    Raises:
        OSError: the service account is not there.
        ValueError: it is not whole.
    """
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        raise ValueError("KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is not set.")
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    authority = account / "ca.crt"
    if not authority.read_text():
        raise ValueError(f"{authority} is empty.")

    def pool(size: int) -> Any:
        from urllib3 import PoolManager

        return PoolManager(ca_certs=str(authority), cert_reqs="CERT_REQUIRED", maxsize=size, retries=False)

    return Access(server, _Token(account / "token").headers, pool, _package_configuration)


class _Token:
    """The token of a pod, which the kubelet replaces.  Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._read()

    def headers(self) -> dict[str, str]:
        with self._lock:
            if time.monotonic() - self._read_at >= _TOKEN_S:
                self._read()
            return {"Authorization": f"Bearer {self._token}"}

    def _read(self) -> None:
        self._token = self._path.read_text().strip()
        if not self._token:
            raise ValueError(f"{self._path} is empty.")
        self._read_at = time.monotonic()


def _package_configuration() -> Any:
    from kubernetes.client import Configuration
    from kubernetes.config import load_incluster_config

    configuration = Configuration()
    load_incluster_config(client_configuration=configuration)
    return configuration
