"""Files without a name in memory (memfd): they need no room in /dev/shm, and are gone with their last holder."""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_MFD_CLOEXEC = 1  # linux/memfd.h


def create_memory_file(name: str) -> int:
    """Return the descriptor of a new, empty file, which no other program inherits.

    Args:
        name: for people; in /proc/PID/fd.

    Raises:
        OSError: there is no memory, or there are too many open files.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    # A Python that is built for a glibc before 2.27, as Conda's and uv's are, has not the function; libc has.
    descriptor = int(_LIBC.memfd_create(name.encode(), _MFD_CLOEXEC))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor
