"""Rights that a namespace must grant: to masters, so that they can run in it, and to users, to submit jobs.

`run`, for `elasticdl rbac`, prints what a namespace must grant, for `kubectl apply`; it talks to no cluster.

`missing_of_user` and `missing_of_service_account` ask the API server for access reviews.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from elasticdl_client.errors import FlagError
from elasticdl_client.flags import nearest, parse, split_arguments
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError, Connection
from elasticdl_client.kubernetes.api_client import object_path

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


USAGE = "elasticdl rbac --print [--flag=value …] | kubectl apply -f -"
FLAGS = {
    "print": "Print the YAML of a ServiceAccount, a Role and a RoleBinding. It is all that this command does.",
    "for": "Whose rights: master, or user, for those that submit jobs and look after them. [master]",
    "user": "With --for=user: the name of a user, as the cluster knows it.",
    "group": "With --for=user: the name of a group instead.",
    "namespace": "Where jobs are to run; the same as theirs. [default]",
    "service_account": "The same as --service_account of jobs. [elasticdl]",
}
_DEFAULTS = {
    "print": True,
    "for": "master",
    "user": "",
    "group": "",
    "namespace": "default",
    "service_account": "elasticdl",
}


def run(arguments: Sequence[str]) -> int:
    """Print the manifests; return the exit code.

    Raises:
        FlagError: the command line is wrong.
    """
    import yaml

    long = ["--namespace" if argument == "-n" else argument for argument in arguments]
    texts = split_arguments(long, _DEFAULTS)
    for name in texts:
        if name not in _DEFAULTS:
            near = nearest(name, list(_DEFAULTS))
            hint = f"Did you mean --{near}?" if near else "`elasticdl rbac --help` lists its flags."
            raise FlagError(f"Unknown flag --{name} of `elasticdl rbac`.", hint)
    values = {name: parse(name, texts.get(name, default), default) for name, default in _DEFAULTS.items()}
    wanted = _manifests({name: str(value) for name, value in values.items()})
    print(yaml.safe_dump_all(wanted, sort_keys=False), end="")
    return 0


def _manifests(values: dict[str, str]) -> list[Manifest]:
    subjects = {name: values[name] for name in ("user", "group") if values[name]}
    if values["for"] not in ("master", "user"):
        raise FlagError(f"--for is master or user, not '{values['for']}'.", "Choose one of these.")
    if values["for"] == "master":
        if subjects:
            raise FlagError(f"--{next(iter(subjects))} is for the rights of a user.", "Give --for=user, too.")
        return manifests(values["namespace"], values["service_account"])
    if len(subjects) != 1:
        raise FlagError(
            "--for=user needs the name of one user or group.",
            "Give --user=NAME, as `kubectl auth whoami` shows it, or --group=NAME.",
        )
    ((kind, name),) = subjects.items()
    return user_manifests(values["namespace"], kind.capitalize(), name)


_AT_ONCE = 8
_REVIEWS = "authorization.k8s.io/v1"


def missing_of_user(connection: Connection, namespace: str, rights: Sequence[Right]) -> list[Right]:
    """Return those of `rights` that the user of the connection lacks.

    Raises:
        ClusterError: the cluster does not answer, or does not tell.
    """

    def review(attributes: dict[str, str]) -> Any:
        body = {"apiVersion": _REVIEWS, "kind": "SelfSubjectAccessReview"}
        path = object_path("selfsubjectaccessreviews", group=_REVIEWS)
        return connection.create(path, {**body, "spec": {"resourceAttributes": attributes}})

    return _missing(connection, namespace, rights, review)


def missing_of_service_account(
    connection: Connection, namespace: str, account: str, rights: Sequence[Right]
) -> list[Right] | None:
    """Return those of `rights` that a service account lacks; None if the user may not ask.

    Raises:
        ClusterError: the cluster does not answer.
    """
    subject = {
        "user": f"system:serviceaccount:{namespace}:{account}",
        "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"],
    }

    def review(attributes: dict[str, str]) -> Any:
        body = {
            "apiVersion": _REVIEWS,
            "kind": "LocalSubjectAccessReview",
            "metadata": {"namespace": namespace},
            "spec": {**subject, "resourceAttributes": attributes},
        }
        return connection.create(object_path("localsubjectaccessreviews", namespace=namespace, group=_REVIEWS), body)

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
            return bool(review(_attributes(namespace, right))["status"]["allowed"])

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
