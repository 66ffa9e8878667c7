"""More memory for a pod that runs: answers of servers with the subresource, without it or without room."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pod_specs import worker

from elasticdl.cluster.cluster import CannotResize, PodSpec
from elasticdl.cluster.kubernetes.adapter import KubernetesCluster
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.kubernetes.api import connect
from elasticdl_client.kubernetes.names import pod_labels
from tests.master.object_server import Object, ObjectServer

MEBIBYTE = 1 << 20


def manifest(spec: PodSpec) -> dict[str, Any]:
    """A pod of 100 MiB times its factor, at most 300 MiB, with another's container before its own."""
    memory = {"memory": f"{min(300, int(100 * spec.memory_factor))}Mi"}
    resources = {"requests": {"cpu": "1", **memory}, "limits": memory}
    return {
        "kind": "Pod",
        "metadata": {"name": spec.name, "labels": pod_labels("job", "worker", 0)},
        "spec": {"containers": [{"name": "mesh"}, {"name": spec.name, "resources": resources}]},
    }


class ResizingServer(ObjectServer):
    """Attributes:
    pending: its kubelet's answers to each resize, as conditions; the last one without an answer puts it in force.
    refusal: answers a resize instead: a status and the server's sentence.
    """

    def __init__(self) -> None:
        super().__init__([manifest(worker("w-0"))])
        self.pending: list[Object] = []
        self.refusal: tuple[int, str] | None = None
        self.asked: list[Object] = []
        self._put_in_force()

    def answer(self, verb: str, path: str, sent: Object) -> tuple[int, Object]:
        if path.endswith("/resize"):
            return self._resize(sent)
        if verb == "GET" and self.asked:
            if self.pending:
                self.pod["status"]["conditions"] = [self.pending.pop(0)]
            else:
                self._put_in_force()
        return super().answer(verb, path, sent)

    @property
    def pod(self) -> Object:
        return self.objects["pods", "w-0"]

    def _resize(self, sent: Object) -> tuple[int, Object]:
        if self.refusal is not None:
            return self.refusal[0], {"message": self.refusal[1]}
        self.asked.append(sent)
        (changed,) = sent["spec"]["containers"]
        (own,) = (one for one in self.pod["spec"]["containers"] if one["name"] == changed["name"])
        for kind, amounts in changed["resources"].items():
            own["resources"][kind] |= amounts
        return 200, self.pod

    def _put_in_force(self) -> None:
        resources = json.loads(json.dumps(self.pod["spec"]["containers"][1]["resources"]))
        self.pod["status"] = {"containerStatuses": [{"name": "w-0", "resources": resources}]}


def pending(reason: str, message: str = "Node didn't have enough capacity") -> Object:
    return {"type": "PodResizePending", "status": "True", "reason": reason, "message": message}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ResizingServer]:
    found = ResizingServer()
    monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig(tmp_path / "kubeconfig")))
    yield found
    found.close()


@pytest.fixture
def cluster(server: ResizingServer) -> Iterator[KubernetesCluster]:
    found = KubernetesCluster("team", "job", manifest, connect().client)
    yield found
    found.close()


def test_a_pod_gets_its_memory_and_nothing_else_changes(cluster: KubernetesCluster, server: ResizingServer) -> None:
    server.pending = [pending("Deferred"), {"type": "PodResizeInProgress", "status": "True"}]
    assert cluster.resize(worker("w-0", memory_factor=1.5)) == 150 * MEBIBYTE
    memory = {"memory": "150Mi"}
    changed = {"name": "w-0", "resources": {"requests": memory, "limits": memory}}
    assert server.asked == [{"spec": {"containers": [changed]}}]
    assert server.pod["status"]["containerStatuses"][0]["resources"]["limits"] == memory
    assert server.pending == []


def test_a_resize_that_is_in_force_already_is_not_asked_for_again(
    cluster: KubernetesCluster, server: ResizingServer
) -> None:
    cluster.resize(worker("w-0", memory_factor=1.5))
    cluster.resize(worker("w-0", memory_factor=1.5))
    assert len(server.asked) == 1


def test_a_resize_that_was_asked_for_and_is_not_in_force_is_waited_for(
    cluster: KubernetesCluster, server: ResizingServer
) -> None:
    server.pending = [pending("Infeasible")]
    with pytest.raises(ElasticDLError):
        cluster.resize(worker("w-0", memory_factor=1.5))
    server.pending = [pending("Deferred")] * 2
    cluster.resize(worker("w-0", memory_factor=1.5))
    assert server.pending == []


def test_a_pod_never_gets_more_than_a_new_one_would(cluster: KubernetesCluster, server: ResizingServer) -> None:
    assert cluster.resize(worker("w-0", memory_factor=4.0)) == 300 * MEBIBYTE
    assert server.pod["status"]["containerStatuses"][0]["resources"]["limits"] == {"memory": "300Mi"}


def test_a_node_without_room_is_said(cluster: KubernetesCluster, server: ResizingServer) -> None:
    server.pending = [pending("Infeasible")]
    with pytest.raises(ElasticDLError, match=r"^Infeasible: Node didn't have enough capacity\.") as refused:
        cluster.resize(worker("w-0", memory_factor=1.5))
    assert not isinstance(refused.value, CannotResize)


def test_a_resize_that_is_deferred_for_too_long_is_given_up(
    cluster: KubernetesCluster, server: ResizingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticdl.cluster.kubernetes.adapter._IN_FORCE_S", 0.0)
    server.pending = [pending("Deferred")] * 9
    with pytest.raises(ElasticDLError, match=r"^Deferred: Node didn't have enough capacity\."):
        cluster.resize(worker("w-0", memory_factor=1.5))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (404, "the server could not find the requested resource"),
        (405, "the server does not allow this method on the requested resource"),
        (403, 'pods "w-0" is forbidden: User "u" cannot patch resource "pods/resize" in API group "" in the namespace'),
    ],
)
def test_a_server_that_resizes_no_pods_is_asked_no_more(
    cluster: KubernetesCluster, server: ResizingServer, code: int, said: str
) -> None:
    server.refusal = code, said
    with pytest.raises(CannotResize):
        cluster.resize(worker("w-0", memory_factor=1.5))


def test_a_quota_refuses_this_resize_alone(cluster: KubernetesCluster, server: ResizingServer) -> None:
    server.refusal = 403, 'pods "w-0" is forbidden: exceeded quota: small'
    with pytest.raises(ElasticDLError, match="exceeded quota: small") as refused:
        cluster.resize(worker("w-0", memory_factor=1.5))
    assert not isinstance(refused.value, CannotResize)
