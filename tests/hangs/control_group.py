"""Control groups with a limit, on machines that let their tests make one (root; version 1 or 2)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

_MOUNT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000


@contextmanager
def cpu_quota(cores: float) -> Iterator[Path]:
    """The file to write process ids to; at the end its processes are in the group above."""
    quota_us = round(cores * _PERIOD_US)
    one = {"cpu.cfs_period_us": f"{_PERIOD_US}", "cpu.cfs_quota_us": f"{quota_us}"}
    with _group("cpu", one, {"cpu.max": f"{quota_us} {_PERIOD_US}"}) as procs:
        yield procs


@contextmanager
def memory_limit(size_bytes: int) -> Iterator[Path]:
    """As `cpu_quota`; the kernel kills a process that needs more memory."""
    one = {"memory.limit_in_bytes": f"{size_bytes}"}
    with _group("memory", one, {"memory.max": f"{size_bytes}", "memory.swap.max": "0"}) as procs:
        yield procs


@contextmanager
def _group(controller: str, version_1: Mapping[str, str], version_2: Mapping[str, str]) -> Iterator[Path]:
    is_1 = (_MOUNT / controller).is_dir()
    parent = _MOUNT / controller if is_1 else _MOUNT
    group = parent / f"elasticdl-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        for name, value in (version_1 if is_1 else version_2).items():
            if not (group / name).exists():
                pytest.skip(f"no control group can be made here: the {controller} controller is not delegated")
            (group / name).write_text(value)
        yield group / "cgroup.procs"
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (parent / "cgroup.procs").write_text(pid)
        group.rmdir()
