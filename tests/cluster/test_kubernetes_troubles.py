"""Pods that a real scheduler, kubelet and registry do not let start, and the trouble that each is explained as."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from explained_pods import diagnoses_of
from hollow_node import HollowNode
from local_agent import Observer
from pod_specs import worker
from real_cluster import Manifests

from elasticdl.cluster.kubernetes.adapter import KubernetesCluster
from elasticdl_client.explain.diagnosis import Diagnosis, Trouble

pytestmark = pytest.mark.cluster


def the_first(observer: Observer, name: str) -> Diagnosis:
    """The first trouble that a pod has."""
    observer.until(lambda _: bool(diagnoses_of(observer.seen, name)))
    return diagnoses_of(observer.seen, name)[0]


def asks_for(**resources: str) -> dict[str, Any]:
    named = {name.replace("__", "/").replace("_", "."): value for name, value in resources.items()}
    return {"resources": {"requests": named, "limits": named}}


@pytest.mark.parametrize(
    ("container", "trouble", "resource"),
    [
        (asks_for(cpu="1000", memory="16Mi"), Trouble.NO_CPU, "cpu"),
        (asks_for(cpu="10m", memory="100Ti"), Trouble.NO_MEMORY, "memory"),
        (asks_for(nvidia_com__gpu="1"), Trouble.NO_GPU, "nvidia.com/gpu"),
        (asks_for(example_com__abacus="1"), Trouble.NO_RESOURCE, "example.com/abacus"),
    ],
)
def test_a_pod_that_asks_for_what_no_node_has_names_the_resource(
    cluster: KubernetesCluster,
    observer: Observer,
    manifests: Manifests,
    container: dict[str, Any],
    trouble: Trouble,
    resource: str,
) -> None:
    manifests.container = container
    cluster.create(worker("w-0"))
    diagnosis = the_first(observer, "w-0")
    assert (diagnosis.trouble, diagnosis.evidence["resource"]) == (trouble, resource)
    assert int(diagnosis.evidence["nodes"]) >= 1
    assert diagnosis.cost.is_open


def test_a_claim_that_is_missing_is_named(cluster: KubernetesCluster, observer: Observer, manifests: Manifests) -> None:
    manifests.spec = {"volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "no-such-claim"}}]}
    cluster.create(worker("w-0"))
    diagnosis = the_first(observer, "w-0")
    assert (diagnosis.trouble, diagnosis.evidence["claim"]) == (Trouble.CLAIM_NOT_BOUND, "no-such-claim")


def test_a_taint_that_keeps_a_pod_away_is_named(
    cluster: KubernetesCluster, observer: Observer, manifests: Manifests
) -> None:
    with HollowNode() as node:
        manifests.spec = {"nodeSelector": node.placement["nodeSelector"]}  # without its toleration
        cluster.create(worker("w-0"))
        diagnosis = the_first(observer, "w-0")
        assert diagnosis.trouble is Trouble.TAINT_NOT_TOLERATED
        assert diagnosis.evidence["taint"] == node.placement["tolerations"][0]["key"]


@pytest.mark.parametrize(
    "container",
    [
        {"image": "devcluster/pause:1", "command": ["python", "-m", "elasticdl.worker"]},
        {"command": ["python", "-m", "elasticdl.worker"]},
    ],
    ids=["without Python", "without ElasticDL"],
)
def test_an_image_without_the_runtime_is_distinguished_from_a_program_that_fails(
    cluster: KubernetesCluster, observer: Observer, manifests: Manifests, container: dict[str, Any]
) -> None:
    manifests.container = container
    cluster.create(worker("w-0"))
    assert the_first(observer, "w-0").trouble is Trouble.IMAGE_WITHOUT_RUNTIME


@pytest.fixture
def registry() -> Iterator[str]:
    """The address of a registry that wants credentials."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="private"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_registry_that_wants_credentials_is_distinguished_from_an_image_that_is_missing(
    cluster: KubernetesCluster, observer: Observer, manifests: Manifests, registry: str
) -> None:
    manifests.container = {"image": f"{registry}/team/private:1", "imagePullPolicy": "Always"}
    cluster.create(worker("w-0"))
    assert the_first(observer, "w-0").trouble is Trouble.PULL_NOT_ALLOWED
