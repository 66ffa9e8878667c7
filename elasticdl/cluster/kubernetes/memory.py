"""How much memory a pod can be given at most, and more of it while it runs.

A resize needs a server with the subresource `pods/resize` (Kubernetes 1.33 and later).  The memory in force is the one
that the kubelet reports in the container's status, never the one asked for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from kubernetes.utils.quantity import parse_quantity

from elasticdl.cluster.cluster import CannotResize
from elasticdl.cluster.kubernetes.api import ApiServer, Refusal
from elasticdl.cluster.kubernetes.pods import Object, container_of
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.kubernetes.resources import quantity

_LOG = logging.getLogger(__name__)
_PATIENCE_S = 3.0


def max_memory(api: ApiServer) -> int | None:
    """Return the bytes that the namespace's limits and the largest node allow; None if no limit is known."""
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


_IN_FORCE_S = 60.0  # a kubelet looks again at a resize that it has deferred when another pod ends
_LOOK_S = 1.0
_NO_SUBRESOURCE = (404, 405)


def resize_memory(api: ApiServer, pod: str, wanted: Object) -> int:
    """Ask for the memory of another object of the same pod; return the bytes that are in force then.

    Args:
        api: of the pod's namespace.
        pod: its name.
        wanted: the pod as it would be made with that memory.

    Raises:
        CannotResize: the server cannot resize pods, or we have no right to it.
        ElasticDLError: it does not resize this one, or not in time.
    """
    path = api.namespaced(f"pods/{pod}")
    shown = api.call("GET", path)
    name, own = container_of(shown), container_of(wanted)
    container = next(one for one in wanted["spec"]["containers"] if one["name"] == own)
    limit = _limit(container)
    if not limit:
        raise ElasticDLError("It has no memory limit.")
    if _in_force(shown, name) < limit:  # else it has the most that a pod can be given, or an earlier try succeeded
        _ask(api, path, name, container["resources"])
        _await(api, path, shown["metadata"]["uid"], name, limit)
    return limit


def _ask(api: ApiServer, path: str, name: str, resources: Object) -> None:
    memory = {kind: {"memory": amounts["memory"]} for kind, amounts in resources.items() if "memory" in amounts}
    body = {"spec": {"containers": [{"name": name, "resources": memory}]}}
    try:
        api.call("PATCH", f"{path}/resize", body=body)
    except Refusal as refusal:
        if refusal.status in _NO_SUBRESOURCE:
            raise CannotResize("The API server does not resize pods in place.") from refusal
        if refusal.status == 403 and " cannot patch resource " in refusal.message:
            raise CannotResize(refusal.what, refusal.hint) from refusal
        raise


def _await(api: ApiServer, path: str, uid: str, name: str, limit: int) -> None:
    deadline = time.monotonic() + _IN_FORCE_S
    while True:
        shown = api.call("GET", path)
        if shown["metadata"]["uid"] != uid:
            raise ElasticDLError("It has ended meanwhile.")
        if _in_force(shown, name) >= limit:
            return
        reason, message = _why_pending(shown)
        if reason == "Infeasible" or time.monotonic() >= deadline:
            raise ElasticDLError(f"{reason or 'Deferred'}: {message or f'not in force after {_IN_FORCE_S:.0f} s'}.")
        api.pause(_LOOK_S)


def _why_pending(shown: Object) -> tuple[str, str]:
    """Deferred or Infeasible, and the kubelet's sentence; empty once it has begun."""
    for condition in shown["status"].get("conditions") or []:
        if condition["type"] == "PodResizePending" and condition["status"] == "True":
            return condition.get("reason") or "", condition.get("message") or ""
    return "", ""


def _in_force(shown: Object, name: str) -> int:
    statuses = shown["status"].get("containerStatuses") or []
    return next((_limit(status) for status in statuses if status["name"] == name), 0)


def _limit(container: Object) -> int:
    """Bytes; 0 without, as in the status that older servers show."""
    limits = (container.get("resources") or {}).get("limits") or {}
    return int(quantity(limits["memory"])) if "memory" in limits else 0
