"""A namespace of a real Kubernetes for each test, and the adapter in it, unless a file has a cluster of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_agent import Observer
from real_cluster import JOB, Manifests, Namespace, Pods
from tcp_proxy import TcpProxy

from elasticdl.cluster.cluster import Cluster
from elasticdl.cluster.kubernetes.adapter import KubernetesCluster
from elasticdl_client.kubernetes.api_client import ApiClient, of_configuration


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    adapter = Pods(tmp_path)
    yield adapter
    adapter.clean_up()


@pytest.fixture
def namespace(pods: Pods) -> Namespace:
    return pods.namespace


@pytest.fixture
def manifests(pods: Pods) -> Manifests:
    return pods.manifests


@pytest.fixture
def cluster(pods: Pods) -> KubernetesCluster:
    return pods.cluster


@pytest.fixture
def observer(cluster: Cluster) -> Observer:
    return Observer(cluster)


@pytest.fixture
def proxy(namespace: Namespace) -> Iterator[TcpProxy]:
    host, _, port = namespace.connection.server.removeprefix("https://").rpartition(":")
    between = TcpProxy(host, int(port))
    yield between
    between.close()


@pytest.fixture
def distant(namespace: Namespace, manifests: Manifests, proxy: TcpProxy) -> Iterator[KubernetesCluster]:
    """The same pods, seen through the proxy."""
    configuration = namespace.connection.client.access.configuration()
    configuration.host = f"https://127.0.0.1:{proxy.port}"
    cluster = KubernetesCluster(namespace.name, JOB, manifests.of, ApiClient(of_configuration(configuration)))
    yield cluster
    cluster.close()
