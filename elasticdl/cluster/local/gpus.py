"""The GPUs of this machine: assigned by the agent to workers, and by a worker's pod to its processes.

It looks for devices and counts their users, but never opens one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from elasticdl_client.errors import ElasticDLError

VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia\d+")
_NONE = "-1"


class Gpus:
    """Names of GPUs, as in `CUDA_VISIBLE_DEVICES`: numbers, or UUIDs."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    @classmethod
    def of(cls, environment: Mapping[str, str], devices: Path = Path("/dev")) -> Gpus:
        """Return the GPUs that processes with an environment may use: those it names, else all of the machine.

        Args:
            devices: The directory of device files.
        """
        named = environment.get(VARIABLE)
        if named is None:
            here = [path for path in devices.glob("nvidia*") if _DEVICE.fullmatch(path.name)]
            return cls(str(number) for number in range(len(here)))  # CUDA numbers the GPUs of a container from 0
        names = [name.strip() for name in named.split(",")]
        return cls(names[: names.index(_NONE)] if _NONE in names else [name for name in names if name])

    def least_used(self, taken: Iterable[str], number: int) -> tuple[str, ...]:
        """Return the GPUs with the fewest users, the first ones of equals; fewer if there are no more.

        Args:
            taken: The GPUs of all pods, one entry per use.
            number: How many to return.
        """
        counts = dict.fromkeys(self._names, 0)
        for name in taken:
            if name in counts:
                counts[name] += 1
        chosen = set(sorted(counts, key=counts.__getitem__)[:number])
        return tuple(name for name in self._names if name in chosen)

    def shares(self, number: int) -> list[tuple[str, ...]]:
        """Return the GPUs of each of several processes; if there are fewer GPUs than processes, some share one.

        Raises:
            ElasticDLError: the GPUs cannot be divided evenly.
        """
        names = self._names
        if len(names) > number and len(names) % number:
            raise ElasticDLError(
                f"{number} processes cannot share {len(names)} GPUs evenly: some would be idle.",
                f"Give --processes_per_worker a divisor of {len(names)}.",
            )
        size = max(1, len(names) // number)
        starts = [process * size % len(names) if names else 0 for process in range(number)]
        return [names[start : start + size] for start in starts]


def seen_gpus(environment: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the variables that make a process see only these GPUs, unless its environment already chooses."""
    return {VARIABLE: ",".join(names)} if names and VARIABLE not in environment else {}
