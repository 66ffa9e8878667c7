"""Rights that a namespace must grant: to masters, so that they can run in it, and to users, to submit jobs."""

from __future__ import annotations

from collections.abc import Sequence
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
    Right("", "configmaps", ("get", "watch", "update", "patch")),
    Right("", "secrets", ("patch",)),  # owner references
    Right("", "services", ("patch",)),
    Right("networking.k8s.io", "networkpolicies", ("patch",)),
    Right("", "events", ("list",)),  # why a pod ended, on servers before 1.26
    Right("", "limitranges", ("list",)),  # how much memory a worker may get after an OOMKilled one
)
"""All that a master does with the API, nothing of it outside its namespace."""

EXPIRY_RIGHTS = (Right("", "configmaps", ("delete",)),)
"""Further rights of a master with --ttl_after_finished."""

RESIZE_RIGHTS = (Right("", "pods/resize", ("patch",)),)
"""Optional rights of a master: more memory for a pod that runs."""

EVENT_RIGHTS = (Right("", "events", ("create",)),)
"""Optional rights of a master: its job's events, shown by kubectl."""

USER_RIGHTS = (
    Right("", "configmaps", ("create", "delete", "get", "list")),
    Right("", "secrets", ("create",)),
    Right("", "services", ("create",)),
    Right("networking.k8s.io", "networkpolicies", ("create",)),
    Right("", "pods", ("create", "get", "list")),
)
"""Rights to submit a job."""

COMMAND_RIGHTS = (
    Right("", "configmaps", ("patch",)),  # `elasticdl scale`, `stop` and `resume`
    Right("", "pods", ("delete",)),
    Right("", "pods/log", ("get",)),
    Right("", "pods/portforward", ("create", "get")),  # `elasticdl tensorboard`
    Right("", "events", ("list",)),  # why a pod stays pending
    Right("", "services", ("list",)),
    Right("networking.k8s.io", "networkpolicies", ("list",)),
    Right("", "serviceaccounts", ("get",)),
    Right("", "persistentvolumeclaims", ("get",)),
    Right("authorization.k8s.io", "localsubjectaccessreviews", ("create",)),  # whether the master has its rights
)
"""Rights of the checks before a submission, and of status, logs, scale, chaos, delete, stop, resume and tensorboard."""


def manifests(namespace: str, service_account: str) -> list[Manifest]:
    """Return service account, Role and RoleBinding of a master."""
    metadata = _metadata(service_account, namespace)
    account = {"kind": "ServiceAccount", "name": service_account, "namespace": namespace}
    role = _role(service_account, namespace, (*MASTER_RIGHTS, *EXPIRY_RIGHTS, *RESIZE_RIGHTS, *EVENT_RIGHTS))
    return [{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}, role, _binding(role, account)]


def user_manifests(namespace: str, kind: str, name: str) -> list[Manifest]:
    """Return Role and RoleBinding of a user that submits jobs.

    Args:
        kind: User or Group.
        name: as the cluster knows it.
    """
    role = _role("elasticdl-user", namespace, (*USER_RIGHTS, *COMMAND_RIGHTS))
    return [role, _binding(role, {"kind": kind, "name": name, "apiGroup": RBAC_GROUP})]


def _role(name: str, namespace: str, rights: Sequence[Right]) -> Manifest:
    verbs: dict[tuple[str, str], list[str]] = {}
    for right in rights:
        verbs.setdefault((right.group, right.resource), []).extend(right.verbs)
    rules = [{"apiGroups": [group], "resources": [resource], "verbs": v} for (group, resource), v in verbs.items()]
    return {
        "apiVersion": f"{RBAC_GROUP}/v1",
        "kind": "Role",
        "metadata": _metadata(name, namespace),
        "rules": rules,
    }


def _binding(role: Manifest, subject: dict[str, str]) -> Manifest:
    name, namespace = role["metadata"]["name"], role["metadata"]["namespace"]
    return {
        "apiVersion": f"{RBAC_GROUP}/v1",
        "kind": "RoleBinding",
        "metadata": _metadata(name, namespace),
        "roleRef": {"apiGroup": RBAC_GROUP, "kind": "Role", "name": name},
        "subjects": [subject],
    }


def _metadata(name: str, namespace: str) -> dict[str, Any]:
    return {"name": name, "namespace": namespace, "labels": {names.APP_LABEL: names.APP}}
