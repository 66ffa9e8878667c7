"""Errors of TensorFlow's operations on a record, explained to the user: the column, the value, what to do."""

from __future__ import annotations

import csv
import re

from elasticdl.data.default_feed import FeedColumns, missing_number, wrong_cell, wrong_row
from elasticdl.data.reader import Metadata
from elasticdl_client.errors import DataError

_WRONG_FIELD = re.compile(
    r"Field (\d+) (?:in record \d+ is not a valid (\w+): (.*)|is required but missing in record)", re.DOTALL
)
_WRONG_COUNT = re.compile(r"Expect (\d+) fields but have (\d+) in record")
_MISSING = re.compile(r"Feature: (\S+) \(.*?\) is required but|Key: ([^,]+), Index: \d+\.  Number of int64 values")
_WRONG_TYPE = re.compile(
    r"Key: ([^,]+), Index: \d+\.  Data types don't match. Data type: (\w+) but expected type: (\w+)"
)
_NO_NUMBER = re.compile(r"StringToNumberOp could not correctly convert string: (.*)", re.DOTALL)
_CAST = re.compile(r"Cast string to (\w+) is not supported")
_LEAVES_OUT = "--max_bad_records=N leaves such records out."


def of_table(table: FeedColumns, message: str) -> str:
    """Explain an error of the default feed; an unknown one stays as it is."""
    names = list(table.dtypes)
    error: DataError | None = None
    if found := _WRONG_FIELD.search(message):
        name = names[int(found[1])]
        error = wrong_cell(name, table.dtypes[name], found[3] or "")
    elif found := _WRONG_COUNT.search(message):
        error = wrong_row(int(found[2]), len(names))
    elif found := _MISSING.search(message):
        error = missing_number(found[1] or found[2])
    elif found := _WRONG_TYPE.search(message):
        error = DataError(f"A record has a {found[2]} in the column {found[1]}, which holds {found[3]}.")
    return message if error is None else f"{type(error).__name__}: {error}"


def of_own_feed(metadata: Metadata, message: str, record: bytes | None) -> str:
    """Explain an error of the user's `feed`; an unknown one stays as it is.

    Args:
        record: that the error is of; None: not known.
    """
    error: DataError | None = None
    if found := _WRONG_FIELD.search(message):
        field, value = int(found[1]), found[3] or ""
        what = f"reads {value!r} as {found[2]}" if value else "finds an empty field, which has no default"
        error = DataError(
            f"tf.io.decode_csv in feed {what}: field {field}{_column(metadata, record, value, field)}",
            "Mend the record, or give this field another entry of record_defaults: [0.0] or [float('nan')] for "
            f"fractions and missing numbers, [''] for texts; {_LEAVES_OUT}",
        )
    elif found := _WRONG_COUNT.search(message):
        error = DataError(
            f"tf.io.decode_csv in feed has {found[1]} record_defaults, and a record has {found[2]} fields.",
            f"Give one entry for each column, and quote fields that hold the delimiter; {_LEAVES_OUT}",
        )
    elif found := _NO_NUMBER.search(message):
        error = DataError(
            f"tf.strings.to_number in feed reads {found[1]!r}{_column(metadata, record, found[1])}: no number.",
            f"Mend the record, or map texts to numbers with keras.layers.StringLookup; {_LEAVES_OUT}",
        )
    elif found := _CAST.search(message):
        error = DataError(
            f"feed casts texts to {found[1]}, which tf.cast cannot.",
            "Use tf.strings.to_number for texts of numbers, keras.layers.StringLookup for others; decode_csv makes "
            "numbers of the fields whose entry of record_defaults is one.",
        )
    return message if error is None else f"{type(error).__name__}: {error}"


def _column(metadata: Metadata, record: bytes | None, value: str, field: int = -1) -> str:
    """The column of a CSV row that holds a value, if that is sure: `feed` may leave columns out."""
    if record is None or not metadata.delimiter:
        return ""
    cells = next(csv.reader([record.decode(errors="replace")], delimiter=metadata.delimiter), [])
    if len(cells) != len(metadata.column_names):
        return ""
    holding = [k for k, cell in enumerate(cells) if cell == value]
    if field not in holding:
        field = holding[0] if len(holding) == 1 else -1
    return f", the column {metadata.column_names[field]}" if field >= 0 else ""
