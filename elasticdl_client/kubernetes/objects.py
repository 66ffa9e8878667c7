"""All objects of a job as manifests, in the order in which they are created.  Nothing here talks to a cluster.

The first is the ConfigMap that owns the others.

`to_yaml` and `write`: a job's objects as YAML, for `kubectl apply` and for people.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticdl_client.choices import RUN_MODULE, Tls
from elasticdl_client.errors import FlagError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import names, pod_template
from elasticdl_client.kubernetes.code import Archive, config_maps
from elasticdl_client.kubernetes.pod_template import adapt_service
from elasticdl_client.kubernetes.pods import Manifest, owned, pod_manifest
from elasticdl_client.secret_values import HIDDEN

_MASTER_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class RolePod:
    """A pod of a job as the client knows it: the first of its role."""

    name: str
    role: str
    command: tuple[str, ...]
    restart_policy: str
    grace_s: float
    index: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    slot: int = 0
    memory_factor: float = 1.0


def role_pod(spec: JobSpec, role: str) -> RolePod:
    """Return the master, or the first server or worker, in which the master sets more than this."""
    return RolePod(
        name=names.pod_name(spec.job_name, role, 0),
        role=role,
        command=("python", *RUN_MODULE, f"elasticdl.{role}"),
        restart_policy=spec.restart_policy.value if role == "master" else "Never",
        grace_s=_MASTER_GRACE_S,
    )


def spec_for_pods(spec: JobSpec) -> JobSpec:
    """Return the specification for the job's pods: with their paths, and without settings of the client alone."""
    return dataclasses.replace(
        spec,
        model_zoo=spec.model_zoo or names.ZOO_DIRECTORY,
        cluster_spec=cluster_spec_in_image(spec.cluster_spec),
        pod_template=pod_template.compact(spec.pod_template),
        master_pod_template="",  # its pod is made by the client
        worker_pod_template=pod_template.compact(spec.worker_pod_template),
        ps_pod_template=pod_template.compact(spec.ps_pod_template),
        yaml="",
        dry_run=False,
        wait=False,
        context="",
        tls=Tls.ON if spec.uses_tls else Tls.OFF,
        force_use_kube_config_file=False,
    )


def cluster_spec_in_image(path: str) -> str:
    """Return where an image holds the user's --cluster_spec."""
    return f"{names.CLUSTER_SPEC_DIRECTORY}/{os.path.basename(path)}" if path else ""


def job_manifests(
    spec: JobSpec, token: str, certificate: Mapping[str, str] | None = None, archive: Archive | None = None
) -> list[Manifest]:
    """Every object of a job; `owned` gives them their owner once that exists.

    Args:
        spec: as the user gave it; `cluster_spec` is a file of this machine, `code` names the archive.
        token: the job's.
        certificate: its files, if it uses TLS.
        archive: Archive of its code, if --code is given.

    Raises:
        FlagError: the user's --cluster_spec cannot be used.
    """
    job, pods_spec = spec.job_name, spec_for_pods(spec)
    secret = _secret(pods_spec, token, certificate or {})
    master = pod_manifest(spec, role_pod(spec, "master"))
    status = {names.STATUS_LABEL: "Pending"}
    master["metadata"]["labels"] = {**master["metadata"]["labels"], **status}
    return [
        _object(
            spec,
            "ConfigMap",
            names.job_object(job),
            data={names.SPEC_KEY: pods_spec.public().to_json(), names.MASTER_POD_KEY: json.dumps(master)},
        ),
        _object(spec, "ConfigMap", names.state_object(job), data={}),
        _object(
            spec,
            "Secret",
            names.token_object(job),
            type="Opaque",
            stringData=secret,
        ),
        *(_code_part(spec, name, data) for name, data in (config_maps(archive, job) if archive is not None else ())),
        *_services(spec),
        _network_policy(spec),
        master,
    ]


def public_manifests(spec: JobSpec, archive: Archive | None = None) -> list[Manifest]:
    """Return the objects of `job_manifests` without anything secret, to be shown."""
    certificate = dict.fromkeys(names.CERTIFICATE_KEYS, HIDDEN) if spec.uses_tls else {}
    manifests = job_manifests(spec.public(), HIDDEN, certificate, archive)
    for manifest in manifests:
        if "stringData" in manifest:
            manifest["stringData"] = dict.fromkeys(manifest["stringData"], HIDDEN)
    return manifests


def _secret(spec: JobSpec, token: str, certificate: Mapping[str, str]) -> dict[str, str]:
    variables = {names.env_key(name): value for name, value in spec.secret_envs_dict().items()}
    return {names.TOKEN_KEY: token, names.SECRET_FLAGS_KEY: json.dumps(spec.secrets()), **certificate, **variables}


def master_pod(config_map: Mapping[str, str], job_name: str, owner_uid: str) -> Manifest:
    """Return the master's pod again, for a job that exists.

    Args:
        config_map: the data of the ConfigMap that owns the job.
        job_name: Name of the job.
        owner_uid: UID of that ConfigMap.
    """
    return owned(json.loads(config_map[names.MASTER_POD_KEY]), job_name, owner_uid)


def _code_part(spec: JobSpec, name: str, data: Mapping[str, str]) -> Manifest:
    manifest = _object(spec, "ConfigMap", name, binaryData=data)
    manifest["metadata"]["labels"][names.CODE_LABEL] = ""
    return manifest


def _services(spec: JobSpec) -> list[Manifest]:
    services = [_service(spec, "master", 0, names.MASTER_PORT)]
    if spec.need_tf_config:
        services += [_service(spec, "ps", index, names.PS_PORT) for index in range(spec.num_ps_pods)]
        services += [_service(spec, "worker", slot, names.WORKER_PORT) for slot in range(spec.num_workers)]
    return services


def _service(spec: JobSpec, role: str, index: int, port: int) -> Manifest:
    """Return the Service of a role's index; of workers it is found by slot, which a successor takes over."""
    number_label = names.SLOT_LABEL if role == "worker" else names.INDEX_LABEL
    selector = {**names.job_labels(spec.job_name), names.ROLE_LABEL: role, number_label: str(index)}
    manifest = _object(spec, "Service", names.pod_name(spec.job_name, role, index))
    manifest["metadata"]["annotations"] = names.job_labels(spec.job_name)
    manifest["spec"] = {"selector": selector, "ports": [{"name": "grpc", "port": port, "targetPort": port}]}
    adapt_service(manifest, spec.cluster_spec_json)
    return pod_template.with_service(spec.cluster_spec, manifest) if spec.cluster_spec else manifest


def _network_policy(spec: JobSpec) -> Manifest:
    """Only pods of the job reach pods of the job; anyone reaches the metrics, at a port that the master alone names."""
    own_pods = {"podSelector": {"matchLabels": names.job_labels(spec.job_name)}}
    manifest = _object(spec, "NetworkPolicy", names.job_object(spec.job_name), version="networking.k8s.io/v1")
    rules: list[Manifest] = [{"from": [own_pods]}]
    if spec.metrics_port:
        rules.append({"ports": [{"protocol": "TCP", "port": names.METRICS_PORT_NAME}]})
    manifest["spec"] = {**own_pods, "policyTypes": ["Ingress"], "ingress": rules}
    return manifest


def _object(spec: JobSpec, kind: str, name: str, version: str = "v1", **content: object) -> Manifest:
    metadata = {"name": name, "namespace": spec.namespace, "labels": names.job_labels(spec.job_name)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def to_yaml(manifests: list[Manifest]) -> str:
    """Return one document for each object, nothing abbreviated."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes every object in full: people read this, and kubectl's readers differ over aliases."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    return str(yaml.dump_all(manifests, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120))


_STANDARD = {"/dev/stdout": "/dev/fd/1", "/dev/stderr": "/dev/fd/2"}
_OWN_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")


def is_stream(path: str) -> bool:
    """Return whether a path is a pipe, a device, or a descriptor such as /dev/stdout, wherever that leads."""
    is_descriptor = path.startswith(("/dev/", "/proc/")) and os.path.islink(path)
    return is_descriptor or (os.path.exists(path) and not os.path.isfile(path))


def write(path: str, text: str) -> None:
    """Write a file that only the user can read, for the job's token is in it, or a stream.

    Raises:
        FlagError: it cannot be written.
    """
    draft = path if is_stream(path) else f"{path}.tmp"  # root could replace /dev/stdout for all
    own = _OWN_DESCRIPTOR.fullmatch(_STANDARD.get(path, path))
    try:
        if own:  # opened anew a file would be written from its beginning, and a socket cannot be opened
            fd = os.dup(int(own[1]))
        else:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if draft == path else os.O_TRUNC), 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        if draft != path:
            os.replace(draft, path)
    except OSError as error:
        raise FlagError(f"--yaml={path} cannot be written: {error.strerror}.", "Name another file.") from error
