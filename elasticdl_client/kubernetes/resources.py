"""What a pod asks of a cluster: resource strings, ``cpu=1,memory=4096Mi,gpu=1``, and where and when it is scheduled.

Quantities are compared and scaled here.  Scheduling is --node_selector, --tolerations, --scheduler_name, and --queue
for Kueue: every worker and parameter server is a workload of its own in the queue, so a job grows and shrinks with its
quota.  The master is none: a job whose master is taken away for a quota would stop.

Volume strings, ``claim_name=c,mount_path=/data;host_path=/tmp,mount_path=/tmp``, to volumes and mounts of a pod.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

from elasticdl_client.errors import FlagError
from elasticdl_client.kubernetes import names

Resources = dict[str, dict[str, str]]
"""`requests` and `limits` of a container."""

_ALLOWED = ["memory", "disk", "ephemeral-storage", "cpu", "gpu"]
_MEMORY = re.compile(r"[1-9][0-9]*(E|P|T|G|M|K|Ei|Pi|Ti|Gi|Mi|Ki)")
_MILLI_CPU = re.compile(r"[1-9][0-9]*m")
_CPU = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)")
_VENDOR = re.compile(r"([a-z0-9]([-a-z0-9]*[a-z0-9])?\.)*[a-z]{2,}")
_DEVICE = re.compile(rf"{_VENDOR.pattern}/[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?")  # nvidia.com/gpu, rdma/hca
_HUGE_PAGES = re.compile(r"hugepages-[1-9][0-9]*(Ki|Mi|Gi)")
_QUANTITY = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(?:(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE])|[eE]([+-]?[0-9]+))?")
_MAX_MEMORY_FACTOR = 4.0
_MEBIBYTE = 2**20
_DECIMAL = ("n", "u", "m", "", "k", "M", "G", "T", "P", "E")
_BINARY = ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_SCALES = {suffix: Fraction(1000) ** power for power, suffix in enumerate(_DECIMAL, -3)} | {
    suffix: Fraction(1024) ** power for power, suffix in enumerate(_BINARY, 1)
}
_HINT = "For example cpu=1,memory=4096Mi,gpu=1; devices have their vendor's name, google.com/tpu=4 or rdma/hca=1."


def parse_resources(text: str) -> dict[str, str]:
    """Parse a resource string; return Kubernetes quantities by resource name, an empty dict for an empty text.

    Raises:
        FlagError: with the messages of the original.
    """
    quantities: dict[str, str] = {}
    for part in text.split(",") if text.strip() else []:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise FlagError(f"'{part.strip()}' is not of the form name=quantity.", _HINT)
        key = _resource_name(name)
        if key in quantities:
            raise FlagError(f"The resource string contains duplicate resource names: {name}", _HINT)
        _check_quantity(name, key, value)
        quantities[key] = re.sub("K$", "k", value)  # Kubernetes knows the decimal kilo only as k
    return quantities


def container_resources(
    request: str, limit: str, memory_factor: float = 1.0, max_memory: int | None = None
) -> Resources:
    """Return the resources of a container.

    Without a limit it is limited to what it asks for, CPUs excepted: they can be shared, and a throttled pod is only
    slow.

    Args:
        request: a resource string.
                limit: a resource string; unshareable resources (devices, huge pages) are always limited to the request.
        memory_factor: times the memory of both, at most 4 times.
        max_memory: bytes that a grown memory does not exceed.

    Raises:
        FlagError: a string is wrong.
    """
    requests = parse_resources(request)
    limits = parse_resources(limit) or {name: amount for name, amount in requests.items() if name != "cpu"}
    limits |= {name: amount for name, amount in requests.items() if _is_exclusive(name) and name not in limits}
    for quantities in (requests, limits):
        if "memory" in quantities and memory_factor > 1.0:
            quantities["memory"] = _grown(quantities["memory"], min(memory_factor, _MAX_MEMORY_FACTOR), max_memory)
    return {"requests": requests, "limits": limits}


def num_gpus(request: str, limit: str) -> int:
    """Return how many GPUs a container gets, of any vendor.

    Args:
        request: a resource string.
        limit: a resource string.

    Raises:
        FlagError: a string is wrong.
    """
    given = container_resources(request, limit)["limits"]
    return sum(int(amount) for name, amount in given.items() if name.endswith("/gpu"))


def has_several_mig_devices(request: str, limit: str) -> bool:
    """Return whether a container gets more than one part of a GPU (nvidia.com/mig-…): a process can use one alone."""
    given = container_resources(request, limit)["limits"]
    return sum(int(amount) for name, amount in given.items() if "/mig-" in name) > 1


def quantity(text: str) -> Fraction:
    """Return a Kubernetes quantity as a number: cores, bytes, pieces.

    Raises:
        ValueError: it is none.
    """
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text} is not a quantity")
    number, suffix, exponent = found.groups()
    return Fraction(Decimal(number)) * (_SCALES[suffix or ""] if not exponent else Fraction(10) ** int(exponent))


def exceeding(request: str, limit: str) -> str:
    """Return the first resource with a request above its limit; empty if there is none."""
    limits = parse_resources(limit)
    for name, amount in parse_resources(request).items():
        if name in limits and quantity(amount) > quantity(limits[name]):
            return name
    return ""


def _grown(memory: str, factor: float, max_memory: int | None) -> str:
    now = quantity(memory)
    wanted = now * Fraction(factor)
    if max_memory is not None:
        wanted = max(now, min(wanted, Fraction(max_memory)))
    mebibytes = wanted // _MEBIBYTE
    return f"{mebibytes}Mi" if mebibytes * _MEBIBYTE >= now else memory


def _resource_name(name: str) -> str:
    if name == "gpu":
        return "nvidia.com/gpu"
    if name == "disk":
        return "ephemeral-storage"
    if name in _ALLOWED or _HUGE_PAGES.fullmatch(name) or _DEVICE.fullmatch(name):
        return name
    if name.endswith("/gpu"):
        raise FlagError(f"gpu resource name does not have a valid vendor name: {name}", "For example amd.com/gpu=1.")
    raise FlagError(f"{name} is not in the allowed list of resource types: {_ALLOWED}", _HINT)


def _is_exclusive(name: str) -> bool:
    """Return whether the API requires the limit of a resource to equal its request."""
    return "/" in name or name.startswith("hugepages-")


def _check_quantity(name: str, key: str, value: str) -> None:
    if key == "cpu":
        if not _MILLI_CPU.fullmatch(value) and not (_CPU.fullmatch(value) and float(value) > 0):
            raise FlagError(f"invalid cpu request spec: {value}", "For example cpu=1, cpu=0.5 or cpu=500m.")
    elif key in ("memory", "ephemeral-storage") or _HUGE_PAGES.fullmatch(key):
        if not _MEMORY.fullmatch(value):
            raise FlagError(f"invalid {name} request spec: {value}", f"For example {name}=4096Mi; the unit is needed.")
    elif not re.fullmatch(r"[0-9]+", value):
        kind = "gpu" if name.endswith("gpu") else name
        raise FlagError(f"invalid {kind} request spec: {value}", f"A whole number, for example {name}=1.")


QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_QUEUE_GATES = ("kueue.x-k8s.io/admission", "kueue.x-k8s.io/topology")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_PART = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_SELECTOR_HINT = "For example disktype=ssd,topology.kubernetes.io/zone=eu-1; `kubectl get nodes --show-labels`."
_TOLERATIONS_HINT = (
    "As `kubectl taint` writes taints: key=value:Effect, key:Effect, key=value or key, with commas between; the effect "
    f"is one of {', '.join(_EFFECTS)}."
)


def parse_node_selector(text: str) -> dict[str, str]:
    """Return the labels of --node_selector; empty text is an empty dict.

    Raises:
        FlagError: one is no label.
    """
    found: dict[str, str] = {}
    for part in _parts(text):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not _is_key(key) or not _is_value(value):
            raise FlagError(f"'{part}' is not a label of nodes, key=value", _SELECTOR_HINT)
        if key in found:
            raise FlagError(f"names the label {key} twice", _SELECTOR_HINT)
        found[key] = value
    return found


def parse_tolerations(text: str) -> list[dict[str, str]]:
    """Return the tolerations of --tolerations as the API takes them; empty text is an empty list.

    Raises:
        FlagError: one does not name a taint.
    """
    found = []
    for part in _parts(text):
        taint, colon, effect = (piece.strip() for piece in part.partition(":"))
        key, equals, value = (piece.strip() for piece in taint.partition("="))
        if not _is_key(key) or not _is_value(value) or (colon and effect not in _EFFECTS):
            raise FlagError(f"'{part}' does not name a taint", _TOLERATIONS_HINT)
        toleration = {"key": key, **({"operator": "Equal", "value": value} if equals else {"operator": "Exists"})}
        found.append(toleration | ({"effect": effect} if effect else {}))
    return found


def check_name(text: str) -> str:
    """A check: the name of a scheduler or a queue, or nothing."""
    if not text or (len(text) <= 63 and _DOMAIN.fullmatch(text)):
        return ""
    return "is not a name: at most 63 lower-case letters, digits, dashes and dots"


def add_tolerations(pod_spec: dict[str, Any], tolerations: list[dict[str, Any]]) -> None:
    """Add tolerations; one for a taint that we tolerate for some seconds takes the place of ours."""
    if tolerations:
        keys = {toleration.get("key") for toleration in tolerations}
        kept = [toleration for toleration in pod_spec.get("tolerations", []) if toleration.get("key") not in keys]
        pod_spec["tolerations"] = kept + tolerations


def queue_of_gated(pod: Mapping[str, Any]) -> str:
    """Return the queue that has not admitted a pod yet; empty for any other pod.

    A client library that is older than the field shows no gates, only the reason of the condition.
    """
    gates, queue = _gates(pod), (pod["metadata"].get("labels") or {}).get(QUEUE_LABEL, "")
    conditions = (pod.get("status") or {}).get("conditions") or []
    is_gated = any(one["status"] == "False" and one.get("reason") == "SchedulingGated" for one in conditions)
    return queue if any(gate in _QUEUE_GATES for gate in gates) or (is_gated and not gates) else ""


def why_gated(pod: Mapping[str, Any]) -> str:
    """Return what holds a pod back from being scheduled; empty if nothing does."""
    if queue := queue_of_gated(pod):
        return f"waiting in queue {queue}"
    gates = _gates(pod)
    return f"waiting for its scheduling gates: {', '.join(gates)}" if gates else ""


def _gates(pod: Mapping[str, Any]) -> list[str]:
    return [str(gate["name"]) for gate in (pod.get("spec") or {}).get("schedulingGates") or []]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _is_key(text: str) -> bool:
    domain, slash, name = text.rpartition("/")
    return bool(_PART.fullmatch(name) and (not slash or _DOMAIN.fullmatch(domain)))


def _is_value(text: str) -> bool:
    return not text or _PART.fullmatch(text) is not None


_SOURCES = ("claim_name", "host_path", "nfs", "secret_name", "config_map_name", "empty_dir")
_OF_VOLUMES = [*_SOURCES, "type", "mount_path", "sub_path"]
_SIZE = re.compile(r"[1-9][0-9]*(E|P|T|G|M|k|Ei|Pi|Ti|Gi|Mi|Ki)")
_NFS = re.compile(r"[^:/]+:/.*")
_VOLUME_HINT = (
    "For example claim_name=my-claim,mount_path=/data,sub_path=a;host_path=/tmp,type=Directory,mount_path=/tmp; "
    "or nfs=server:/export, secret_name=s, config_map_name=c, empty_dir=10Gi (type=Memory) in place of claim_name."
)


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount; exactly one of its sources is set.

    Attributes:
        nfs: HOST:/PATH.
        empty_dir: its size.
        type: of a host path; Memory: of an empty directory in memory.
    """

    mount_path: str
    claim_name: str = ""
    host_path: str = ""
    nfs: str = ""
    secret_name: str = ""
    config_map_name: str = ""
    empty_dir: str = ""
    type: str = ""
    sub_path: str = ""

    @property
    def outlives_pods(self) -> bool:
        return bool(self.claim_name or self.host_path or self.nfs)

    @property
    def is_writable(self) -> bool:
        return not (self.secret_name or self.config_map_name)


def parse_volumes(text: str) -> list[Mount]:
    """Parse a volume string; return an empty list for an empty text.

    Raises:
        FlagError: with the messages of the original, or for an entry with no source or no mount path, or two entries
            with the same one.
    """
    mounts = [_parse_mount(entry) for entry in text.split(";") if entry.strip()]
    paths: set[PurePosixPath] = set()
    for mount in mounts:
        path = PurePosixPath(mount.mount_path)
        if not path.is_absolute() or ":" in mount.mount_path:
            raise FlagError(f"The mount_path {mount.mount_path} is not an absolute path in the pod", _VOLUME_HINT)
        if path in paths:
            raise FlagError(f"The mount_path {mount.mount_path} is given twice", _VOLUME_HINT)
        if path == PurePosixPath(names.TOKEN_DIRECTORY):
            raise FlagError(f"The mount_path {mount.mount_path} is where the job's token is", _VOLUME_HINT)
        paths.add(path)
    return mounts


def pod_volumes(role: str, mounts: list[Mount]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes and the mounts of a pod of that role; claims come before others.

    A source mounted more than once is one volume, but for empty directories.
    """
    ordered = sorted(mounts, key=lambda mount: not mount.claim_name)
    volumes: dict[Mount, dict[str, Any]] = {}
    mounted = []
    for mount in ordered:
        source = mount if mount.empty_dir else replace(mount, mount_path="", sub_path="")
        if source not in volumes:
            volumes[source] = {"name": f"{role}-volume-{len(volumes)}", **_source(mount)}
        entry = {"name": volumes[source]["name"], "mountPath": mount.mount_path}
        mounted.append(entry | ({"subPath": mount.sub_path} if mount.sub_path else {}))
    return list(volumes.values()), mounted


def mount_of(path: str, mounts: list[Mount]) -> Mount | None:
    """Return the innermost mount that contains a path of a pod; None if there is none."""
    found = [mount for mount in mounts if PurePosixPath(path).is_relative_to(mount.mount_path)]
    return max(found, key=lambda mount: len(mount.mount_path), default=None)


def _source(mount: Mount) -> dict[str, Any]:
    if mount.claim_name:
        return {"persistentVolumeClaim": {"claimName": mount.claim_name}}
    if mount.nfs:
        server, _, path = mount.nfs.partition(":")
        return {"nfs": {"server": server, "path": path}}
    if mount.secret_name:
        return {"secret": {"secretName": mount.secret_name}}
    if mount.config_map_name:
        return {"configMap": {"name": mount.config_map_name}}
    if mount.empty_dir:
        return {"emptyDir": {"sizeLimit": mount.empty_dir, **({"medium": mount.type} if mount.type else {})}}
    return {"hostPath": {"path": mount.host_path, **({"type": mount.type} if mount.type else {})}}


def _parse_mount(entry: str) -> Mount:
    found: dict[str, str] = {}
    for part in entry.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in _OF_VOLUMES:
            raise FlagError(f"{key} is not in the allowed list of volume keys: {_OF_VOLUMES}", _VOLUME_HINT)
        if key in found:
            raise FlagError(f"The volume string contains duplicate volume key: {key}", _VOLUME_HINT)
        if not equals or not value:
            raise FlagError(f"The volume key {key} has no value", _VOLUME_HINT)
        found[key] = value
    sources = [key for key in found if key in _SOURCES]
    if len(sources) != 1:
        raise FlagError(
            f"The volume '{entry.strip()}' needs either claim_name or host_path, or another source", _VOLUME_HINT
        )
    if "mount_path" not in found:
        raise FlagError(f"The volume '{entry.strip()}' has no mount_path", _VOLUME_HINT)
    is_in_memory = "empty_dir" in found and found.get("type") == "Memory"
    if "type" in found and "host_path" not in found and not is_in_memory:
        raise FlagError(f"The volume '{entry.strip()}' has a type, which belongs to host_path", _VOLUME_HINT)
    if "empty_dir" in found and not _SIZE.fullmatch(found["empty_dir"]):
        raise FlagError(f"The volume '{entry.strip()}' has no size: empty_dir={found['empty_dir']}", _VOLUME_HINT)
    if "nfs" in found and not _NFS.fullmatch(found["nfs"]):
        raise FlagError(f"The volume '{entry.strip()}' is not of the form nfs=HOST:/PATH", _VOLUME_HINT)
    return Mount(**found)
