"""Waiting for a condition with a deadline; the only way in which these tests wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOOK_S = 0.25


class Overdue(AssertionError):
    """Something that had to happen did not; the message tells the whole story of the job."""


def wait_until(
    what: str,
    condition: Callable[[], bool],
    timeout_s: float = 60.0,
    story: Callable[[], str] = lambda: "",
    look_s: float = LOOK_S,
    pause: Callable[[float], object] | None = None,
) -> float:
    """Looks until a condition holds.

    Args:
        pause: lets this many seconds pass between two looks, or fewer.

    Returns:
        The seconds that it took.

    Raises:
        Overdue: it did not hold in time.
    """
    started = time.monotonic()
    pause = pause or threading.Event().wait
    while not condition():
        if time.monotonic() - started > timeout_s:
            raise Overdue(f"waited {timeout_s:g} s for: {what}\n{story()}")
        pause(look_s)
    return time.monotonic() - started


def stay_so_for(seconds: float) -> None:
    """Lets an outage last: its length is what is tested."""
    threading.Event().wait(seconds)
