"""The memory of this process: its use, its limit, and the handling of large freed buffers.

`control_groups` finds the control groups that limit this process, also its processor time.  `cpu_use` reads the
kernel's counters of processor time; called with each heartbeat (0.1 ms).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from elasticdl.rpc import elasticdl_pb2 as pb

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_UNBOUNDED = 1 << 60
_FILE_NAMES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # version 2, 1
_IDLE = ("inactive_file",)  # not used recently: the kernel drops these pages before it refuses memory
_FILES = ("inactive_file", "active_file")  # the kernel drops these pages before it kills


def keep_large_buffers() -> None:
    """Keep glibc from returning large message buffers to the kernel after every call, where page faults would dominate.

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
    """Return the free memory: the minimum over the machine and the limits of this process's control groups.

    Args:
        root: The directory with `proc` and `sys`.
    """
    return max(0, min(_of_machine(root), *(limit - used for limit, used in _of_groups(root, _IDLE))))


def used_share(root: Path = Path("/")) -> float:
    """Return the used fraction of this process's memory limit, without file pages; 0 without a limit.

    Args:
        root: The directory with `proc` and `sys`.
    """
    return max(0.0, *(used / limit for limit, used in _of_groups(root, _FILES) if limit))


def _of_machine(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return _UNBOUNDED


def _of_groups(root: Path, reclaimable: Sequence[str]) -> list[tuple[int, int]]:
    """Return limit and use of each control group, without reclaimable pages."""
    return [(_UNBOUNDED, 0), *(_use(directory, reclaimable) for directory in control_groups(root, "memory"))]


def control_groups(root: Path, controller: str) -> list[Path]:
    """Return the directories of this process's control groups for a controller, of version 1 and 2.

    They are its own group and all parents; if its own directory is not visible, the mounted one.

    Args:
        root: The directory with `proc` and `sys`.
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


_TICKS = os.sysconf("SC_CLK_TCK")
_STEAL = 8  # field of a line of /proc/stat, from 0; see proc(5)
_UNITS = {"throttled_usec": 1e-6, "throttled_time": 1e-9}  # of control groups of version 2 and 1


def cpu_use(root: Path = Path("/")) -> pb.CpuUse:
    """Return the kernel's counters of processor time; 0 where it has none.

    Args:
        root: The directory with `proc` and `sys`.
    """
    cores = os.cpu_count() or 1
    return pb.CpuUse(
        throttled_seconds=max((_throttled(group / "cpu.stat") for group in control_groups(root, "cpu")), default=0.0),
        steal_seconds=_steal(root / "proc/stat") / cores,
        load=float((_read(root / "proc/loadavg").split() or ["0"])[0]),
        cores=cores,
    )


def _throttled(file: Path) -> float:
    for line in _read(file).splitlines():
        name, _, value = line.partition(" ")
        if name in _UNITS:
            return int(value) * _UNITS[name]
    return 0.0


def _steal(file: Path) -> float:
    fields = _read(file).partition("\n")[0].split()
    return int(fields[_STEAL]) / _TICKS if len(fields) > _STEAL else 0.0
