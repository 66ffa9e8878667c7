"""How a script of a user's waits for its test, where both share a directory of notes: for a pipe or a lock."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def hold(notes: Path) -> None:
    """Says that it is `held`, and stays so until the test writes to the pipe `go`."""
    os.mkfifo(notes / "go")
    (notes / "held").touch()
    (notes / "go").read_text()


def wait_to_begin(notes: Path, worker: str) -> None:
    """Returns at once unless the test keeps this worker from beginning."""
    with (notes / f"begin-{worker}").open("a") as own:
        fcntl.flock(own, fcntl.LOCK_SH)


@contextmanager
def kept_from_beginning(notes: Path, worker: str) -> Iterator[None]:
    """For the test: a worker waits in its first line until this ends."""
    with (notes / f"begin-{worker}").open("a") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        yield
