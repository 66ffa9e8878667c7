"""The fields of CSV rows: guesses at the types of columns, and rows taken apart into columns."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence

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
