"""Lines of a process that `communicate` is called for later: its file object would keep what it reads beyond a line."""

from __future__ import annotations

import os
import subprocess
from typing import IO, Any


def next_line(process: subprocess.Popen[Any]) -> str:
    """The next line of the standard output with its end; less at the end of the output."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(_output(process).fileno(), 1)):
        line += byte
    return line.decode()


def line_with(process: subprocess.Popen[Any], text: str) -> str:
    """The first line that has a text, from the next on."""
    seen = ""
    while line := next_line(process):
        seen += line
        if text in line:
            return line
    raise AssertionError(f"it ended without printing {text!r}:\n{seen}")


def _output(process: subprocess.Popen[Any]) -> IO[Any]:
    assert process.stdout is not None
    return process.stdout
