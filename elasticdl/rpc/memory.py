"""The memory of this process: how much it may still take, and what becomes of large buffers that it has freed."""

from __future__ import annotations

import ctypes
from pathlib import Path

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_UNBOUNDED = 1 << 60
_V1 = "sys/fs/cgroup/memory"


def keep_large_buffers() -> None:
    """Keeps glibc from giving large message buffers back to the kernel after every call: page faults dominate then.

    Call it once at start.  It does nothing on a C library without `mallopt`.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    mallopt(_M_TOP_PAD, 64 << 20)


def available_bytes(root: Path = Path("/")) -> int:
    """The least of what the machine has left and of what is left under each limit of our control groups.

    Args:
        root: where `proc` and `sys` are.
    """
    return max(0, min(_of_machine(root), *_of_groups(root)))


def _of_machine(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return _UNBOUNDED


def _of_groups(root: Path) -> list[int]:
    left = [_UNBOUNDED]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            left += _under(root / "sys/fs/cgroup", group, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            left += _under(root / _V1, group, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return left


def _under(mount: Path, group: str, limit: str, usage: str) -> list[int]:
    """Of a group and of all above it; where the group's own directory cannot be seen, of the mounted one."""
    inner = mount / group.lstrip("/")
    return [
        _left(directory, limit, usage)
        for directory in (inner, *inner.parents)
        if directory == mount or mount in directory.parents
    ]


def _left(directory: Path, limit: str, usage: str) -> int:
    bound, used = _read(directory / limit).strip(), _read(directory / usage).strip()
    if not bound.isdigit() or not used.isdigit():
        return _UNBOUNDED
    return int(bound) - int(used) + _reclaimable(directory)


def _reclaimable(directory: Path) -> int:
    """File pages not used lately: the kernel drops them before it refuses memory."""
    for line in _read(directory / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
