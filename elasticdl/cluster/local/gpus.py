"""The GPUs of this machine, as the agent deals them out to workers, and a worker's pod to its processes.

It looks for devices and counts their users; it never opens one.
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
    """Names of GPUs as `CUDA_VISIBLE_DEVICES` takes them: numbers, or UUIDs."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    @classmethod
    def of(cls, environment: Mapping[str, str], devices: Path = Path("/dev")) -> Gpus:
        """Return those that processes of an environment may use: those that it names, else all of the machine.

        Args:
            devices: the directory of device files.
        """
        named = environment.get(VARIABLE)
        if named is None:
            here = [path for path in devices.glob("nvidia*") if _DEVICE.fullmatch(path.name)]
            return cls(str(number) for number in range(len(here)))  # CUDA counts those of a container from 0
        names = [name.strip() for name in named.split(",")]
        return cls(names[: names.index(_NONE)] if _NONE in names else [name for name in names if name])

    def least_used(self, taken: Iterable[str], number: int) -> tuple[str, ...]:
        """Return the first of those with the fewest users; fewer if there are no more.

        Args:
            taken: the GPUs of each pod that has some.
            number: how many.
        """
        counts = dict.fromkeys(self._names, 0)
        for name in taken:
            if name in counts:
                counts[name] += 1
        chosen = set(sorted(counts, key=counts.__getitem__)[:number])
        return tuple(name for name in self._names if name in chosen)

    def shares(self, number: int) -> list[tuple[str, ...]]:
        """Return those of each of several processes; where there are fewer than processes, some share one.

        Raises:
            ElasticDLError: they cannot be shared out evenly.
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
    """Return what makes a process see some GPUs alone, unless its own environment says which it sees."""
    return {VARIABLE: ",".join(names)} if names and VARIABLE not in environment else {}
