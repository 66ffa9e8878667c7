"""Signals as the kernel may deliver them."""

from __future__ import annotations

import ctypes
from pathlib import Path


def signal_other_thread(pid: int, number: int) -> None:
    """Sends a process a signal that a thread other than its main thread gets."""
    thread = max(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir())
    assert thread != pid, "it has one thread"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.tgkill(pid, thread, int(number)):
        raise OSError(ctypes.get_errno(), "tgkill")
