"""Volume strings, ``claim_name=c,mount_path=/data;host_path=/tmp,mount_path=/tmp``, to volumes and mounts of a pod."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from elasticdl_client.errors import FlagError
from elasticdl_client.kubernetes import names

_SOURCES = ("claim_name", "host_path", "nfs", "secret_name", "config_map_name", "empty_dir")
_ALLOWED = [*_SOURCES, "type", "mount_path", "sub_path"]
_SIZE = re.compile(r"[1-9][0-9]*(E|P|T|G|M|k|Ei|Pi|Ti|Gi|Mi|Ki)")
_NFS = re.compile(r"[^:/]+:/.*")
_HINT = (
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
    """A volume string; empty text is an empty list.

    Raises:
        FlagError: with the messages of the original, or for an entry with no source or no mount path, or two entries
            with the same one.
    """
    mounts = [_parse_mount(entry) for entry in text.split(";") if entry.strip()]
    paths: set[PurePosixPath] = set()
    for mount in mounts:
        path = PurePosixPath(mount.mount_path)
        if not path.is_absolute() or ":" in mount.mount_path:
            raise FlagError(f"The mount_path {mount.mount_path} is not an absolute path in the pod", _HINT)
        if path in paths:
            raise FlagError(f"The mount_path {mount.mount_path} is given twice", _HINT)
        if path == PurePosixPath(names.TOKEN_DIRECTORY):
            raise FlagError(f"The mount_path {mount.mount_path} is where the job's token is", _HINT)
        paths.add(path)
    return mounts


def pod_volumes(role: str, mounts: list[Mount]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The volumes and the mounts of a pod of that role; claims come before others.

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
    """The mount that a path of a pod is on, the innermost; None if it is on none."""
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
        if key not in _ALLOWED:
            raise FlagError(f"{key} is not in the allowed list of volume keys: {_ALLOWED}", _HINT)
        if key in found:
            raise FlagError(f"The volume string contains duplicate volume key: {key}", _HINT)
        if not equals or not value:
            raise FlagError(f"The volume key {key} has no value", _HINT)
        found[key] = value
    sources = [key for key in found if key in _SOURCES]
    if len(sources) != 1:
        raise FlagError(f"The volume '{entry.strip()}' needs either claim_name or host_path, or another source", _HINT)
    if "mount_path" not in found:
        raise FlagError(f"The volume '{entry.strip()}' has no mount_path", _HINT)
    is_in_memory = "empty_dir" in found and found.get("type") == "Memory"
    if "type" in found and "host_path" not in found and not is_in_memory:
        raise FlagError(f"The volume '{entry.strip()}' has a type, which belongs to host_path", _HINT)
    if "empty_dir" in found and not _SIZE.fullmatch(found["empty_dir"]):
        raise FlagError(f"The volume '{entry.strip()}' has no size: empty_dir={found['empty_dir']}", _HINT)
    if "nfs" in found and not _NFS.fullmatch(found["nfs"]):
        raise FlagError(f"The volume '{entry.strip()}' is not of the form nfs=HOST:/PATH", _HINT)
    return Mount(**found)
