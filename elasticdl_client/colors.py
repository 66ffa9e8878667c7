"""Colors of what commands print: errors, warnings, phases of jobs and pods; none where they are not wanted.

They are for terminals alone, and not if NO_COLOR is set (https://no-color.org) or the terminal has none.
"""

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
