"""Pods that are created and deleted by Kubernetes' API server: limits, rights, lost answers."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from explained_pods import refusal_of
from kubernetes.utils.quantity import parse_quantity
from local_agent import Observer
from pod_specs import worker
from real_cluster import JOB, NOWHERE, Manifests, Namespace
from tcp_proxy import TcpProxy

from elasticdl.cluster.cluster import EventType, QuotaExceeded
from elasticdl.cluster.kubernetes.adapter import KubernetesCluster
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.explain.diagnosis import Trouble
from elasticdl_client.kubernetes.api_client import ApiClient, of_configuration

pytestmark = pytest.mark.cluster


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs something in a thread; its result, or its error, is in the list when the thread has ended."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except ElasticDLError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def test_a_hundred_pods_are_accepted_in_parallel_within_ten_seconds(
    cluster: KubernetesCluster, observer: Observer, manifests: Manifests
) -> None:
    manifests.spec = NOWHERE
    specs = [worker(f"w-{index}", index=index) for index in range(100)]
    begin = time.monotonic()
    with ThreadPoolExecutor(16) as threads:
        created = list(threads.map(cluster.create, specs))
    assert time.monotonic() - begin < 10
    expected = {pod.uid for pod in created}
    observer.until(lambda _: expected <= {event.pod.uid for event in observer.seen})
    assert {pod.uid for pod in cluster.list()} == expected


def test_a_quota_is_reported_in_the_servers_words_and_can_be_raised(
    cluster: KubernetesCluster, namespace: Namespace, manifests: Manifests
) -> None:
    manifests.spec = NOWHERE
    namespace.core.create_namespaced_resource_quota(
        namespace.name, {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    )
    quotas = {"namespace": namespace.name}
    listing = namespace.core.list_namespaced_resource_quota
    namespace.await_object(
        lambda **more: listing(**quotas, **more), lambda quota: quota["status"].get("used", {}).get("pods") == "0"
    )
    cluster.create(worker("w-0"))
    with pytest.raises(QuotaExceeded) as refused:
        cluster.create(worker("w-1"))
    assert refused.value.what.startswith("exceeded quota: few, requested: pods=1")
    diagnosis = refusal_of(refused.value.what)
    assert diagnosis.trouble is Trouble.QUOTA_EXCEEDED
    assert (diagnosis.evidence["requested"], diagnosis.evidence["limited"]) == ("pods=1", "pods=1")
    namespace.core.patch_namespaced_resource_quota("few", namespace.name, {"spec": {"hard": {"pods": "2"}}})
    namespace.await_object(
        lambda **more: listing(**quotas, **more), lambda quota: quota["status"].get("hard", {}).get("pods") == "2"
    )
    assert cluster.create(worker("w-1")).name == "w-1"


def test_a_missing_right_is_named(namespace: Namespace, manifests: Manifests) -> None:
    token = namespace.core.create_namespaced_service_account_token("default", namespace.name, {"spec": {}})
    configuration = namespace.connection.client.access.configuration()
    configuration.cert_file = configuration.key_file = None
    configuration.api_key = {"BearerToken": f"Bearer {token.status.token}"}
    cluster = KubernetesCluster(namespace.name, JOB, manifests.of, ApiClient(of_configuration(configuration)))
    with pytest.raises(ElasticDLError, match=f"{namespace.name}:default has no right to create pods") as refused:
        cluster.create(worker("w-0"))
    assert refusal_of(refused.value.what).trouble is Trouble.RIGHT_MISSING
    assert cluster.max_memory() is None
    cluster.close()


def test_what_the_server_finds_wrong_with_a_pod_is_reported(cluster: KubernetesCluster, manifests: Manifests) -> None:
    manifests.spec = {"priorityClassName": "no-such-priority"}
    with pytest.raises(ElasticDLError, match="no-such-priority") as refused:
        cluster.create(worker("w-0"))
    assert refusal_of(refused.value.what).trouble is Trouble.POD_REFUSED


def test_a_creation_whose_answer_is_lost_is_no_error(
    distant: KubernetesCluster, cluster: KubernetesCluster, observer: Observer, manifests: Manifests, proxy: TcpProxy
) -> None:
    manifests.spec = NOWHERE
    distant.list()
    proxy.mute()
    creating, results = in_background(lambda: distant.create(worker("w-0")))
    made = observer.until(lambda event: event.type is EventType.ADDED).pod
    proxy.cut()
    proxy.repair()
    creating.join()
    assert [pod.uid for pod in results] == [made.uid]
    assert [pod.uid for pod in cluster.list()] == [made.uid]


def test_a_creation_waits_for_a_server_that_is_away_for_a_moment(
    distant: KubernetesCluster, manifests: Manifests, proxy: TcpProxy
) -> None:
    manifests.spec = NOWHERE
    proxy.refuse()
    creating, results = in_background(lambda: distant.create(worker("w-0")))
    creating.join(2)
    assert creating.is_alive()
    proxy.repair()
    creating.join()
    assert [pod.name for pod in results] == ["w-0"]


def test_a_server_that_stays_away_is_an_error_that_names_it(distant: KubernetesCluster, proxy: TcpProxy) -> None:
    proxy.refuse()
    begin = time.monotonic()
    with pytest.raises(ElasticDLError, match=f"127.0.0.1:{proxy.port}.*refused") as away:
        distant.create(worker("w-0"))
    assert time.monotonic() - begin < 13
    assert refusal_of(away.value.what).trouble is Trouble.API_SERVER_AWAY


def test_a_deletion_hits_the_pod_that_was_known_and_no_later_one(
    cluster: KubernetesCluster, namespace: Namespace, manifests: Manifests
) -> None:
    manifests.spec = NOWHERE
    cluster.create(worker("w-0"))
    other = KubernetesCluster(namespace.name, JOB, manifests.of)
    other.delete("w-0")
    later = other.create(worker("w-0"))
    cluster.delete("w-0")
    assert [pod.uid for pod in other.list()] == [later.uid]
    other.close()


def test_the_memory_that_a_pod_can_have_is_the_largest_nodes(cluster: KubernetesCluster, namespace: Namespace) -> None:
    nodes = namespace.core.list_node().items  # one that has just come says nothing yet
    most = cluster.max_memory()
    assert most is not None
    assert 2**30 < most <= max(parse_quantity((node.status.capacity or {"memory": "0"})["memory"]) for node in nodes)


def test_the_memory_that_a_pod_can_have_is_bounded_by_its_namespace(
    cluster: KubernetesCluster, namespace: Namespace
) -> None:
    limit = {"type": "Container", "max": {"memory": "1Gi"}}
    namespace.core.create_namespaced_limit_range(
        namespace.name, {"metadata": {"name": f"limit-{uuid.uuid4().hex[:4]}"}, "spec": {"limits": [limit]}}
    )
    assert cluster.max_memory() == 2**30
