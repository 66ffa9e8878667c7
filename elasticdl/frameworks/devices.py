"""`DeviceMeter`: the device of a model and the memory that this process uses on it; imports no framework.

Each framework makes its own: torch/computation.py, keras/computation.py.

`num_processors`: the CPUs that this process may use, by its container's limit, not by the size of the machine.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from elasticdl.protocol import Device
from elasticdl_client.choices import NUM_PROCESSES_VARIABLE

_INTERVAL_S = 1.0  # same as between heartbeats


def cpu_text(num_threads: int) -> str:
    """Return the description of a CPU for the log, with the threads per operation."""
    return f"the CPU ({num_threads} thread{'' if num_threads == 1 else 's'})"


class DeviceMeter:
    """Reads the device in the compute thread; all other threads get the last reading.

    Reading takes the lock of the framework's allocator while holding the interpreter's lock (GIL).  A thread that waits
    for the device holds the allocator's lock and may need the GIL to finish: a heartbeat that reads would deadlock with
    it.

    Attributes:
        text: The device and its settings, for people.
    """

    def __init__(
        self, text: str, read: Callable[[], Device | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            text: The device and its settings, for people.
            read: Returns the current reading; None: it is not an accelerator, and `read` is not called again.
            clock: Returns a time in seconds.
        """
        self.text = text
        self._read = read
        self._clock = clock
        self._read_at = clock()
        self._last = read()

    def sample(self) -> None:
        """Read the device if the last reading is older than a heartbeat; call it in the compute thread."""
        if self._last is not None and self._clock() - self._read_at >= _INTERVAL_S:
            self._read_at = self._clock()
            self._last = self._read()

    def last(self) -> Device | None:
        """Return the last reading; None: the model is not on an accelerator.  Thread-safe."""
        return self._last


def num_processors(root: Path = Path("/")) -> int:
    """Return the CPUs that this process may use, at least 1: by its affinity and the limits of its control groups.

    The processes of one worker divide them among themselves.

    Args:
        root: The directory that contains `proc` and `sys`.
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
    """Return a group's directory and its parents; only the mounted one if its own is not visible."""
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
