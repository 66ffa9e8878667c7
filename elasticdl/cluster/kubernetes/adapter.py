"""The adapter of the port `Cluster` for Kubernetes: pods are the pods of a namespace.

It creates, deletes and reads pods, and decides nothing about them.  `pods` and `causes` tell why a pod has ended,
`watch` has the watch, `api` the calls and their retries.

This module also knows the most memory that a pod can have, and gives running pods more.  A resize needs a server with
the subresource `pods/resize` (Kubernetes 1.33 and later).  The memory in force is the one that the kubelet reports in
the container's status, never the requested one.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from elasticdl.cluster.cluster import CannotResize, Pod, PodEvent, PodSpec, QuotaExceeded, check_spec
from elasticdl.cluster.kubernetes.api import PATIENCE_S, ApiCalls, ApiServer, Query, Refusal
from elasticdl.cluster.kubernetes.causes import Causes
from elasticdl.cluster.kubernetes.pods import Object, container_of, has_ended
from elasticdl.cluster.kubernetes.watch import PodCache, PodWatch
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.kubernetes.api_client import ApiClient
from elasticdl_client.kubernetes.names import JOB_LABEL
from elasticdl_client.kubernetes.resources import quantity

_LOG = logging.getLogger(__name__)
_CREATION = "elasticdl-creation"  # annotation: identifies a pod whose creation was not confirmed
_LOG_PATIENCE_S = 3.0
_GONE_POLL_S = 0.2


class KubernetesCluster:
    """The pods of one job.  Thread-safe; creations may run in parallel.

    Args:
        namespace: Namespace of the job.
        job_name: Value of the label that its pods have.
        manifest: Returns the manifest of a pod, with labels for job, role and index.
        api_client: How the server is reached; by default that of the current context, or of the pod inside one.
        calls: Counts the calls to the API.

    Raises:
        ElasticDLError: there is no usable configuration.
    """

    def __init__(
        self,
        namespace: str,
        job_name: str,
        manifest: Callable[[PodSpec], dict[str, Any]],
        api_client: ApiClient | None = None,
        calls: ApiCalls | None = None,
    ) -> None:
        if api_client is None:
            from elasticdl_client.kubernetes.api import connect

            api_client = connect().client
        self._manifest = manifest
        self._selector = f"{JOB_LABEL}={job_name}"
        self._api = ApiServer(api_client, namespace, calls)
        self._memory = PodCache(Causes(self._api))

    def create(self, spec: PodSpec) -> Pod:
        """See the port; an ended pod with that name is deleted first.

        Raises:
            QuotaExceeded: rejected for now.
            ElasticDLError: rejected, with the server's own text in `what` (a missing right, a webhook), or not answered
                in time.
        """
        check_spec(spec)
        body = self._manifest(spec)
        creation = uuid.uuid4().hex
        metadata = body["metadata"]
        metadata = metadata | {"annotations": {**(metadata.get("annotations") or {}), _CREATION: creation}}
        body = {"apiVersion": "v1", "kind": "Pod", **body, "metadata": metadata}
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._read(self._api.call("POST", self._api.namespaced("pods"), body=body))
            except Refusal as refusal:
                if refusal.exceeds_quota:
                    raise QuotaExceeded(refusal.what, refusal.hint) from refusal
                if refusal.reason != "AlreadyExists":
                    raise
            earlier = self._find(spec.name)
            if earlier is not None and (earlier["metadata"].get("annotations") or {}).get(_CREATION) == creation:
                return self._read(earlier)  # the answer to an earlier attempt was lost
            if earlier is not None:
                self._make_way(earlier, deadline)
            elif time.monotonic() >= deadline:
                raise _exists_already(spec.name)

    def delete(self, name: str, grace_s: float | None = None) -> None:
        """See the port.  Deletes the newest known pod with that name; a newer one is left alone."""
        self._delete(name, self._memory.uid_of(name), None if grace_s is None else math.ceil(grace_s))

    def resize(self, spec: PodSpec) -> int:
        """See the port; the manifest limits the memory."""
        return resize_memory(self._api, spec.name, self._manifest(spec))

    def list(self) -> list[Pod]:
        """See the port; sorted by name."""
        found = self._api.call("GET", self._api.namespaced("pods"), {"labelSelector": self._selector})["items"]
        return [pod for pod in map(self._memory.read, found) if pod is not None]

    def watch(self) -> Iterator[PodEvent]:
        """See the port; while the cluster does not answer, there are no events."""
        return PodWatch(self._api, self._selector, self._memory).events()

    def logs(self, name: str) -> str:
        """Return the output of the current run of a pod.

        Raises:
            ElasticDLError: there is no such pod, or its node does not answer.
        """
        pod = self._find(name)
        if pod is None:
            raise ElasticDLError(f"There is no pod {name}.", "List the pods to see which there are.")
        query: Query = {"container": container_of(pod)}
        try:
            return self._api.text(self._api.namespaced(f"pods/{name}/log"), query, _LOG_PATIENCE_S)
        except Refusal as refusal:
            if refusal.status == 400:  # the container has not started
                return ""
            raise

    def max_memory(self) -> int | None:
        """Return the most memory that a pod can have here, in bytes; None if it is not known."""
        return max_memory(self._api)

    def close(self) -> None:
        """Close all watches and the connection; the pods keep running."""
        self._api.close()

    def _read(self, pod_object: Object) -> Pod:
        pod = self._memory.read(pod_object)
        assert pod is not None, "the manifest lacks the labels of a job's pod"
        return pod

    def _find(self, name: str) -> Object | None:
        try:
            return self._api.call("GET", self._api.namespaced(f"pods/{name}"))
        except Refusal as refusal:
            if refusal.status == 404:
                return None
            raise

    def _make_way(self, earlier: Object, deadline: float) -> None:
        """Delete an ended pod.

        Raises:
            ElasticDLError: the pod is alive, or is not gone in time.
        """
        name, uid = earlier["metadata"]["name"], earlier["metadata"]["uid"]
        pod = self._memory.read(earlier)
        if pod is None or not has_ended(pod) or time.monotonic() >= deadline:
            raise _exists_already(name)
        self._delete(name, uid, 0)
        while (found := self._find(name)) is not None and found["metadata"]["uid"] == uid:
            if time.monotonic() >= deadline:
                raise _exists_already(name)
            self._api.pause(_GONE_POLL_S)

    def uid_of(self, name: str) -> str:
        """Return the uid of the newest known pod with a name; empty if there is none."""
        return self._memory.uid_of(name)

    def _delete(self, name: str, uid: str, grace_s: int | None) -> None:
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            self._api.call("DELETE", self._api.namespaced(f"pods/{name}"), body=options)
        except Refusal as refusal:
            if refusal.status == 409:
                _LOG.info("Pod %s is another one by now and is left alone.", name)
            elif refusal.status != 404:
                raise


def _exists_already(name: str) -> ElasticDLError:
    return ElasticDLError(f"Pod {name} exists already.", "Delete it first, or wait for its end.")


_PATIENCE_S = 3.0


def max_memory(api: ApiServer) -> int | None:
    """Return the most bytes that the namespace's limits and the largest node allow; None if no limit is known."""
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
    return int(quantity(resources["memory"])) if "memory" in resources else None


def _list(api: ApiServer, path: str) -> list[Object]:
    try:
        items: list[Object] = api.call("GET", path, patience_s=_PATIENCE_S)["items"]
    except ElasticDLError as error:
        if not isinstance(error, Refusal) or error.status != 403:
            _LOG.warning("The limits of memory are not known: %s", error.what)
        return []
    return items


_IN_FORCE_S = 60.0  # a kubelet retries a deferred resize when another pod ends
_LOOK_S = 1.0
_NO_SUBRESOURCE = (404, 405)


def resize_memory(api: ApiServer, pod: str, wanted: Object) -> int:
    """Request the memory of another manifest for a running pod; return the bytes that are in force afterwards.

    Args:
        api: The API server, with the pod's namespace.
        pod: Name of the pod.
        wanted: Manifest of the pod with that memory.

    Raises:
        CannotResize: the server cannot resize pods, or the credentials lack the right.
        ElasticDLError: the server does not resize this pod, or not in time.
    """
    path = api.namespaced(f"pods/{pod}")
    pod_object = api.call("GET", path)
    name, own = container_of(pod_object), container_of(wanted)
    container = next(one for one in wanted["spec"]["containers"] if one["name"] == own)
    limit = _limit(container)
    if not limit:
        raise ElasticDLError("It has no memory limit.")
    if _in_force(pod_object, name) < limit:  # otherwise it has the maximum, or an earlier attempt succeeded
        _ask(api, path, name, container["resources"])
        _await(api, path, pod_object["metadata"]["uid"], name, limit)
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
        pod_object = api.call("GET", path)
        if pod_object["metadata"]["uid"] != uid:
            raise ElasticDLError("It has ended meanwhile.")
        if _in_force(pod_object, name) >= limit:
            return
        reason, message = _why_pending(pod_object)
        if reason == "Infeasible" or time.monotonic() >= deadline:
            raise ElasticDLError(f"{reason or 'Deferred'}: {message or f'not in force after {_IN_FORCE_S:.0f} s'}.")
        api.pause(_LOOK_S)


def _why_pending(pod_object: Object) -> tuple[str, str]:
    """Return Deferred or Infeasible, and the kubelet's message; empty once the resize has begun."""
    for condition in pod_object["status"].get("conditions") or []:
        if condition["type"] == "PodResizePending" and condition["status"] == "True":
            return condition.get("reason") or "", condition.get("message") or ""
    return "", ""


def _in_force(pod_object: Object, name: str) -> int:
    statuses = pod_object["status"].get("containerStatuses") or []
    return next((_limit(status) for status in statuses if status["name"] == name), 0)


def _limit(container: Object) -> int:
    """Return the memory limit of a container in bytes; 0 without one, as in the status of older servers."""
    limits = (container.get("resources") or {}).get("limits") or {}
    return int(quantity(limits["memory"])) if "memory" in limits else 0
