"""How a script of a user's waits for its test, where both share a directory of notes: for a pipe or a lock."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def hold(notes: Path) -> None:
    """Says that it is `held`, and stays so until the test writes to the pipe `go`."""
    os.mkfifo(notes / "go")
    (notes / "held").touch()
    (notes / "go").read_text()


def hold_lock(notes: Path, name: str) -> TextIO:
    """Take a lock, which is free again when the file is closed or this process has ended."""
    file = (notes / name).open("a")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def await_lock(notes: Path, name: str) -> None:
    """Return once no process holds a lock."""
    with (notes / name).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def wait_to_begin(notes: Path, worker: str) -> None:
    """Returns at once unless the test keeps this worker from beginning."""
    await_lock(notes, f"begin-{worker}")


@contextmanager
def kept_from_beginning(notes: Path, worker: str) -> Iterator[None]:
    """For the test: a worker waits in its first line until this ends."""
    with hold_lock(notes, f"begin-{worker}"):
        yield
