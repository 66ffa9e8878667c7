"""The processes that hold a local job's directory: its client and its agent, known by the lock file they have open.

A job runs as long as there are any.  Reads /proc and signals; where there is no /proc there are no local jobs.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

_PROC = Path("/proc")


def holders(job_dir: Path) -> list[int]:
    """The processes of this user that have the directory's lock open."""
    try:
        lock = os.stat(job_dir / "lock")
    except OSError:
        return []
    found = []
    for process in _PROC.iterdir() if _PROC.is_dir() else ():
        if process.name.isdecimal() and int(process.name) != os.getpid() and _has_open(process, lock):
            found.append(int(process.name))
    return sorted(found)


def _has_open(process: Path, lock: os.stat_result) -> bool:
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:  # it has ended, or is another user's
        return False
    for descriptor in descriptors:
        with suppress(OSError):
            if os.readlink(descriptor).endswith("/lock") and os.path.samestat(os.stat(descriptor), lock):
                return True
    return False


def first_of(processes: Iterable[int]) -> list[int]:
    """Those that no other of them has started: the client, or the agent where the client is gone."""
    found = set(processes)
    return sorted(process for process in found if _parent(process) not in found)


def _parent(process: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int((_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


def send(process: int, number: signal.Signals) -> None:
    """Signals a process that may have ended; a stopped one is woken to see it."""
    with suppress(ProcessLookupError):
        os.kill(process, number)
        os.kill(process, signal.SIGCONT)


def wait_for_end(processes: Iterable[int], timeout_s: float) -> bool:
    """Whether all of these have ended in time."""
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        open_fds = []
        for process in processes:
            with suppress(ProcessLookupError):
                fd = os.pidfd_open(process)
                stack.callback(os.close, fd)
                open_fds.append(fd)
        while open_fds:
            ended, _, _ = select.select(open_fds, [], [], max(0.0, deadline - time.monotonic()))
            if not ended:
                return False
            open_fds = [fd for fd in open_fds if fd not in ended]
    return True
