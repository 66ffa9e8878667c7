"""The fields of CSV rows: guesses at the types of columns, and rows taken apart into columns."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

csv.field_size_limit(2**31 - 1)  # a field may be a whole document


def split_rows(rows: Sequence[bytes], delimiter: str) -> list[list[str]]:
    """The fields of each row."""
    return [
        next(csv.reader(io.StringIO(row.decode(errors="replace"), newline=""), delimiter=delimiter), []) for row in rows
    ]


def guess_types(rows: Sequence[bytes], num_columns: int, delimiter: str) -> list[str]:
    """For each column "int64" if all values are whole numbers, "float64" if all are numbers or empty, else "string".

    A column without any value is "string", and so is one with whole numbers beyond int64: float64 would round such ids.
    """
    columns: list[list[str]] = [[] for _ in range(num_columns)]
    for fields in split_rows(rows, delimiter):
        for column, field in zip(columns, fields, strict=False):
            column.append(field.strip())
    return [_guess(column) for column in columns]


def _guess(values: Sequence[str]) -> str:
    given = [value for value in values if value]
    if not given or not all(map(_is_number, given)):
        return "string"
    whole = [number for number in map(_whole, given) if number is not None]
    if any(not -(2**63) <= number < 2**63 for number in whole):
        return "string"
    return "int64" if len(whole) == len(values) else "float64"


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _is_number(text: str) -> bool:
    try:
        return "_" not in text and (math.isfinite(float(text)) or text.lower() in ("nan", "inf", "-inf"))
    except ValueError:
        return False
