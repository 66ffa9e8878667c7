"""Titles of pods' processes in ps, top, pgrep and nvidia-smi: `elasticdl worker-1 of JOB` instead of the module.

The kernel shows as the command line the memory of the process where its arguments were.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from elasticdl_client.choices import PROCESS_VARIABLE

POD_NAME_VARIABLE = "ELASTICDL_POD_NAME"
_PR_SET_NAME = 15
_MAX_NAME = 15  # bytes of the short name that the kernel keeps
_POD = re.compile(r"elasticdl-(?P<job>.+)-(?P<pod>master|(?:ps|worker)-\d+)")
_ARG_START, _ARG_END = 45, 46  # fields of /proc/self/stat after the name, from 0; see proc_pid_stat(5)


def title_of(pod_name: str, process: str = "") -> str:
    """Return the title of a pod's process; `process` is its number in a pod with several."""
    match = _POD.fullmatch(pod_name)
    number = f" process {process}" if process else ""
    return f"elasticdl {match['pod']}{number} of {match['job']}" if match else f"elasticdl {pod_name}{number}"


def name_process() -> None:
    """Name this process after its pod, if the environment has one; only on Linux."""
    pod_name = os.environ.get(POD_NAME_VARIABLE, "")
    if not pod_name or not hasattr(ctypes.CDLL(None), "prctl"):
        return
    match = _POD.fullmatch(pod_name)
    short = f"{match['pod']} {match['job']}" if match else pod_name
    ctypes.CDLL(None).prctl(_PR_SET_NAME, short.encode()[:_MAX_NAME], 0, 0, 0)
    write_arguments(title_of(pod_name, os.environ.get(PROCESS_VARIABLE, "")).encode())


def write_arguments(title: bytes) -> None:
    """Set the visible command line of this process, cut to the length of the original one; only on Linux."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if not 2 < end - start < 1 << 20:  # not readable for this process
        return
    # A last byte other than zero marks a title: the kernel shows the text before the first zero.
    size = end - start - 1
    ctypes.memmove(start, title[: size - 1].ljust(size, b"\0") + b".", size + 1)
