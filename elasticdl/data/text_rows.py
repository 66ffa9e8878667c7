"""Finds the rows of a text file in a stream of bytes, CSV quoting respected.

A quoted field begins with a quote right after a delimiter or at the start of a row; inside it, a doubled quote is a
quote and a line end is data.  Elsewhere a quote is an ordinary character (as in Python's csv module).  Blank lines
between CSV rows are no rows.  Rows end with LF or CRLF.  Never knows about files' names beyond its messages.

`guess_types` and `split_rows`: guesses at the types of columns, and rows taken apart into columns.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
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


csv.field_size_limit(2**31 - 1)  # a field may be a whole document
_LEADING_ZEROS = re.compile(r"\s*[+-]?0\d+\s*")


def split_rows(rows: Sequence[bytes], delimiter: str) -> list[list[str]]:
    """The fields of each row."""
    return [
        next(csv.reader(io.StringIO(row.decode(errors="replace"), newline=""), delimiter=delimiter), []) for row in rows
    ]


def guess_types(rows: Sequence[bytes], num_columns: int, delimiter: str) -> list[str]:
    """For each column its `common_type`; whole numbers of which some are missing are "float64", nothing is ""."""
    columns: list[list[str]] = [[] for _ in range(num_columns)]
    for fields in split_rows(rows, delimiter):
        for column, field in zip(columns, fields, strict=False):
            column.append(field)
    return [_guess(column) for column in columns]


def common_type(values: Iterable[str]) -> str:
    """Return the type of the texts that are not blank: the one rule of training and of statistics.

    Returns:
        "int64" if all are whole numbers, "float64" if all are numbers, else "string".  Whole numbers beyond int64 are
        texts, for float64 would round such ids, and so are those with leading zeros, which are codes: 02134 is no 2134.
    """
    found = "int64"
    for value in values:
        kind = _type(value)
        if kind == "string":
            return kind
        if kind == "float64":
            found = kind
    return found


def _guess(values: Sequence[str]) -> str:
    given = [value for value in values if value.strip()]
    if not given:
        return ""
    kind = common_type(given)
    return "float64" if kind == "int64" and len(given) < len(values) else kind


def _type(text: str) -> str:
    if "_" in text or _LEADING_ZEROS.fullmatch(text):  # Python takes both for numbers
        return "string"
    try:
        return "int64" if -(2**63) <= int(text) < 2**63 else "string"
    except ValueError:
        pass
    try:
        return "float64" if math.isfinite(float(text)) or text.strip().lower() in ("nan", "inf", "-inf") else "string"
    except ValueError:
        return "string"
