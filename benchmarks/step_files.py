"""Reads what processes have written of their steps (zoo/step_times.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.zoo.step_times import RECORD

TIMES = np.dtype([("at", "<f8"), ("cpu", "<f8"), ("step", "<i8"), ("world_size", "<i8")])
assert TIMES.itemsize == RECORD.size


def read_steps(directory: Path) -> dict[int, np.ndarray]:
    """By pid, of all processes, the ended ones too."""
    found = {}
    for file in directory.iterdir():
        data = file.read_bytes()
        found[int(file.name)] = np.frombuffer(data[: len(data) // RECORD.size * RECORD.size], TIMES)
    return found


def cpu_seconds_per_step(directory: Path) -> float:
    """Of one process: the mean over all of them, over the later half of each one's steps."""
    means = []
    for steps in read_steps(directory).values():
        later = steps["cpu"][len(steps) // 2 :]
        if len(later) > 1:
            means.append(float(later[-1] - later[0]) / (len(later) - 1))
    return sum(means) / len(means)
