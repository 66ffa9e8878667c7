"""`DeviceMeter`: the device that a model is on, and how much of its memory the process takes; imports no framework.

The part of each framework makes one: torch/devices.py, keras/devices.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elasticdl.protocol.values import Device

_INTERVAL_S = 1.0  # that of heartbeats


def cpu_text(num_threads: int) -> str:
    """Return how the log names a CPU and the threads of one operation."""
    return f"the CPU ({num_threads} thread{'' if num_threads == 1 else 's'})"


class DeviceMeter:
    """Reads the device in the thread that computes; every other thread gets the last reading.

    The numbers are behind the lock of the framework's allocator, and reading them keeps the interpreter's.  A thread
    that waits for the device holds the first and may need the second to end: a heartbeat that reads would block both.

    Attributes:
        text: the device and its settings, for people.
    """

    def __init__(
        self, text: str, read: Callable[[], Device | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            text: the device and its settings, for people.
            read: the device as it is now; None: it is no accelerator, and `read` is not called again.
            clock: seconds.
        """
        self.text = text
        self._read = read
        self._clock = clock
        self._read_at = clock()
        self._last = read()

    def sample(self) -> None:
        """Read the device if the last reading is older than a heartbeat; between steps, in the thread that computes."""
        if self._last is not None and self._clock() - self._read_at >= _INTERVAL_S:
            self._read_at = self._clock()
            self._last = self._read()

    def last(self) -> Device | None:
        """Return the last reading; None: the model is on no accelerator.  From any thread."""
        return self._last
