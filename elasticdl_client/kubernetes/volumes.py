"""Volume strings, ``claim_name=c,mount_path=/data;host_path=/tmp,mount_path=/tmp``, parsed and checked."""

from __future__ import annotations

from dataclasses import dataclass

from elasticdl_client.errors import FlagError

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
        FlagError: with the messages of the original, or for an entry with no source or no mount path.
    """
    return [_parse_mount(entry) for entry in text.split(";") if entry.strip()]


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


def check_volumes(text: str) -> str:
    """The check of the volume flag: what is wrong with it, or nothing."""
    try:
        parse_volumes(text)
    except FlagError as error:
        return error.what
    return ""
