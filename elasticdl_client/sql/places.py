"""Places in a statement, and errors that point at them with a caret."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elasticdl_client.errors import FlagError
from elasticdl_client.flags import nearest

_WIDTH = 100  # characters of a line that are shown
_LISTED = 12


@dataclass(frozen=True, slots=True)
class Place:
    """The characters [start, end) of a text of statements."""

    source: str
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.source[self.start : self.end]

    def to(self, other: Place) -> Place:
        """Return the place from here to the end of another one."""
        return Place(self.source, self.start, max(self.end, other.end))

    def shown(self) -> str:
        """Return its first line with carets below it, and the line's number where there are several."""
        begin = self.source.rfind("\n", 0, self.start) + 1
        end = self.source.find("\n", self.start)
        line = self.source[begin : len(self.source) if end < 0 else end]
        column = self.start - begin
        length = max(1, min(self.end, begin + len(line)) - self.start)
        cut = max(0, column + min(length, _WIDTH) - _WIDTH)
        if cut:
            line, column = "…" + line[cut + 1 :], column - cut
        line = line[:_WIDTH].replace("\t", " ").replace("\r", " ")
        carets = "^" * max(1, min(length, _WIDTH - column))
        number = self.source.count("\n", 0, begin) + 1
        head = f"  {number} | " if "\n" in self.source.strip() else "  "
        return f"{head}{line}\n{' ' * (len(head) + column)}{carets}"


class StatementError(FlagError):
    """A statement is wrong.

    Attributes:
        place: what is wrong in it.
        message: why, without the picture of the place.
    """

    def __init__(self, message: str, hint: str, place: Place) -> None:
        super().__init__(f"{message}\n{place.shown()}", hint)
        self.message = message
        self.place = place


def suggestion(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the hint of an error about an unknown name: the nearest known one, else `otherwise`, else all of them."""
    names = list(dict.fromkeys(known))
    near = nearest(name, names)
    if near:
        return f"Did you mean '{near}'?"
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return otherwise or f"There are: {', '.join(names[:_LISTED])}{more}."
