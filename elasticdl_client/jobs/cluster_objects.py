"""The objects of jobs in a cluster as the API's own JSON: listed by label, deleted, and nothing decided.

Plain dictionaries with the API's names, so objects of any server version are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError, Connection, checked

Object = Mapping[str, Any]
KINDS = ("pod", "config_map", "secret", "service", "network_policy")
_PLURALS = {"network_policy": "network policies"}


def list_objects(
    connection: Connection, kind: str, namespace: str, job: str = "", *, without: str = ""
) -> list[Object]:
    """The objects of jobs, or of one job.

    Args:
        connection: to the cluster.
        kind: one of `KINDS`.
        namespace: empty: all of them.
        job: empty: of every job.
        without: a label; those that have it are left out.

    Raises:
        ClusterError: the cluster does not answer, or refuses.
    """
    selector = f"{names.APP_LABEL}={names.APP},{names.JOB_LABEL}" + (f"={job}" if job else "")
    selector += f",!{without}" if without else ""
    api = _api(connection, kind)
    where = f"in namespace {namespace}" if namespace else "of all namespaces"
    with connection.doing(f"list the {words(kind)} {where}"):
        if namespace:
            list_them = getattr(api, f"list_namespaced_{kind}")
            response = list_them(namespace, label_selector=selector, _preload_content=False)
        else:
            list_them = getattr(api, f"list_{kind}_for_all_namespaces")
            response = list_them(label_selector=selector, _preload_content=False)
        found = checked(response).data
        return list(json.loads(found)["items"])


def delete_object(connection: Connection, kind: str, namespace: str, name: str, **options: Any) -> None:
    """Deletes an object; one that is gone already is no error.

    Raises:
        ClusterError: the cluster does not answer, or refuses.
    """
    try:
        with connection.doing(f"delete the {words(kind).removesuffix('s')} {name} in namespace {namespace}"):
            delete = getattr(_api(connection, kind), f"delete_namespaced_{kind}")
            checked(delete(name, namespace, _preload_content=False, **options))
    except ClusterError as error:
        if error.status != 404:
            raise


def read_pod(connection: Connection, namespace: str, name: str) -> Object | None:
    """A pod; None if there is none.

    Raises:
        ClusterError: the cluster does not answer, or refuses.
    """
    try:
        with connection.doing(f"read the pod {name} in namespace {namespace}"):
            pod: Object = json.loads(
                checked(connection.core.read_namespaced_pod(name, namespace, _preload_content=False)).data
            )
    except ClusterError as error:
        if error.status != 404:
            raise
        return None
    return pod


def words(kind: str) -> str:
    """A kind for people, in the plural."""
    return _PLURALS.get(kind, kind.replace("_", " ") + "s")


def _api(connection: Connection, kind: str) -> Any:
    if kind != "network_policy":
        return connection.core
    from kubernetes.client import NetworkingV1Api

    return NetworkingV1Api(connection.client)
