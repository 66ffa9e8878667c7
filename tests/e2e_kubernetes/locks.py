"""Locks between tests that run at the same time: each has a name, and ends with its process."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from typing import IO

from tests.e2e_kubernetes.image import BUILD


@contextlib.contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Waits until no other test has it."""
    with _file(what) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def together(what: str, end: Callable[[], None]) -> Iterator[None]:
    """Waits until no test has it by `one_at_a_time`; others may have it by this at the same time.

    Args:
        what: the lock.
        end: called by the last of those, with the lock for itself.
    """
    with _file(what) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            yield
        finally:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                end()


def _file(what: str) -> IO[str]:
    BUILD.mkdir(parents=True, exist_ok=True)
    return (BUILD / f"{what}.lock").open("w")
