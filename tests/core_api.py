"""The kubernetes package's own client, with which tests look at a cluster beside ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticdl_client.kubernetes.api import Connection

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api


def core_api(connection: Connection) -> CoreV1Api:
    """Return the package's client of the core group for the same cluster."""
    from kubernetes.client import ApiClient, CoreV1Api  # hundreds of models, which processes without a cluster spare

    return CoreV1Api(ApiClient(connection.client.access.configuration()))
