"""The cluster under test: `kubectl` for what a user would do, the Python client for looking on."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import kubernetes
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
HOLLOW = "hollow-"  # how the names of hollow nodes begin
_CALL_TIMEOUT_S = (3.0, 20.0)


def kubectl(*arguments: str, stdin: str | None = None, timeout_s: float = 120.0) -> str:
    """Return the output of a kubectl command; AssertionError with its message if it fails."""
    done = subprocess.run(
        ["kubectl", *arguments], cwd=REPOSITORY, input=stdin, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr.strip()}"
    return done.stdout


def apply(*manifests: dict[str, Any]) -> None:
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(manifests))


@functools.cache
def core() -> kubernetes.client.CoreV1Api:
    """The core API of KUBECONFIG's cluster."""
    configuration = kubernetes.client.Configuration()
    kubernetes.config.load_kube_config(client_configuration=configuration)
    configuration.retries = False
    configuration.connection_pool_maxsize = 64  # many logs are followed at once
    return kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(configuration))


def list_pods(namespace: str, selector: str = "") -> list[dict[str, Any]]:
    """The namespace's pods as the API shows them now; raises what the client raises."""
    return list_pods_and_version(namespace, selector)[0]


def list_pods_and_version(namespace: str, selector: str = "") -> tuple[list[dict[str, Any]], str]:
    """The pods, and the version of the list, from which on they can be watched."""
    # Not as the client's objects: making these is most of what a look costs, and the tests look all the time.
    answer = core().list_namespaced_pod(
        namespace, label_selector=selector, _request_timeout=_CALL_TIMEOUT_S, _preload_content=False
    )
    listed = json.loads(answer.data)
    return listed["items"], listed["metadata"]["resourceVersion"]


def read_pod(namespace: str, name: str) -> dict[str, Any]:
    answer = core().read_namespaced_pod(name, namespace, _request_timeout=_CALL_TIMEOUT_S, _preload_content=False)
    return dict(json.loads(answer.data))


def read_config_map(namespace: str, name: str) -> dict[str, str]:
    found = core().read_namespaced_config_map(name, namespace, _request_timeout=_CALL_TIMEOUT_S)
    return dict(found.data or {})


def the_node() -> str:
    """The one real node; hollow nodes come and go beside it."""
    nodes = [node.metadata.name for node in core().list_node(_request_timeout=_CALL_TIMEOUT_S).items]
    real = [name for name in nodes if not name.startswith(HOLLOW)]
    assert len(real) == 1, f"these tests are for a cluster of one node, and this has {real}"
    return str(real[0])
