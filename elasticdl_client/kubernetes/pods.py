"""The manifest of a pod: the client makes the master's with it, the master those of servers and workers.

Manifests are plain dictionaries, as the API takes them and as YAML holds them.  Nothing here talks to a cluster.

`tf_config`: where TensorFlow's own chief, workers and parameter servers are, and which of them a pod is.  Slot 0 of the
workers is the chief, the others are TensorFlow's workers in order; one slot more is the evaluator, which is no member
of the cluster.  Knows neither how addresses are made nor what listens there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Protocol

from elasticdl_client.choices import LOG_FORMAT_VARIABLE, RUN_MODULE, ImagePullPolicy, LogFormat
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import code, names, pod_template
from elasticdl_client.kubernetes.flags import parse_user, worker_priorities
from elasticdl_client.kubernetes.pod_template import adapt_pod
from elasticdl_client.kubernetes.resources import (
    QUEUE_LABEL,
    Resources,
    add_tolerations,
    container_resources,
    parse_node_selector,
    parse_tolerations,
    parse_volumes,
    pod_volumes,
    quantity,
)

Manifest = dict[str, Any]

_NODE_LOST_TOLERATION_S = 10  # before a worker or server is given up with the node that it runs on
_TOKEN_VOLUME = "elasticdl-token"
_SHARED_MEMORY = "/dev/shm"  # of which a container has 64 MiB; loaders of data pass batches through it
_WRITABLE = {"/tmp": "elasticdl-tmp", names.JOB_DIRECTORY: "elasticdl-job"}  # path → its volume


class PodLike(Protocol):
    """A process to run; the port Cluster's PodSpec is one."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def command(self) -> tuple[str, ...]: ...
    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def restart_policy(self) -> str: ...
    @property
    def grace_s(self) -> float: ...
    @property
    def slot(self) -> int: ...
    @property
    def memory_factor(self) -> float: ...


def pod_manifest(
    spec: JobSpec,
    pod: PodLike,
    owner_uid: str = "",
    max_memory: int | None = None,
    has_secret_envs: bool = True,
) -> Manifest:
    """Return the manifest of the pod.

    Args:
        spec: the job; `cluster_spec` is the path of a file that this process can read.
        pod: what to run.
        owner_uid: UID of the ConfigMap that owns the job; empty: the pod gets no owner.
        max_memory: bytes that a memory grown by `memory_factor` does not exceed.
        has_secret_envs: the job's Secret holds the values of --envs; that of an older client does not.

    Raises:
        FlagError: the user's --cluster_spec cannot be used, or a flag that was not checked is wrong.
    """
    role = str(pod.role)
    metadata: Manifest = {"name": pod.name, "namespace": spec.namespace, "labels": _labels(spec, pod)}
    if _serves_metrics(spec, pod):
        metadata["annotations"] = {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(spec.metrics_port),
            "prometheus.io/path": "/metrics",
        }
    manifest: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": _pod_spec(spec, pod, max_memory, spec.secret_envs_dict() if has_secret_envs else {}),
    }
    for template in (spec.pod_template, getattr(spec, f"{role}_pod_template")):
        pod_template.apply(manifest, pod_template.load(template))
    if spec.cluster_spec:
        manifest = pod_template.with_pod(spec.cluster_spec, manifest)
    else:
        adapt_pod(manifest, role, spec.cluster_spec_json)
    return owned(manifest, spec.job_name, owner_uid)


def queue_of(spec: JobSpec, role: str) -> str:
    """Return the queue that flags and templates name for the pods of a role; empty: none.

    Raises:
        FlagError: a template was not checked, and is wrong.
    """
    queue = spec.queue
    for template in (spec.pod_template, getattr(spec, f"{role}_pod_template")):
        labels = (pod_template.load(template).get("metadata") or {}).get("labels") or {}
        queue = str(labels.get(QUEUE_LABEL, queue))
    return queue


def owned(manifest: Manifest, job_name: str, uid: str) -> Manifest:
    """Return the object, owned by the job's ConfigMap of that uid; without a uid, unchanged."""
    if not uid:
        return manifest
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": names.job_object(job_name), "uid": uid}
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [owner]}}


def _serves_metrics(spec: JobSpec, pod: PodLike) -> bool:
    return pod.role == "master" and spec.metrics_port > 0


def _labels(spec: JobSpec, pod: PodLike) -> dict[str, str]:
    labels = {**pod.labels, **names.pod_labels(spec.job_name, str(pod.role), pod.index)}
    if pod.role == "worker":
        labels[names.SLOT_LABEL] = str(pod.slot)
    if spec.queue and pod.role != "master":
        labels[QUEUE_LABEL] = spec.queue
    return labels


def _pod_spec(spec: JobSpec, pod: PodLike, max_memory: int | None, secret_envs: Mapping[str, str]) -> Manifest:
    is_master = pod.role == "master"
    resources = _resources(spec, pod, max_memory)
    volumes, mounts = _volumes(spec, str(pod.role), resources)
    found: Manifest = {
        "restartPolicy": str(pod.restart_policy),
        "terminationGracePeriodSeconds": math.ceil(pod.grace_s),
        "enableServiceLinks": False,
        "automountServiceAccountToken": is_master,
        "securityContext": _pod_security(parse_user(spec.run_as_user)),
        "containers": [_container(spec, pod, _env(spec, pod, secret_envs), mounts, resources)],
        "volumes": volumes,
    }
    if is_master:
        found["serviceAccountName"] = spec.service_account
    else:
        found["tolerations"] = [
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _NODE_LOST_TOLERATION_S}
            for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        ]
        if spec.worker_service_account:
            found["serviceAccountName"] = spec.worker_service_account
    add_tolerations(found, parse_tolerations(spec.tolerations))
    if selector := parse_node_selector(spec.node_selector):
        found["nodeSelector"] = selector
    if spec.scheduler_name:
        found["schedulerName"] = spec.scheduler_name
    if secrets := image_pull_secrets(spec):
        found["imagePullSecrets"] = [{"name": name} for name in secrets]
    if priority := _priority(spec, pod):
        found["priorityClassName"] = priority
    return found


def _pod_security(user: int | None) -> Manifest:
    """Within the restricted Pod Security profile; a chosen user is the group of the pod's volumes, too."""
    own = {} if user is None else {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return {
        "runAsNonRoot": True,
        **own,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def image_pull_secrets(spec: JobSpec) -> list[str]:
    """Return the names in --image_pull_secret."""
    return [name.strip() for name in spec.image_pull_secret.split(",") if name.strip()]


def _container(
    spec: JobSpec, pod: PodLike, env: list[Manifest], mounts: list[Manifest], resources: Resources
) -> Manifest:
    image = spec.image_name if pod.role == "master" else spec.worker_image or spec.image_name
    is_auto = spec.image_pull_policy is ImagePullPolicy.AUTO  # the server's own default
    ports = [{"name": names.METRICS_PORT_NAME, "containerPort": spec.metrics_port, "protocol": "TCP"}]
    return {
        "name": names.container_name(pod.name),
        "image": image,
        **({} if is_auto else {"imagePullPolicy": spec.image_pull_policy.value}),
        "command": [word.replace("$(", "$$(") for word in _command(spec, pod)],  # else $(NAME) is another word there
        **({"ports": ports} if _serves_metrics(spec, pod) else {}),
        "env": env,
        "resources": resources,
        "securityContext": {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def _command(spec: JobSpec, pod: PodLike) -> tuple[str, ...]:
    command = pod.command
    if archive := code.parse(spec.code):
        cache = spec.requirements_cache or names.REQUIREMENTS_DIRECTORY
        prepare = ("elasticdl.rpc.unpack_code", archive.digest, archive.source, names.ZOO_DIRECTORY, cache)
        command = ("python", *RUN_MODULE, *prepare, *command)
    if spec.log_file_path:
        command = ("python", *RUN_MODULE, "elasticdl.rpc.log_file", log_file(spec, str(pod.role), pod.index), *command)
    return command


def log_file(spec: JobSpec, role: str, index: int) -> str:
    """Return where to copy a pod's output: the master's to --log_file_path, others' beside it as train-worker-0.log."""
    path = PurePosixPath(spec.log_file_path)
    return str(path if role == "master" else path.with_name(f"{path.stem}-{role}-{index}{path.suffix}"))


def _env(spec: JobSpec, pod: PodLike, secret_envs: Mapping[str, str]) -> list[Manifest]:
    """Return the environment; the pod's address is first, so that other values may refer to it as $(MY_POD_IP).

    Args:
        secret_envs: the variables whose values the job's Secret holds.
    """
    values = {
        "USER": names.APP,  # for libraries that look up their user: the image need not know its id
        **spec.envs_dict(),
        **pod.env,
        "HOME": names.JOB_DIRECTORY,
        "PYTHONUNBUFFERED": "1",
        "ELASTICDL_JOB_DIR": names.JOB_DIRECTORY,
        "ELASTICDL_TOKEN_FILE": f"{names.TOKEN_DIRECTORY}/{names.TOKEN_KEY}",
        "ELASTICDL_POD_NAME": pod.name,
    }
    if spec.log_format is not LogFormat.TEXT:
        values[LOG_FORMAT_VARIABLE] = spec.log_format.value
    if pod.role == "master":
        values |= {
            "ELASTICDL_JOB_NAME": spec.job_name,
            "ELASTICDL_NAMESPACE": spec.namespace,
            "MASTER_PORT": str(names.MASTER_PORT),
        }
    elif spec.need_tf_config:
        number = pod.slot if pod.role == "worker" else pod.index
        values["TF_CONFIG"] = tf_config(service_addresses(spec), str(pod.role), number)
    values.pop("MY_POD_IP", None)
    address = {"name": "MY_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    secret = names.token_object(spec.job_name)

    def entry(name: str, value: str) -> Manifest:
        if secret_envs.get(name) != value:  # ours has another value
            return {"name": name, "value": value}
        return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": names.env_key(name)}}}

    return [address, *(entry(name, value) for name, value in values.items())]


def service_addresses(spec: JobSpec) -> dict[str, list[str]]:
    """Return the addresses of TensorFlow's servers and workers: those of Services, which outlive pods."""
    sizes = {"ps": spec.num_ps_pods, "worker": spec.num_workers}
    return {
        role: [names.service_address(spec.job_name, role, number, spec.namespace) for number in range(size)]
        for role, size in sizes.items()
    }


def _resources(spec: JobSpec, pod: PodLike, max_memory: int | None) -> Resources:
    role = str(pod.role)
    request = getattr(spec, f"{role}_resource_request")
    limit = getattr(spec, f"{role}_resource_limit")
    return container_resources(request, limit, pod.memory_factor, max_memory)


def _priority(spec: JobSpec, pod: PodLike) -> str:
    if pod.role == "master":
        return spec.master_pod_priority
    if pod.role == "ps":
        return spec.ps_pod_priority
    return worker_priorities(spec.worker_pod_priority, spec.num_workers)[min(pod.slot, spec.num_workers - 1)]


def _volumes(spec: JobSpec, role: str, resources: Resources) -> tuple[list[Manifest], list[Manifest]]:
    """Return the user's volumes, the writable places that they leave to us, and the token."""
    volumes, mounts = pod_volumes(role, parse_volumes(spec.volume))
    taken = {mount["mountPath"].rstrip("/") for mount in mounts}
    for path, name in _WRITABLE.items():
        if path not in taken:
            volumes.append({"name": name, "emptyDir": {}})
            mounts.append({"name": name, "mountPath": path})
    if role == "worker" and _SHARED_MEMORY not in taken:
        volumes.append({"name": "elasticdl-shm", "emptyDir": _shared_memory(resources)})
        mounts.append({"name": "elasticdl-shm", "mountPath": _SHARED_MEMORY})
    for found, ours in zip(code.volumes(spec.job_name, spec.code), (volumes, mounts), strict=True):
        ours += found
    # Optional, for the objects of a job that is deleted go in any order: a kubelet that does not find the Secret of
    # a running pod takes two minutes before it lets the pod end.  A process without token says so and ends.
    # It belongs to root: our user reads it as a member of the pod's fsGroup, and could not with the mode 0400; a user
    # that the cluster chooses need not have that group.
    mode = 0o444 if parse_user(spec.run_as_user) is None else 0o440
    token = {"secretName": names.token_object(spec.job_name), "defaultMode": mode, "optional": True}
    volumes.append({"name": _TOKEN_VOLUME, "secret": token})
    mounts.append({"name": _TOKEN_VOLUME, "mountPath": names.TOKEN_DIRECTORY, "readOnly": True})
    return volumes, mounts


def _shared_memory(resources: Resources) -> Manifest:
    """Half of the memory that the container may use, of which it is part."""
    memory = resources["limits"].get("memory")
    size = {"sizeLimit": str(int(quantity(memory)) // 2)} if memory else {}
    return {"medium": "Memory", **size}


def has_evaluator(spec: JobSpec) -> bool:
    """Return whether a job of TensorFlow's own servers has a pod that evaluates."""
    return bool(spec.job_command) and spec.need_tf_config and bool(spec.validation_data)


def tf_config(addresses: Mapping[str, Sequence[str]], role: str, number: int) -> str:
    """Return the value of the variable.

    Args:
        addresses: "worker": by slot, the evaluator's not among them; "ps": by id; each as host:port.
        role: worker or ps.
        number: the worker's slot, or the server's id.
    """
    chief, *workers = addresses["worker"]
    cluster = {"chief": [chief], "worker": workers, "ps": list(addresses.get("ps", ()))}
    members = {kind: hosts for kind, hosts in cluster.items() if hosts}
    return json.dumps({"cluster": members, "task": _task(role, number, len(workers))})


def _task(role: str, number: int, num_workers: int) -> dict[str, object]:
    if role == "ps":
        return {"type": "ps", "index": number}
    if number == 0:
        return {"type": "chief", "index": 0}
    if number <= num_workers:
        return {"type": "worker", "index": number - 1}
    return {"type": "evaluator", "index": 0}
