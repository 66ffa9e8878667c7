"""A process whose main thread stands still in the kernel while its other threads run, as a broken device leaves it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_FREEZE = """
import ctypes, os, sys
SEIZE, INTERRUPT, WALL = 0x4206, 0x4207, 0x40000000
ptrace, pid = ctypes.CDLL(None).ptrace, int(sys.argv[1])
ptrace.argtypes, ptrace.restype = [ctypes.c_long] * 4, ctypes.c_long
print(int(ptrace(SEIZE, pid, 0, 0) == 0 and ptrace(INTERRUPT, pid, 0, 0) == 0), flush=True)
status = 0
while not os.WIFEXITED(status) and not os.WIFSIGNALED(status) or status == 0:
    _, status = os.waitpid(pid, WALL)  # else its parent is not notified of its end
"""


@contextmanager
def frozen_main_thread(pid: int) -> Iterator[None]:
    """Until the process is killed, or at the end."""
    command = [sys.executable, "-c", _FREEZE, str(pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdout is not None
        try:
            if tracer.stdout.readline().strip() != "1":
                pytest.skip("no process can be traced here")
            yield
        finally:
            tracer.kill()
