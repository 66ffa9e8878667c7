"""Makes the job's ConfigMap the owner of its other objects, so that deleting it deletes all.

The client does so when it submits a job; objects that came by `kubectl apply` have no owner yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError, Connection

_STRATEGIC = "application/strategic-merge-patch+json"  # owner references are merged by their uid

logger = logging.getLogger("elasticdl.master")


def set_owners(connection: Connection, spec: JobSpec, namespace: str, owner_uid: str) -> None:
    """Adds the owner to everything of the job, the master's pod last: what has been done is then known from that.

    Raises:
        ClusterError: the API does not answer, or refuses; an object that is missing is a warning.
    """
    job = names.job_object(spec.job_name)
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": job, "uid": owner_uid}
    for kind, name, patch in _objects(connection, spec):
        try:
            with connection.doing(f"make the job the owner of {kind} {name}"):
                patch(
                    name,
                    namespace,
                    {"metadata": {"ownerReferences": [owner]}},
                    _content_type=_STRATEGIC,
                    _preload_content=False,
                )
        except ClusterError as error:
            if error.status != 404:
                raise
            logger.warning("%s %s of the job does not exist", kind, name)
    logger.info("ConfigMap %s owns all objects of the job now", job)


def _objects(connection: Connection, spec: JobSpec) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    from kubernetes.client import NetworkingV1Api

    job, core = spec.job_name, connection.core
    yield "ConfigMap", names.state_object(job), core.patch_namespaced_config_map
    yield "Secret", names.token_object(job), core.patch_namespaced_secret
    yield "Service", names.master_service(job), core.patch_namespaced_service
    if spec.need_tf_config:
        for role, size in (("ps", spec.num_ps_pods), ("worker", spec.num_workers)):
            for number in range(size):
                yield "Service", names.pod_name(job, role, number), core.patch_namespaced_service
    yield "NetworkPolicy", names.job_object(job), NetworkingV1Api(connection.client).patch_namespaced_network_policy
    yield "Pod", names.pod_name(job, "master", 0), core.patch_namespaced_pod
