"""The kubernetes package's own client, with which tests look at a cluster beside ours."""

from __future__ import annotations

from kubernetes.client import ApiClient, CoreV1Api

from elasticdl_client.kubernetes.api import Connection


def core_api(connection: Connection) -> CoreV1Api:
    """Return the package's client of the core group for the same cluster."""
    return CoreV1Api(ApiClient(connection.client.access.configuration()))
