"""Locks of actions that parallel tests must not do at once: each has a name, and ends with its process."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from tests.e2e_kubernetes.image import BUILD


@contextlib.contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Waits until no other test has it."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / f"{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
