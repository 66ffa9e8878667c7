"""Makes the job's ConfigMap the owner of its other objects, so that deleting it deletes all.

The client does so when it submits a job; objects that came by `kubectl apply` have no owner yet.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError, Connection

_STRATEGIC = "application/strategic-merge-patch+json"  # owner references are merged by their uid
_PATHS = {
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "Secret": "/api/v1/namespaces/{namespace}/secrets",
    "Service": "/api/v1/namespaces/{namespace}/services",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
    "Pod": "/api/v1/namespaces/{namespace}/pods",
}

logger = logging.getLogger("elasticdl.master")


def set_owners(connection: Connection, spec: JobSpec, namespace: str, owner_uid: str) -> None:
    """Adds the owner to everything of the job, the master's pod last: what has been done is then known from that.

    Raises:
        ClusterError: the API does not answer, or refuses; an object that is missing is a warning.
    """
    job = names.job_object(spec.job_name)
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": job, "uid": owner_uid}
    for kind, name in _objects(spec):
        try:
            with connection.doing(f"make the job the owner of {kind} {name}"):
                path = f"{_PATHS[kind].format(namespace=namespace)}/{name}"
                connection.patch(path, {"metadata": {"ownerReferences": [owner]}}, _STRATEGIC)
        except ClusterError as error:
            if error.status != 404:
                raise
            logger.warning("%s %s of the job does not exist", kind, name)
    logger.info("ConfigMap %s owns all objects of the job now", job)


def _objects(spec: JobSpec) -> Iterator[tuple[str, str]]:
    job = spec.job_name
    yield "ConfigMap", names.state_object(job)
    yield "Secret", names.token_object(job)
    yield "Service", names.master_service(job)
    if spec.need_tf_config:
        for role, size in (("ps", spec.num_ps_pods), ("worker", spec.num_workers)):
            for number in range(size):
                yield "Service", names.pod_name(job, role, number)
    yield "NetworkPolicy", names.job_object(job)
    yield "Pod", names.pod_name(job, "master", 0)
