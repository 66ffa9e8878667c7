"""Access reviews: the rights of the user and of the master's service account."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

from elasticdl_client.kubernetes.api import ClusterError, Connection
from elasticdl_client.kubernetes.rbac import Right

_AT_ONCE = 8


def missing_of_user(connection: Connection, namespace: str, rights: Sequence[Right]) -> list[Right]:
    """Return those of `rights` that the user of the connection lacks.

    Raises:
        ClusterError: the cluster does not answer, or does not tell.
    """
    from kubernetes.client import AuthorizationV1Api

    api = AuthorizationV1Api(connection.client)

    def review(attributes: dict[str, str]) -> Any:
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        return api.create_self_subject_access_review({**body, "spec": {"resourceAttributes": attributes}})

    return _missing(connection, namespace, rights, review)


def missing_of_service_account(
    connection: Connection, namespace: str, account: str, rights: Sequence[Right]
) -> list[Right] | None:
    """Return those of `rights` that a service account lacks; None if the user may not ask.

    Raises:
        ClusterError: the cluster does not answer.
    """
    from kubernetes.client import AuthorizationV1Api

    api = AuthorizationV1Api(connection.client)
    subject = {
        "user": f"system:serviceaccount:{namespace}:{account}",
        "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"],
    }

    def review(attributes: dict[str, str]) -> Any:
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "LocalSubjectAccessReview",
            "metadata": {"namespace": namespace},
            "spec": {**subject, "resourceAttributes": attributes},
        }
        return api.create_namespaced_local_subject_access_review(namespace, body)

    try:
        return _missing(connection, namespace, rights, review)
    except ClusterError as error:
        if error.status == 403:
            return None
        raise


def described(rights: Sequence[Right]) -> str:
    """Describe rights: ``create, delete pods; get pods/log``."""
    return "; ".join(f"{', '.join(right.verbs)} {right.resource}" for right in rights)


def _missing(
    connection: Connection, namespace: str, rights: Sequence[Right], review: Callable[[dict[str, str]], Any]
) -> list[Right]:
    single = [Right(right.group, right.resource, (verb,)) for right in rights for verb in right.verbs]

    def is_allowed(right: Right) -> bool:
        with connection.doing(f"ask about rights in the namespace {namespace}"):
            return bool(review(_attributes(namespace, right)).status.allowed)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        allowed = list(pool.map(is_allowed, single))
    refused = [right for right, may in zip(single, allowed, strict=True) if not may]
    return [
        Right(group, resource, tuple(verb for right in found for verb in right.verbs))
        for (group, resource), found in groupby(refused, lambda right: (right.group, right.resource))
    ]


def _attributes(namespace: str, right: Right) -> dict[str, str]:
    resource, _, subresource = right.resource.partition("/")
    found = {"namespace": namespace, "group": right.group, "resource": resource, "verb": right.verbs[0]}
    return found | ({"subresource": subresource} if subresource else {})
