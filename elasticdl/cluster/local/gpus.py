"""The GPUs of this machine, as the agent deals them out: one for each worker.

It looks for devices and counts their users; it never opens one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia\d+")
_NONE = "-1"


class Gpus:
    """Names of GPUs as `CUDA_VISIBLE_DEVICES` takes them: numbers, or UUIDs."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    @classmethod
    def of(cls, environment: Mapping[str, str], devices: Path = Path("/dev")) -> Gpus:
        """Return those that processes of an environment may use: what it names, else all that are here.

        Args:
            devices: the directory of device files.
        """
        named = environment.get(VARIABLE)
        if named is None:
            here = [path for path in devices.glob("nvidia*") if _DEVICE.fullmatch(path.name)]
            return cls(str(number) for number in range(len(here)))  # CUDA counts those of a container from 0
        names = [name.strip() for name in named.split(",")]
        return cls(names[: names.index(_NONE)] if _NONE in names else [name for name in names if name])

    def least_used(self, taken: Iterable[str]) -> str:
        """Return the first of those with the fewest users; empty: there is none.

        Args:
            taken: the GPU of each process that has one.
        """
        counts = dict.fromkeys(self._names, 0)
        for name in taken:
            if name in counts:
                counts[name] += 1
        return min(counts, key=counts.__getitem__, default="")


def own_gpu(environment: Mapping[str, str], name: str) -> dict[str, str]:
    """Return what makes a process see one GPU alone, unless its own environment says which it sees."""
    return {VARIABLE: name} if name and VARIABLE not in environment else {}
