"""`python -m elasticdl.rpc.log_file FILE COMMAND…`: runs a pod's command and also copies its output to a file.

It is the pod's first process, and the command is its child: signals are forwarded to it, and its exit code is returned.
The pod's own log has priority: a file that cannot be opened or written costs one line there, and nothing else.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import FrameType

_BLOCK_BYTES = 1 << 16
_LOOK_S = 0.5  # wait for each further line of the command's children after its end
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class LogFile:
    """The copy of the output in a file.  Its methods never raise."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._is_failing = False

    def write(self, block: bytes) -> str:
        """Append a block; return a message for the log, once per outage, else ""."""
        try:
            if self._fd is None:
                self._fd = self._opened()
            rest = memoryview(block)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            is_known, self._is_failing = self._is_failing, True
            return "" if is_known else f"--log_file_path: {self._path} lacks what follows: {error.strerror}\n"
        self._is_failing = False
        return ""

    def _opened(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if os.fstat(fd).st_size:
            os.write(fd, f"---- started again {datetime.now().isoformat(' ', 'seconds')} ----\n".encode())
        return fd


def run(path: Path, command: list[str]) -> int:
    """Run the command; return its exit code, or 128 + signal number if a signal has ended it."""
    printed, end = os.pipe()
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that came before the child was started

    def forward(number: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    try:
        child = subprocess.Popen(command, stdout=end, stderr=end)
    except OSError as error:
        _print(f"cannot execute {command[0]}: {error.strerror}\n".encode())
        return 127
    os.close(end)
    for waiting in early:
        child.send_signal(waiting)
    _copy(printed, LogFile(path), child)
    code = child.wait()
    return code if code >= 0 else 128 - code


def _copy(printed: int, file: LogFile, child: subprocess.Popen[bytes]) -> None:
    """Copy until the output or the command ends: a grandchild may keep the pipe open forever."""
    while True:
        has_ended = child.poll() is not None
        readable, _, _ = select.select([printed], [], [], _LOOK_S)
        if not readable:
            if has_ended:
                return
            continue
        block = os.read(printed, _BLOCK_BYTES)
        if not block:
            return
        whole = block.rfind(b"\n") + 1
        complaint = file.write(block)
        _print(block[:whole] + complaint.encode() + block[whole:])


def _print(block: bytes) -> None:
    """Print to the pod's log; if its reader is gone, only the file gets the output."""
    rest = memoryview(block)
    try:
        while rest:
            rest = rest[os.write(sys.stdout.fileno(), rest) :]
    except BrokenPipeError:
        return


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
