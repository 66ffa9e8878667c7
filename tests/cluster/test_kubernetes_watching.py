"""Observation of pods on Kubernetes while its API server is away, silent, or has forgotten."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from local_agent import Observer
from pod_specs import worker
from real_cluster import JOB, NOWHERE, Manifests, Namespace
from tcp_proxy import TcpProxy

from elasticdl.cluster.cluster import EndReason, EventType, PodEvent, PodPhase
from elasticdl.cluster.kubernetes.adapter import KubernetesCluster
from elasticdl.cluster.kubernetes.api import ApiServer, Refusal
from elasticdl.cluster.kubernetes.causes import Causes
from elasticdl.cluster.kubernetes.watch import PodCache, PodWatch
from elasticdl_client.kubernetes.names import JOB_LABEL

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("fault", ["cut", "stall", "refuse"])
def test_what_happens_while_a_watch_is_down_is_reported_afterwards(
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


def test_a_pod_that_ended_unwatched_has_its_reason(
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


class Forgetful(ApiServer):
    """An API server that has forgotten its first list of pods when that is to be watched, and says so in one of the two
    ways of servers: which version one really has forgotten hangs on what went on before.  An `Observer` watches it."""

    lists = 0
    refuses = False

    def call(self, method: str, path: str, *arguments: Any, **named: Any) -> Any:
        self.lists += path.endswith("/pods")
        return super().call(method, path, *arguments, **named)

    @contextlib.contextmanager
    def stream(self, *arguments: Any, **named: Any) -> Iterator[Iterator[dict[str, Any]]]:
        if self.lists > 1:
            with super().stream(*arguments, **named) as lines:
                yield lines
            return
        said = {"code": 410, "reason": "Expired", "message": "too old resource version: 1 (2)"}
        if self.refuses:
            raise Refusal("too old resource version: 1 (2)", "", 410, said, 0.0)
        yield iter([{"type": "ERROR", "object": said}])

    def watch(self) -> Iterator[PodEvent]:
        return PodWatch(self, f"{JOB_LABEL}={JOB}", PodCache(Causes(self))).events()


@pytest.mark.parametrize("refuses", [False, True])
def test_a_version_that_the_server_has_forgotten_leads_to_a_new_list(
    cluster: KubernetesCluster, namespace: Namespace, manifests: Manifests, refuses: bool
) -> None:
    manifests.spec = NOWHERE
    cluster.create(worker("w-0"))
    server = Forgetful(namespace.connection.client, namespace.name)
    server.refuses = refuses
    observer = Observer(server)  # type: ignore[arg-type]
    observer.until(lambda event: event.type is EventType.ADDED)
    cluster.create(worker("w-1"))
    observer.until(lambda event: event.pod.name == "w-1")
    assert [event.pod.name for event in observer.seen if event.type is EventType.ADDED] == ["w-0", "w-1"]
    assert server.lists == 2
    server.close()
