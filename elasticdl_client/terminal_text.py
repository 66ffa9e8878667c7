"""Text for the terminal: colors, none where they are not wanted, and lengths of time as kubectl writes them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import IO


class Color(StrEnum):
    """SGR parameters of ECMA-48."""

    RED = "1;31"
    GREEN = "32"
    YELLOW = "33"
    CYAN = "36"


PHASES: Mapping[str, Color] = {
    "Running": Color.GREEN,
    "Succeeded": Color.CYAN,
    "Pending": Color.YELLOW,
    "Stopped": Color.YELLOW,
    "Failed": Color.RED,
}
_PHASE = re.compile(rf"(?<=  )({'|'.join(PHASES)})(?=  |$)", re.MULTILINE)  # a cell of a table, or behind a head
_LEVEL = re.compile(r"(?:\[[^\]]*\] )?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (WARNING|ERROR|CRITICAL) ")


def are_wanted(stream: IO[str]) -> bool:
    """Return whether what is printed to a stream is colored."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, color: Color, stream: IO[str]) -> str:
    """Return a text in a color, if the stream is to have any."""
    return f"\x1b[{color}m{text}\x1b[0m" if are_wanted(stream) else text


def paint_phases(text: str, stream: IO[str]) -> str:
    """Return a table or a page with the phases in their colors."""
    return _PHASE.sub(lambda found: paint(found[1], PHASES[found[1]], stream), text)


def paint_log_line(line: str, stream: IO[str]) -> str:
    """Return a line of a log, in a color if it is a warning or an error."""
    level = _LEVEL.match(line)
    if level is None:
        return line
    return paint(line, Color.YELLOW if level[1] == "WARNING" else Color.RED, stream)


def age(seconds: float) -> str:
    """Return a length of time as kubectl writes it: 45s, 5m3s, 62m, 3h5m, 26h, 3d4h."""
    s = int(max(0.0, seconds))
    minutes, hours, days = s // 60, s // 3600, s // 86400
    if s < 120:
        return f"{s}s"
    if minutes < 10:
        return f"{minutes}m{s % 60}s" if s % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    if days < 8 and hours % 24:
        return f"{days}d{hours % 24}h"
    return f"{days}d"
