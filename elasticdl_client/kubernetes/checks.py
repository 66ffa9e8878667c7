"""Checks on the cluster before anything of a job is created.  Writes nothing.

Objects that the user may not read are not checked: then the cluster itself reports the error later.
"""

from __future__ import annotations

from typing import Any

from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import (
    OF_EVERY_POD,
    ClusterError,
    Connection,
    elasticdl_command,
    grant,
    grant_user,
    kubectl_command,
    of_context,
)
from elasticdl_client.kubernetes.api_client import kind_path, object_path
from elasticdl_client.kubernetes.flags import worker_priorities
from elasticdl_client.kubernetes.objects import role_pod
from elasticdl_client.kubernetes.pods import image_pull_secrets, pod_manifest
from elasticdl_client.kubernetes.rbac import (
    EXPIRY_RIGHTS,
    MASTER_RIGHTS,
    USER_RIGHTS,
    described,
    missing_of_service_account,
    missing_of_user,
)
from elasticdl_client.kubernetes.resources import container_resources, parse_volumes, quantity

_UID_RANGE = "openshift.io/sa.scc.uid-range"  # annotation of a namespace whose admission gives each pod a user
_KUEUE = "kueue.x-k8s.io"


def check(connection: Connection, spec: JobSpec) -> list[str]:
    """Check a job against the cluster; return warnings for the user.

    Raises:
        ElasticDLError: the first thing that cannot work.
    """
    _check_namespace(connection, spec)
    _check_user(connection, spec)
    _check_name(connection, spec)
    notes = _check_service_account(connection, spec)
    _check_priorities(connection, spec)
    notes += _check_claims(connection, spec)
    _check_mounted(connection, spec)
    _check_queue(connection, spec)
    _check_pods(connection, spec)
    return notes + _too_large(connection, spec)


def gives_users(connection: Connection, namespace: str) -> bool:
    """Return whether a namespace admits only users of its own range, and gives one to each pod; False if unknown.

    Raises:
        ClusterError: the cluster does not answer.
    """
    try:
        found = _readable(connection, f"the namespace {namespace}", object_path("namespaces", namespace))
    except ClusterError as error:
        if error.unreachable:
            raise
        return False
    return found is not None and _UID_RANGE in (found["metadata"].get("annotations") or {})


def _readable(connection: Connection, what: str, path: str) -> Any:
    """Return the object of this path, or None if the user may not read it.

    Raises:
        ClusterError: everything else, 404 among it.
    """
    try:
        with connection.doing(f"read {what}"):
            return connection.get(path)
    except ClusterError as error:
        if error.status == 403:
            return None
        raise


def _exists(connection: Connection, what: str, path: str) -> Any:
    """Return the object of this path, True if the user may not read it, None if it does not exist."""
    try:
        return _readable(connection, what, path) or True
    except ClusterError as error:
        if error.status == 404:
            return None
        raise


def _check_namespace(connection: Connection, spec: JobSpec) -> None:
    name = spec.namespace
    found = _exists(connection, f"the namespace {name}", object_path("namespaces", name))
    if found is None:
        raise JobError(
            f"The namespace {name} does not exist in the cluster of context {connection.context}.",
            f"kubectl create namespace {name}{of_context(spec)}, or choose another --namespace.",
        )
    if found is not True and found["status"].get("phase") == "Terminating":
        raise JobError(f"The namespace {name} is being deleted.", "Wait for its end, or choose another --namespace.")


def _check_user(connection: Connection, spec: JobSpec) -> None:
    missing = missing_of_user(connection, spec.namespace, USER_RIGHTS)
    if missing:
        raise JobError(
            f"You may not do all that a submission needs in the namespace {spec.namespace} of the cluster of context "
            f"{connection.context}. Missing: {described(missing)}.",
            f"The administrator grants them: `{grant_user(spec.namespace)}`, with the NAME that "
            "`kubectl auth whoami` shows you. Or choose another --namespace.",
        )


def _check_name(connection: Connection, spec: JobSpec) -> None:
    query = [("labelSelector", f"{names.JOB_LABEL}={spec.job_name}")]
    with connection.doing(f"look for a job of this name in the namespace {spec.namespace}"):
        pods = connection.get(object_path("pods", namespace=spec.namespace), query)["items"]
        config_maps = connection.get(object_path("configmaps", namespace=spec.namespace), query)["items"]
    found = [f"ConfigMap {config_map['metadata']['name']}" for config_map in config_maps]
    found += [f"pod {pod['metadata']['name']} ({pod['status'].get('phase')})" for pod in pods]
    if not found:
        return
    listed = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
    if not any(config_map["metadata"]["name"] == names.job_object(spec.job_name) for config_map in config_maps):
        raise JobError(
            f"A job of the name {spec.job_name} is still being deleted in the namespace {spec.namespace}: {listed}.",
            f"Wait for its end, choose another --job_name, or {elasticdl_command('delete', spec)}.",
        )
    labels = [pod["metadata"].get("labels") or {} for pod in pods]
    statuses = [of.get(names.STATUS_LABEL) for of in labels if of.get(names.ROLE_LABEL) == "master"]
    status = f", status {statuses[0]}" if statuses and statuses[0] else ""
    raise JobError(
        f"A job of the name {spec.job_name} exists in the namespace {spec.namespace}{status}: {listed}.",
        f"`{elasticdl_command('delete', spec)}` deletes it; or choose another --job_name.",
    )


def _check_service_account(connection: Connection, spec: JobSpec) -> list[str]:
    """Check that it exists and may do what a master does; return a note if that is unknown."""
    account, namespace = spec.service_account, spec.namespace
    hint = grant(namespace, account) + of_context(spec)
    what = f"the service account {account}"
    found = _exists(connection, what, object_path("serviceaccounts", account, namespace))
    if not found:
        raise JobError(
            f"The service account {account} does not exist in the namespace {namespace}.",
            f"{hint} makes it with the rights that it needs; --service_account names another one.",
        )
    notes = _pull_secret_notes(spec, found)
    rights = (*MASTER_RIGHTS, *(EXPIRY_RIGHTS if spec.expires else ()))
    missing = missing_of_service_account(connection, namespace, account, rights)
    if missing is None:
        return [
            *notes,
            f"whether {what} may do what a master does could not be checked; the master checks it at its start.",
        ]
    if missing:
        raise JobError(
            f"The service account {account} of the namespace {namespace} may not do all that a master does. "
            f"Missing: {described(missing)}.",
            hint,
        )
    return notes


def _pull_secret_notes(spec: JobSpec, account: Any) -> list[str]:
    """That the master's account brings its pod credentials of a registry, and that the other pods have none."""
    secrets = [one["name"] for one in (account.get("imagePullSecrets") or [])] if account is not True else []
    if not secrets or spec.image_pull_secret or spec.worker_service_account:
        return []
    note = f"the service account {spec.service_account} has image pull secrets, which only the master's pod gets: "
    return [f"{note}--image_pull_secret={','.join(secrets)} is for all."]


def _check_priorities(connection: Connection, spec: JobSpec) -> None:
    wanted = {"master_pod_priority": {spec.master_pod_priority}}
    if spec.num_ps_pods:
        wanted["ps_pod_priority"] = {spec.ps_pod_priority}
    wanted["worker_pod_priority"] = set(worker_priorities(spec.worker_pod_priority, spec.num_workers))
    for flag, classes in wanted.items():
        for name in sorted(classes - {""}):
            path = object_path("priorityclasses", name, group="scheduling.k8s.io/v1")
            if not _exists(connection, f"the PriorityClass {name}", path):
                raise FlagError(
                    f"--{flag}={getattr(spec, flag)}: there is no PriorityClass {name} in the cluster of context "
                    f"{connection.context}.",
                    "An administrator makes high and low: kubectl apply -f manifests/priority_classes.yaml.",
                )


def _check_claims(connection: Connection, spec: JobSpec) -> list[str]:
    notes = []
    for name in dict.fromkeys(mount.claim_name for mount in parse_volumes(spec.volume) if mount.claim_name):
        path = object_path("persistentvolumeclaims", name, spec.namespace)
        found = _exists(connection, f"the claim {name}", path)
        if found is None:
            raise FlagError(
                f"--volume: there is no PersistentVolumeClaim {name} in the namespace {spec.namespace}.",
                f"`{kubectl_command('get pvc', spec)}` lists the existing ones.",
            )
        if found is not True and (phase := found["status"].get("phase")) != "Bound":
            notes.append(f"the claim {name} is {phase}: pods stay Pending until it is bound.")
    return notes


def _check_mounted(connection: Connection, spec: JobSpec) -> None:
    """Return the Secrets and ConfigMaps without which no container of the job is created."""
    mounts = parse_volumes(spec.volume)
    wanted = [("volume", "Secret", mount.secret_name) for mount in mounts]
    wanted += [("volume", "ConfigMap", mount.config_map_name) for mount in mounts]
    wanted += [("image_pull_secret", "Secret", name) for name in image_pull_secrets(spec)]
    wanted += [("worker_service_account", "ServiceAccount", spec.worker_service_account)]
    for flag, kind, name in wanted:
        path = kind_path(kind, name, spec.namespace)
        if name and not _exists(connection, f"the {kind} {name}", path):
            raise FlagError(
                f"--{flag}: there is no {kind} {name} in the namespace {spec.namespace}.",
                f"`{kubectl_command(f'get {kind}'.lower(), spec)}` lists the existing ones.",
            )


def _check_queue(connection: Connection, spec: JobSpec) -> None:
    """Kueue's queue, without which the pods would be scheduled at once, or never."""
    if not spec.queue:
        return
    groups = _readable(connection, "the API groups", "/apis")["groups"]
    version = next((group["preferredVersion"]["version"] for group in groups if group["name"] == _KUEUE), "")
    if not version:
        raise FlagError(
            f"--queue={spec.queue}: there is no Kueue in the cluster of context {connection.context}.",
            "An administrator installs it, with the integration `pod`; or leave --queue out.",
        )
    path = object_path("localqueues", spec.queue, spec.namespace, group=f"{_KUEUE}/{version}")
    if not _exists(connection, f"the LocalQueue {spec.queue}", path):
        raise FlagError(
            f"--queue={spec.queue}: there is no LocalQueue {spec.queue} in the namespace {spec.namespace}.",
            f"`{kubectl_command('get localqueues', spec)}` lists the existing ones.",
        )


def _check_pods(connection: Connection, spec: JobSpec) -> None:
    """Let the API validate a parameter server and a worker as the master will create them; create nothing (dry run)."""
    for role in ("ps", "worker") if spec.num_ps_pods else ("worker",):
        manifest = pod_manifest(spec, role_pod(spec, role))
        try:
            with connection.doing(f"make a {role} pod of this job", role):
                connection.create(object_path("pods", namespace=spec.namespace), manifest, [("dryRun", "All")])
        except ClusterError as error:
            # Else a used-up quota or a policy: the check for the user now need not hold for the master.
            is_final = error.status in (400, 422) or any(words in error.what for words in OF_EVERY_POD)
            if is_final or error.unreachable:
                raise


def _too_large(connection: Connection, spec: JobSpec) -> list[str]:
    listed = _readable(connection, "the nodes", object_path("nodes"))
    told = [node["status"].get("allocatable") for node in listed["items"]] if listed is not None else []
    nodes = [node for node in told if node]  # one that has just come has not said yet
    notes = []
    for role in ("master", "ps", "worker") if spec.num_ps_pods else ("master", "worker"):
        request, limit = getattr(spec, f"{role}_resource_request"), getattr(spec, f"{role}_resource_limit")
        wanted = container_resources(request, limit)["requests"]
        lacking = min((_lacking(wanted, node) for node in nodes), key=len, default=[])
        if lacking:
            notes.append(
                f"no node is large enough for a {role} ({request}): it stays Pending until one comes. "
                f"The best one has {' and '.join(lacking)}."
            )
    return notes


def _lacking(wanted: dict[str, str], node: dict[str, str]) -> list[str]:
    """Return the resources that a node lacks: ``no nvidia.com/gpu``, ``memory 3Gi of 16Gi``."""
    return [
        f"{name} {node[name]} of {amount}" if name in node else f"no {name}"
        for name, amount in wanted.items()
        if name not in node or quantity(amount) > quantity(node[name])
    ]
