"""A control group with a CPU limit, on machines that let their tests make one (root; version 1 or 2)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MOUNT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000


@contextmanager
def cpu_quota(cores: float) -> Iterator[Path]:
    """The file to write process ids to; at the end its processes are in the group above."""
    parent = _MOUNT / "cpu" if (_MOUNT / "cpu").is_dir() else _MOUNT
    group = parent / f"elasticdl-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        _limit(group, round(cores * _PERIOD_US))
        yield group / "cgroup.procs"
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def _limit(group: Path, quota_us: int) -> None:
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    elif (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    else:
        pytest.skip("no control group can be made here: the cpu controller is not delegated")
