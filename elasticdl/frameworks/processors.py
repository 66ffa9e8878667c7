"""How many processors this process may use: by its container's limit, not by the size of the machine."""

from __future__ import annotations

import math
import os
from pathlib import Path

from elasticdl_client.choices import NUM_PROCESSES_VARIABLE


def num_processors(root: Path = Path("/")) -> int:
    """Processors that this process may use, at least 1: by its affinity and the limits of its control groups.

    The processes of a worker that has several share them out.

    Args:
        root: where `proc` and `sys` are.
    """
    of_pod = min(len(os.sched_getaffinity(0)), *(math.ceil(limit) for limit in _limits(root)))
    return max(1, of_pod // int(os.environ.get(NUM_PROCESSES_VARIABLE, "1")))


def _limits(root: Path) -> list[float]:
    found = [float("1e6")]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            found += [_of_v2(directory) for directory in _above(root / "sys/fs/cgroup", group)]
        elif "cpu" in controllers.split(","):
            found += [_of_v1(directory) for directory in _above(root / "sys/fs/cgroup/cpu", group)]
    return [limit for limit in found if limit > 0]


def _above(mount: Path, group: str) -> list[Path]:
    """A group's directory and those above it; where its own cannot be seen, the mounted one."""
    inner = mount / group.lstrip("/")
    return [directory for directory in (inner, *inner.parents) if directory == mount or mount in directory.parents]


def _of_v2(directory: Path) -> float:
    quota, _, period = _read(directory / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else 0.0


def _of_v1(directory: Path) -> float:
    quota, period = (_read(directory / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else 0.0


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
