"""Keeps glibc from giving large message buffers back to the kernel after every call (page faults dominate then)."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3


def keep_large_buffers() -> None:
    """Tunes malloc of this process; call once at start.  Does nothing on a C library without `mallopt`."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    mallopt(_M_TOP_PAD, 64 << 20)
