"""What a namespace must grant so that masters can run in it: a service account, a Role and its binding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticdl_client.kubernetes import names

Manifest = dict[str, Any]
RBAC_GROUP = "rbac.authorization.k8s.io"


@dataclass(frozen=True, slots=True)
class Right:
    """Verbs on one resource of one API group; the subresource is part of the resource's name, `pods/log`."""

    group: str
    resource: str
    verbs: tuple[str, ...]


MASTER_RIGHTS = (
    Right("", "pods", ("create", "delete", "get", "list", "watch", "patch")),
    Right("", "pods/log", ("get",)),
    Right("", "configmaps", ("get", "update", "patch")),
    Right("", "secrets", ("patch",)),  # owner references
    Right("", "services", ("patch",)),
    Right("networking.k8s.io", "networkpolicies", ("patch",)),
    Right("", "events", ("list",)),  # why a pod ended, on servers before 1.26
    Right("", "limitranges", ("list",)),  # how much memory a worker may get after an OOMKilled one
)
"""All that a master does with the API, nothing of it outside its namespace."""

USER_RIGHTS = (
    Right("", "configmaps", ("create", "delete", "get", "list")),
    Right("", "secrets", ("create",)),
    Right("", "services", ("create",)),
    Right("networking.k8s.io", "networkpolicies", ("create",)),
    Right("", "pods", ("create", "get", "list")),
)
"""What who submits a job does with the API."""


def manifests(namespace: str, service_account: str) -> list[Manifest]:
    """Service account, Role and RoleBinding."""
    metadata = {"name": service_account, "namespace": namespace, "labels": {names.APP_LABEL: names.APP}}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": dict(metadata)},
        {
            "apiVersion": f"{RBAC_GROUP}/v1",
            "kind": "Role",
            "metadata": dict(metadata),
            "rules": [
                {"apiGroups": [right.group], "resources": [right.resource], "verbs": list(right.verbs)}
                for right in MASTER_RIGHTS
            ],
        },
        {
            "apiVersion": f"{RBAC_GROUP}/v1",
            "kind": "RoleBinding",
            "metadata": dict(metadata),
            "roleRef": {"apiGroup": RBAC_GROUP, "kind": "Role", "name": service_account},
            "subjects": [{"kind": "ServiceAccount", "name": service_account, "namespace": namespace}],
        },
    ]
