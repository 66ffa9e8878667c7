"""Volume strings, ``claim_name=c,mount_path=/data;host_path=/tmp,mount_path=/tmp``, to volumes and mounts of a pod."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from elasticdl_client.errors import FlagError
from elasticdl_client.kubernetes import names

_ALLOWED = ["claim_name", "host_path", "type", "mount_path", "sub_path"]
_HINT = "For example claim_name=my-claim,mount_path=/data,sub_path=a;host_path=/tmp,type=Directory,mount_path=/tmp."


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount; of `claim_name` and `host_path` exactly one is set."""

    mount_path: str
    claim_name: str = ""
    host_path: str = ""
    type: str = ""
    sub_path: str = ""


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
    """The volumes and the mounts of a pod of that role; claims come before host paths.

    A claim or host path that is mounted more than once is one volume.
    """
    ordered = sorted(mounts, key=lambda mount: not mount.claim_name)
    volumes: dict[tuple[str, str, str], dict[str, Any]] = {}
    mounted = []
    for mount in ordered:
        source = (mount.claim_name, mount.host_path, mount.type)
        if source not in volumes:
            volumes[source] = {"name": f"{role}-volume-{len(volumes)}", **_source(mount)}
        entry = {"name": volumes[source]["name"], "mountPath": mount.mount_path}
        mounted.append(entry | ({"subPath": mount.sub_path} if mount.sub_path else {}))
    return list(volumes.values()), mounted


def is_mounted(path: str, mounts: list[Mount]) -> bool:
    """Whether a path of a pod is on one of the mounts."""
    return any(PurePosixPath(path).is_relative_to(mount.mount_path) for mount in mounts)


def _source(mount: Mount) -> dict[str, Any]:
    if mount.claim_name:
        return {"persistentVolumeClaim": {"claimName": mount.claim_name}}
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
    if ("claim_name" in found) == ("host_path" in found):
        raise FlagError(f"The volume '{entry.strip()}' needs either claim_name or host_path", _HINT)
    if "mount_path" not in found:
        raise FlagError(f"The volume '{entry.strip()}' has no mount_path", _HINT)
    if "type" in found and "host_path" not in found:
        raise FlagError(f"The volume '{entry.strip()}' has a type, which belongs to host_path", _HINT)
    return Mount(**found)
