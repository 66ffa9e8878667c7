"""Finds the rows of a text file in a stream of bytes, CSV quoting respected.

A quoted field begins with a quote right after a delimiter or at the start of a row; inside it, a doubled quote is a
quote and a line end is data.  Elsewhere a quote is an ordinary character (as in Python's csv module).  Blank lines
between CSV rows are no rows.  Rows end with LF or CRLF.  Never knows about files' names beyond its messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from elasticdl_client.errors import DataError


@dataclass(frozen=True, slots=True)
class TextRules:
    """How rows are separated.

    Attributes:
        quoted: CSV: quotes may hold line ends, and blank lines are skipped; else each line is a row.
        delimiter: one byte between the fields of a CSV row.
    """

    quoted: bool
    delimiter: bytes = b","


def rows_from(file: BinaryIO, offset: int, rules: TextRules, path: str) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes, without line end, of each row of a stream that begins at ``offset``, where a row begins.

    Raises:
        DataError: naming file and byte offset, if a quoted field is never closed.
    """
    for line in file:
        start = offset
        offset += len(line)
        if rules.quoted:
            if line in (b"\n", b"\r\n"):
                continue
            if b'"' in line and ends_inside_quotes(line, False, rules.delimiter):
                line = _join_quoted(file, line, rules, path, start)
                offset = start + len(line)
        yield start, _without_line_end(line)


def _join_quoted(file: BinaryIO, line: bytes, rules: TextRules, path: str, start: int) -> bytes:
    """The whole row that begins with ``line``, which ends inside a quoted field."""
    lines = [line]
    inside = True
    while inside:
        line = file.readline()
        if not line:
            raise DataError(
                f"{path}, byte {start}: the row that begins here has a quoted field that is never closed.",
                "Double each quote inside a quoted field; for text that is not CSV pass reader_type=Text.",
            )
        lines.append(line)
        inside = b'"' not in line or ends_inside_quotes(line, True, rules.delimiter)
    return b"".join(lines)


def ends_inside_quotes(line: bytes, inside: bool, delimiter: bytes) -> bool:
    """Whether a line that begins inside a quoted field, or at a row's start, ends inside a quoted field."""
    position = 0
    while True:
        if inside or line.startswith(b'"', position):
            position = _after_closing_quote(line, position if inside else position + 1)
            if position < 0:
                return True
            inside = False
        position = line.find(delimiter, position)
        if position < 0:
            return False
        position += 1


def _after_closing_quote(line: bytes, position: int) -> int:
    """The position after the quote that closes the field, or -1 if none does."""
    while (quote := line.find(b'"', position)) >= 0:
        if not line.startswith(b'"', quote + 1):
            return quote + 1
        position = quote + 2
    return -1


def _without_line_end(line: bytes) -> bytes:
    if line.endswith(b"\r\n"):
        return line[:-2]
    return line[:-1] if line.endswith(b"\n") else line
