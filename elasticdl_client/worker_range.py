"""WorkerRange: how many workers a job may have, as a user writes it: a number, a range, or auto.

It owns the three forms of the text and the words for what limits a job's growth.  Which range a job can have is in
scaling.py, which number within it the master's core decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from elasticdl_client.errors import FlagError

AUTO = "auto"
MAX_WORKERS = 100_000
FORMS = "a number such as 4, a range such as 2:16, or auto"
_MAX_TEXT = 40  # of a text that is no number
_RANGE = re.compile(r"([0-9]{1,6})(?::([0-9]{1,6}))?")


class Bottleneck(StrEnum):
    """The reason why another worker adds little to a job's rate."""

    PARAMETER_SERVERS = "parameter servers"
    INPUT = "input"
    GROUP = "group"  # the sum of the gradients of an AllReduce group
    TASKS = "tasks"  # there are fewer than workers
    PROCESSORS = "processors"  # workers compute more slowly beside each other
    ROOM = "room"  # pods wait for a place


@dataclass(frozen=True, slots=True)
class WorkerRange:
    """The least and the greatest number of workers; both are the same where the number is fixed."""

    least: int
    most: int

    @property
    def is_fixed(self) -> bool:
        """The number does not follow the gain."""
        return self.least == self.most

    def nearest(self, num_workers: int) -> int:
        """Return the number in the range that is nearest to another one."""
        return min(max(num_workers, self.least), self.most)

    def __str__(self) -> str:
        return str(self.least) if self.is_fixed else f"{self.least}:{self.most}"


def parse(text: str, least: int = 1) -> WorkerRange:
    """Return the range that a text says.

    Args:
        text: one of `FORMS`.
        least: number of workers of `auto`.

    Raises:
        FlagError: it has none of the forms, or its end is before its beginning.
    """
    text = text.strip()
    if text.lower() == AUTO:
        return WorkerRange(least, MAX_WORKERS)
    found = _RANGE.fullmatch(text)
    first = int(found[1]) if found else 0
    last = int(found[2] or found[1]) if found else 0
    shown = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
    if found is None or max(first, last) > MAX_WORKERS:
        raise FlagError(f"'{shown}' is not a number of workers.", f"Give {FORMS}; at most {MAX_WORKERS}.")
    if last < first:
        raise FlagError(f"'{shown}' is not a range of workers: it ends before it begins.", f"Give {last}:{first}.")
    if found[2] and not first:
        raise FlagError(f"'{shown}' begins with 0 workers, of which no gain can be measured.", f"Give 1:{last}.")
    return WorkerRange(first, last)


def parse_flags(given: Mapping[str, object]) -> dict[str, object]:
    """Return a job's flags with a range in --num_workers written as two numbers, --num_workers and --max_workers.

    Raises:
        FlagError: the range is none, or --max_workers says its end, too.
    """
    flags, value = dict(given), given.get("num_workers")
    if not isinstance(value, str) or not (":" in value or value.strip().lower() == AUTO):
        return flags
    if "max_workers" in flags:
        raise FlagError(
            f"--num_workers={value} says the most workers, and so does --max_workers={flags['max_workers']}.",
            "Leave --max_workers out.",
        )
    least = str(flags.get("min_workers", "")).strip()
    found = parse(value, int(least) if re.fullmatch("[1-9][0-9]{0,4}", least) else 1)
    return flags | {"num_workers": found.least, "max_workers": found.most}
