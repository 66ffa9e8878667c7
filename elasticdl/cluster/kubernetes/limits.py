"""How much memory a pod can be given at most: the namespace's limits and the largest node, as far as they are shown."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from kubernetes.utils.quantity import parse_quantity

from elasticdl.cluster.kubernetes.api import ApiServer, Refusal
from elasticdl.cluster.kubernetes.pods import Object
from elasticdl_client.errors import ElasticDLError

_LOG = logging.getLogger(__name__)
_PATIENCE_S = 3.0


def max_memory(api: ApiServer) -> int | None:
    """Bytes; None if nothing is known to limit it."""
    bounds = list(_limits_of_namespace(api))
    nodes = [_bytes(node["status"].get("allocatable", {})) for node in _list(api, "/api/v1/nodes")]
    bounds += [max(found)] if (found := [size for size in nodes if size is not None]) else []
    return min(bounds, default=None)


def _limits_of_namespace(api: ApiServer) -> Iterator[int]:
    for limit_range in _list(api, api.namespaced("limitranges")):
        for limit in limit_range["spec"].get("limits", []):
            size = _bytes(limit.get("max", {}))
            if limit.get("type") in ("Container", "Pod") and size is not None:
                yield size


def _bytes(resources: Object) -> int | None:
    return int(parse_quantity(resources["memory"])) if "memory" in resources else None


def _list(api: ApiServer, path: str) -> list[Object]:
    try:
        items: list[Object] = api.call("GET", path, patience_s=_PATIENCE_S)["items"]
    except ElasticDLError as error:
        if not isinstance(error, Refusal) or error.status != 403:
            _LOG.warning("The limits of memory are not known: %s", error.what)
        return []
    return items
