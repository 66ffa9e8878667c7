"""Statistics of a table's columns: of some records, put together from many parts, and as users get them.

`statistics_of_rows`: those of rows as a database driver gives them, Python values by column.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np

from elasticdl.analysis.cells import Cells
from elasticdl.analysis.sketch import EXACT_DISTINCT, ColumnKind, ColumnSketch
from elasticdl_client.errors import DataError


@dataclass(slots=True)
class Analysis:
    """Of the records that were added."""

    exact_distinct: int = EXACT_DISTINCT
    num_records: int = 0
    sketches: dict[str, ColumnSketch] = field(default_factory=dict)

    def add(self, cells: Mapping[str, Cells], num_records: int) -> None:
        """Adds the cells of records.

        Raises:
            DataError: a package is missing.
        """
        for name, values in cells.items():
            if name not in self.sketches:
                self.sketches[name] = self._missing_so_far()
            self.sketches[name].add(values)
        for name in self.sketches.keys() - cells.keys():
            self.sketches[name].num_missing += num_records
        self.num_records += num_records

    def merge(self, other: Analysis) -> None:
        """Adds what another one has seen."""
        for name in sorted(self.sketches.keys() | other.sketches.keys()):
            own = self.sketches.setdefault(name, self._missing_so_far())
            if name in other.sketches:
                own.merge(other.sketches[name])
            else:
                own.num_missing += other.num_records
        self.num_records += other.num_records

    def dump(self) -> bytes:
        """For a file."""
        columns = {name: sketch.dump() for name, sketch in self.sketches.items()}
        return zlib.compress(json.dumps({"records": self.num_records, "columns": columns}).encode(), 1)

    @classmethod
    def load(cls, data: bytes, exact_distinct: int = EXACT_DISTINCT) -> Analysis:
        """Load the result of `dump`.

        Raises:
            DataError: it is damaged.
        """
        try:
            saved = json.loads(zlib.decompress(data))
            sketches = {name: ColumnSketch.load(part, exact_distinct) for name, part in saved["columns"].items()}
        except (zlib.error, ValueError, KeyError, TypeError) as error:
            raise DataError(f"The statistics of a task are damaged: {error}.") from error
        return cls(exact_distinct, saved["records"], sketches)

    def statistics(self, num_buckets: int, vocabulary_size: int) -> dict[str, Any]:
        """Return the statistics for users, as values of JSON.

        Args:
            num_buckets: that `boundaries` make.
            vocabulary_size: the most values in `vocab`.
        """
        columns = {
            name: _column(sketch, num_buckets, vocabulary_size) for name, sketch in sorted(self.sketches.items())
        }
        return {"records": self.num_records, "columns": columns}

    def _missing_so_far(self) -> ColumnSketch:
        sketch = ColumnSketch(self.exact_distinct)
        sketch.num_missing = self.num_records
        return sketch


_TYPES = {
    ColumnKind.NOTHING: "empty",
    ColumnKind.INTEGER: "int64",
    ColumnKind.NUMBER: "float64",
    ColumnKind.TEXT: "string",
}


def _column(sketch: ColumnSketch, num_buckets: int, vocabulary_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": _TYPES[sketch.kind],
        "count": sketch.count,
        "missing": sketch.num_missing,
        "exact": sketch.counts is not None,
        "distinct_count": sketch.num_distinct,
    }
    if sketch.kind in (ColumnKind.INTEGER, ColumnKind.NUMBER):
        moments = sketch.moments
        found |= {"min": moments.smallest, "max": moments.largest, "avg": moments.mean, "stddev": moments.deviation}
        found["boundaries"] = sorted(set(sketch.quantiles(num_buckets)))
    if sketch.kind in (ColumnKind.INTEGER, ColumnKind.TEXT):
        frequent = sketch.most_frequent(vocabulary_size)
        found["vocab"] = [value for value, _ in frequent]
        found["vocab_counts"] = [count for _, count in frequent]
    return found


def statistics_of_rows(
    columns: Mapping[str, Sequence[object]], num_buckets: int = 10, vocabulary_size: int = 100_000
) -> dict[str, Any]:
    """Return what `elasticdl analyze` would write about a table.

    Args:
        columns: the values of each column, as many of each; None: missing.
        num_buckets: that `boundaries` make.
        vocabulary_size: the most values in `vocab`.

    Raises:
        DataError: a package is missing, or a column holds numbers and texts.
    """
    analysis = Analysis()
    num_rows = len(next(iter(columns.values()), ()))
    analysis.add({name: _cells(name, values) for name, values in columns.items()}, num_rows)
    return analysis.statistics(num_buckets, vocabulary_size)


def _cells(name: str, values: Sequence[object]) -> Cells:
    cells = Cells(are_texts=True)
    wholes: list[int] = []
    numbers: list[float] = []
    for value in values:
        if value is None:
            cells.num_missing += 1
        elif isinstance(value, int):
            wholes.append(int(value))
        elif isinstance(value, float | Decimal):
            number = float(value)
            if math.isfinite(number):
                numbers.append(number)
            else:
                cells.num_missing += 1
        elif text := str(value).strip():
            cells.texts.append(text)
        else:
            cells.num_missing += 1
    if cells.texts and (wholes or numbers):
        shown = f"{(numbers or wholes)[0]!r} and {cells.texts[0][:50]!r}"
        raise DataError(
            f"The column {name} holds numbers and texts, such as {shown}.",
            f"Convert it in the SELECT: CAST({name} AS TEXT) AS {name}.",
        )
    try:
        if wholes and not numbers:
            cells.numbers.append(np.array(wholes, np.int64))
        elif numbers:
            cells.numbers.append(np.array([*wholes, *numbers], np.float64))
    except OverflowError as error:
        raise DataError(
            f"The column {name} holds whole numbers beyond 64 bits.", "Convert it in the SELECT."
        ) from error
    return cells
