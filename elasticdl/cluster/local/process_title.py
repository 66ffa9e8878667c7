"""Titles of pods' processes in ps, top, pgrep and nvidia-smi: `elasticdl worker-1 of JOB`, not the module.

The kernel shows as the command line what stands in the memory of the process where its arguments were.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from elasticdl_client.choices import PROCESS_VARIABLE

POD_NAME_VARIABLE = "ELASTICDL_POD_NAME"
_PR_SET_NAME = 15
_MAX_NAME = 15  # bytes that the kernel keeps of the short name
_POD = re.compile(r"elasticdl-(?P<job>.+)-(?P<pod>master|(?:ps|worker)-\d+)")
_ARG_START, _ARG_END = 45, 46  # of the fields in /proc/self/stat behind the name, from 0; proc_pid_stat(5)


def title_of(pod_name: str, process: str = "") -> str:
    """Return the title of a pod's process; `process`: its number, where a pod has several."""
    match = _POD.fullmatch(pod_name)
    number = f" process {process}" if process else ""
    return f"elasticdl {match['pod']}{number} of {match['job']}" if match else f"elasticdl {pod_name}{number}"


def name_process() -> None:
    """Name this process after its pod, if the environment names one; on systems other than Linux do nothing."""
    pod_name = os.environ.get(POD_NAME_VARIABLE, "")
    if not pod_name or not hasattr(ctypes.CDLL(None), "prctl"):
        return
    match = _POD.fullmatch(pod_name)
    short = f"{match['pod']} {match['job']}" if match else pod_name
    ctypes.CDLL(None).prctl(_PR_SET_NAME, short.encode()[:_MAX_NAME], 0, 0, 0)
    write_arguments(title_of(pod_name, os.environ.get(PROCESS_VARIABLE, "")).encode())


def write_arguments(title: bytes) -> None:
    """Show a command line for this process, cut to the length of that with which it was started; on Linux."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if not 2 < end - start < 1 << 20:  # hidden from this process
        return
    # A last byte that is not zero tells the kernel that this is a title: it shows what stands before the first zero.
    size = end - start - 1
    ctypes.memmove(start, title[: size - 1].ljust(size, b"\0") + b".", size + 1)
