"""A file system of a few KiB, for tests of full disks; skipped where it cannot be mounted."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

BREAKS = pytest.mark.parametrize(
    ("broken", "mended", "message"),
    [("size=64k", "size=64m", "No space left on device"), ("ro", "rw,size=64m", "Read-only file system")],
    ids=["full", "read-only"],
)  # how such a file system is mounted anew, and its state in between


@contextlib.contextmanager
def small_disk(path: Path, size_kib: int) -> Iterator[Path]:
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "none", str(path)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
