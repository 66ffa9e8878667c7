"""How this process gets on with the processors that it has, read from the kernel with each heartbeat (0.1 ms)."""

from __future__ import annotations

import os
from pathlib import Path

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.resource_use import control_groups

_TICKS = os.sysconf("SC_CLK_TCK")
_STEAL = 8  # of the fields of a line of /proc/stat, from 0; proc(5)
_UNITS = {"throttled_usec": 1e-6, "throttled_time": 1e-9}  # of control groups of version 2 and 1


def cpu_use(root: Path = Path("/")) -> pb.CpuUse:
    """Read the processor time from the kernel; 0 where it does not report it.

    Args:
        root: where `proc` and `sys` are.
    """
    cores = os.cpu_count() or 1
    return pb.CpuUse(
        throttled_seconds=max((_throttled(group / "cpu.stat") for group in control_groups(root, "cpu")), default=0.0),
        steal_seconds=_steal(root / "proc/stat") / cores,
        load=float((_read(root / "proc/loadavg").split() or ["0"])[0]),
        cores=cores,
    )


def _throttled(file: Path) -> float:
    for line in _read(file).splitlines():
        name, _, value = line.partition(" ")
        if name in _UNITS:
            return int(value) * _UNITS[name]
    return 0.0


def _steal(file: Path) -> float:
    fields = _read(file).partition("\n")[0].split()
    return int(fields[_STEAL]) / _TICKS if len(fields) > _STEAL else 0.0


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
