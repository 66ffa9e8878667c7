"""Anonymous files in memory (memfd): they use no space in /dev/shm, and the last process to close one frees it."""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_MFD_CLOEXEC = 1  # linux/memfd.h


def create_memory_file(name: str) -> int:
    """Return the descriptor of a new, empty file; programs started by this process do not inherit it.

    Args:
        name: Shown in /proc/PID/fd, for people.

    Raises:
        OSError: There is no memory left, or too many files are open.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    # A Python built for a glibc before 2.27 (Conda's, uv's) lacks os.memfd_create; libc has the function.
    descriptor = int(_LIBC.memfd_create(name.encode(), _MFD_CLOEXEC))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor
