"""Files on a volume that does not answer, as a network file system without its server, until it is back."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_DETACH = 2  # MNT_DETACH


@contextmanager
def lost(file: Path) -> Iterator[Callable[[], None]]:
    """Every read of a file fails with EIO until the function that this gives is called."""
    own = file.with_name("own")
    file.rename(own)
    file.symlink_to("/proc/self/mem")  # nothing is mapped at its beginning
    with pytest.raises(OSError, match="Input/output error"):
        file.read_bytes()
    yield lambda: os.replace(own, file)


@contextmanager
def lost_until_asked_again(file: Path) -> Iterator[None]:
    """The same, until the log says that it is asked for again."""
    log = logging.getLogger("elasticdl.storage")
    with lost(file) as is_back:

        class Mended(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                assert "Input/output error" in record.getMessage()
                is_back()

        handler = Mended()
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)


@contextmanager
def not_connected(directory: Path) -> Iterator[None]:
    """Every access to a directory fails with ENOTCONN: the process that served its mount is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("this machine has no FUSE")
    options = f"fd={server},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    is_mounted = libc.mount(b"lost", os.fsencode(directory), b"fuse", 0, options.encode()) == 0
    os.close(server)
    if not is_mounted:
        pytest.skip("only root can mount a file system")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(directory), _DETACH)
