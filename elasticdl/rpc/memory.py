"""The memory of this process: what it takes, what it may still take, and what becomes of large freed buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_UNBOUNDED = 1 << 60
_V1 = "sys/fs/cgroup/memory"
_IDLE = ("inactive_file",)  # not used lately: the kernel drops them before it refuses memory
_FILES = ("inactive_file", "active_file")  # what it drops before it kills


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
    return max(0, min(_of_machine(root), *(limit - used for limit, used in _of_groups(root, _IDLE))))


def used_share(root: Path = Path("/")) -> float:
    """How much of the memory that our control groups allow is used, file pages aside; 0 without a limit.

    Args:
        root: where `proc` and `sys` are.
    """
    return max(0.0, *(used / limit for limit, used in _of_groups(root, _FILES) if limit))


def _of_machine(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return _UNBOUNDED


def _of_groups(root: Path, reclaimable: Sequence[str]) -> list[tuple[int, int]]:
    """Limit and use of each, without the pages that can be reclaimed."""
    found = [(_UNBOUNDED, 0)]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            found += _under(root / "sys/fs/cgroup", group, ("memory.max", "memory.current"), reclaimable)
        elif "memory" in controllers.split(","):
            found += _under(root / _V1, group, ("memory.limit_in_bytes", "memory.usage_in_bytes"), reclaimable)
    return found


def _under(
    mount: Path, group: str, limit_and_usage: tuple[str, str], reclaimable: Sequence[str]
) -> list[tuple[int, int]]:
    """Of a group and of all above it; where the group's own directory cannot be seen, of the mounted one."""
    inner = mount / group.lstrip("/")
    return [
        _use(directory, limit_and_usage, reclaimable)
        for directory in (inner, *inner.parents)
        if directory == mount or mount in directory.parents
    ]


def _use(directory: Path, limit_and_usage: tuple[str, str], reclaimable: Sequence[str]) -> tuple[int, int]:
    limit, used = (_read(directory / name).strip() for name in limit_and_usage)
    if not limit.isdigit() or not used.isdigit():
        return _UNBOUNDED, 0
    lines = (line.partition(" ") for line in _read(directory / "memory.stat").splitlines())
    sizes = {name: int(size) for name, _, size in lines}
    pages = sum(sizes.get(f"total_{name}", sizes.get(name, 0)) for name in reclaimable)
    return int(limit), max(0, int(used) - pages)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
