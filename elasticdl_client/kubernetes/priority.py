"""Pod priorities: a PriorityClass name, and for workers ``high``, ``low`` or the fraction that is high."""

from __future__ import annotations

import math

from elasticdl_client.errors import FlagError


def worker_priorities(priority: str, num_workers: int) -> list[str]:
    """The PriorityClass of every worker; empty strings without a priority.

    A fraction f makes ``ceil(num_workers * f)`` workers high, taken alternately from both ends of the ids: those are
    the ones that start first and the ones that come last.

    Raises:
        FlagError: with the message of the original.
    """
    if priority in ("", "None", "high", "low"):
        return [priority if priority != "None" else ""] * num_workers
    fraction = _parse_fraction(priority)
    num_high = math.ceil(num_workers * fraction)
    num_front = math.ceil(num_high / 2)
    num_back = num_high - num_front
    return ["high" if index < num_front or index >= num_workers - num_back else "low" for index in range(num_workers)]


def _parse_fraction(priority: str) -> float:
    try:
        fraction = float(priority)
    except ValueError:
        fraction = -1.0
    if not 0.0 <= fraction <= 1.0:
        raise FlagError(
            f"Not support priority = {priority}, please set priority = high/low/a fraction value.",
            "For example high, low, or 0.5: half of the workers high, the others low.",
        )
    return fraction
