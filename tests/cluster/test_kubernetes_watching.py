"""What is seen of pods on Kubernetes while its API server is away, silent, or has forgotten."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from local_agent import Observer
from pod_specs import worker
from real_cluster import JOB, NOWHERE, Manifests, Namespace
from tcp_proxy import TcpProxy

from elasticdl.cluster.cluster import EndReason, EventType, PodEvent, PodPhase
from elasticdl.cluster.kubernetes import KubernetesCluster
from elasticdl.cluster.kubernetes_api import ApiServer
from elasticdl.cluster.kubernetes_causes import Causes
from elasticdl.cluster.kubernetes_memory import PodMemory
from elasticdl.cluster.kubernetes_watch import PodWatch
from elasticdl_client.kubernetes.names import JOB_LABEL

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("fault", ["cut", "stall", "refuse"])
def test_what_happens_while_a_watch_is_down_is_told_afterwards(
    distant: KubernetesCluster,
    cluster: KubernetesCluster,
    namespace: Namespace,
    manifests: Manifests,
    proxy: TcpProxy,
    fault: str,
) -> None:
    manifests.spec = NOWHERE
    observer = Observer(distant)
    for name in ("goes", "changes", "stays"):
        cluster.create(worker(name))
    observer.until(lambda _: len({event.pod.name for event in observer.seen}) == 3)
    getattr(proxy, fault)()
    cluster.delete("goes")
    namespace.core.patch_namespaced_pod("changes", namespace.name, {"metadata": {"labels": {"new": "label"}}})
    comes = cluster.create(worker("comes"))
    missed = threading.Event()
    missed.wait(2)  # the watch is down and tries
    proxy.repair()
    expected = {(EventType.DELETED, "goes"), (EventType.MODIFIED, "changes"), (EventType.ADDED, "comes")}
    observer.until(lambda _: expected <= {(event.type, event.pod.name) for event in observer.seen})
    final = observer.latest()
    assert final["goes"].pod.reason is EndReason.DELETED
    assert final["changes"].pod.labels["new"] == "label"
    assert final["comes"].pod.uid == comes.uid
    added = [event.pod.name for event in observer.seen if event.type is EventType.ADDED]
    assert sorted(added) == ["changes", "comes", "goes", "stays"]


def test_a_pod_that_ended_while_nobody_watched_has_its_reason(
    distant: KubernetesCluster, cluster: KubernetesCluster, observer: Observer, proxy: TcpProxy
) -> None:
    late = Observer(distant)
    cluster.create(worker("w-0", "exit 3"))
    cluster.create(worker("w-1"))
    late.until(lambda _: {event.pod.name for event in late.seen} == {"w-0", "w-1"})
    proxy.refuse()
    observer.until(lambda _: {"w-0"} <= {event.pod.name for event in observer.seen if event.pod.exit_code == 3})
    cluster.delete("w-1", grace_s=0)
    observer.deleted("w-1")
    proxy.repair()
    late.until(lambda _: {event.pod.phase for event in late.latest().values()} == {PodPhase.FAILED})
    final = late.latest()
    assert (final["w-0"].type, final["w-0"].pod.reason) == (EventType.MODIFIED, EndReason.ERROR)
    assert (final["w-1"].type, final["w-1"].pod.reason) == (EventType.DELETED, EndReason.DELETED)


def test_closing_ends_a_watch_of_a_server_that_is_silent(distant: KubernetesCluster, proxy: TcpProxy) -> None:
    observer = Observer(distant)
    distant.list()
    proxy.stall()
    distant.close()
    assert observer.ended.wait(30)  # it may wait for the head of an answer
    assert observer.error is None


class LongAgo(ApiServer):
    """An API server whose first list of pods is as old as the cluster; it is also what an `Observer` watches."""

    lists = 0

    def call(self, method: str, path: str, *arguments: Any, **named: Any) -> Any:
        answer = super().call(method, path, *arguments, **named)
        if path.endswith("/pods"):
            self.lists += 1
            if self.lists == 1:
                answer["metadata"]["resourceVersion"] = "1"
        return answer

    def watch(self) -> Iterator[PodEvent]:
        return PodWatch(self, f"{JOB_LABEL}={JOB}", PodMemory(Causes(self))).events()


def test_a_version_that_the_server_has_forgotten_leads_to_a_new_list(
    cluster: KubernetesCluster, namespace: Namespace, manifests: Manifests
) -> None:
    manifests.spec = NOWHERE
    cluster.create(worker("w-0"))
    server = LongAgo(namespace.connection.client, namespace.name)
    observer = Observer(server)  # type: ignore[arg-type]
    observer.until(lambda event: event.type is EventType.ADDED)
    cluster.create(worker("w-1"))
    observer.until(lambda event: event.pod.name == "w-1")
    assert [event.pod.name for event in observer.seen if event.type is EventType.ADDED] == ["w-0", "w-1"]
    assert server.lists == 2
    server.close()
