"""The memory of this process: its use, its limit, and the handling of large freed buffers.

`control_groups` finds those that limit this process, also in processor time (cpu_use.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_UNBOUNDED = 1 << 60
_FILE_NAMES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # version 2, 1
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
    return [(_UNBOUNDED, 0), *(_use(directory, reclaimable) for directory in control_groups(root, "memory"))]


def control_groups(root: Path, controller: str) -> list[Path]:
    """Return the directories of our control groups that a controller may limit, of version 1 and 2.

    Ours and all above it; where the group's own directory cannot be seen, the mounted one.

    Args:
        root: where `proc` and `sys` are.
        controller: memory, cpu, ….
    """
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = mount / group.lstrip("/")
        found += [path for path in (inner, *inner.parents) if path == mount or mount in path.parents]
    return found


def _use(directory: Path, reclaimable: Sequence[str]) -> tuple[int, int]:
    limit, used = next(
        (values for names in _FILE_NAMES if (values := [_read(directory / name).strip() for name in names])[0]),
        ("", ""),
    )
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
