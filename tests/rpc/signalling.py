"""Signals as the kernel may deliver them."""

from __future__ import annotations

import ctypes
from pathlib import Path


def signal_other_thread(pid: int, number: int) -> None:
    """Sends a process a signal that its second oldest thread gets: younger ones may be about to end."""
    thread = sorted(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir())[1]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.tgkill(pid, thread, int(number)):
        raise OSError(ctypes.get_errno(), "tgkill")
