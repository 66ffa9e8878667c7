"""Statistics of a table's columns: collected from some records, merged from many parts, and formatted for users.

`statistics_of_rows`: statistics of rows from a database driver, given as Python values by column.

`ColumnSketch`: a summary of a column, small for any length; the sketches of two halves can be merged.

Numbers of values, minimum, maximum, mean and deviation are exact.  The counts of single values are exact while there
are few distinct values; beyond that, Apache DataSketches keeps quantiles (KLL), the number of distinct values
(HyperLogLog) and the frequent values.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import IntEnum
from typing import Any

import numpy as np

from elasticdl.analysis.cells import Cells, Moments, Numbers
from elasticdl.data.sources import need
from elasticdl.data.text import common_type
from elasticdl_client.errors import DataError

EXACT_DISTINCT = 50_000  # with more distinct values, they are sketched
_KLL_K = 800
_HLL_LG_K = 14
_FREQUENT_LG_SIZE = 16


def check_library() -> Any:
    """Return the package datasketches.

    Raises:
        DataError: The package is not installed.
    """
    return need("datasketches", "Statistics", "datasketches")


class ColumnKind(IntEnum):
    """The kind of all values of a column; the kind of a merged column is the larger one of its parts."""

    NOTHING = 0
    INTEGER = 1
    NUMBER = 2
    TEXT = 3


class ColumnSketch:
    """The summary of one column.

    Attributes:
        kind: Kind of all values so far.
        count: Number of values.
        num_missing: Number of records without a value, and of missing values.
        moments: Sums of the numbers.
        counts: Number of occurrences of each value, as text; None: there are too many distinct values.
    """

    def __init__(self, exact_distinct: int = EXACT_DISTINCT) -> None:
        """
        Args:
            exact_distinct: Maximum number of distinct values to count one by one.

        Raises:
            DataError: The package datasketches is not installed.
        """
        self._library = check_library()
        self._exact_distinct = exact_distinct
        self.kind = ColumnKind.NOTHING
        self.count = 0
        self.num_missing = 0
        self.moments = Moments()
        self.counts: Counter[str] | None = Counter()
        self._quantiles = self._library.kll_doubles_sketch(_KLL_K)
        self._distinct = self._library.hll_sketch(_HLL_LG_K, self._library.tgt_hll_type.HLL_4)
        self._frequent = self._library.frequent_strings_sketch(_FREQUENT_LG_SIZE)

    def add(self, cells: Cells) -> None:
        """Add values."""
        self.num_missing += cells.num_missing
        self.count += len(cells.texts) + sum(map(len, cells.numbers))
        if cells.texts:
            numbers = None if self.kind is ColumnKind.TEXT or cells.are_texts else _parsed(cells.texts)
            self._add_numbers(numbers)
            self._count(Counter(cells.texts))
        for numbers in cells.numbers:
            if len(numbers):
                self._add_numbers(numbers)
                values, counts = np.unique(numbers, return_counts=True)
                texts = map(str if numbers.dtype.kind == "i" else _shortest, values.tolist())
                self._count(dict(zip(texts, counts.tolist(), strict=True)))

    def merge(self, other: ColumnSketch) -> None:
        """Add the values of another sketch."""
        self.count += other.count
        self.num_missing += other.num_missing
        self._widen(other.kind)
        self.moments.merge(other.moments)
        self._quantiles.merge(other._quantiles)
        if other.counts is not None:
            self._count(other.counts)
            return
        self._sketch()
        union = self._library.hll_union(_HLL_LG_K)
        union.update(self._distinct)
        union.update(other._distinct)
        self._distinct = union.get_result(self._library.tgt_hll_type.HLL_4)
        self._frequent.merge(other._frequent)

    @property
    def num_distinct(self) -> int:
        """The number of distinct values; if they are not counted, an estimate (about 1 % off) of distinct texts."""
        if self.counts is None:
            return round(float(self._distinct.get_estimate()))
        return len(self.counts if self.kind is ColumnKind.TEXT else self._by_value(self.counts))

    def most_frequent(self, number: int) -> list[tuple[str, int]]:
        """Return values and their counts, the most frequent first, and equally frequent ones in order of their text.

        With too many distinct values, return only the certainly frequent ones, with estimated counts.
        """
        found = self.counts.items() if self.counts is not None else self._estimates()
        return sorted(found, key=lambda item: (-item[1], item[0]))[:number]

    def quantiles(self, num_buckets: int) -> list[float]:
        """Return the num_buckets − 1 boundaries that cut the numbers into num_buckets parts of equal size."""
        if self.counts is None:
            return [float(q) for q in self._quantiles.get_quantiles([k / num_buckets for k in range(1, num_buckets)])]
        by_value = self._by_value(self.counts)
        values = sorted(by_value)
        ends = np.cumsum([by_value[value] for value in values])
        wanted = [-(-k * self.moments.count // num_buckets) for k in range(1, num_buckets)]
        return [values[int(place)] for place in np.searchsorted(ends, wanted)]

    def dump(self) -> dict[str, Any]:
        """Return the sketch as values for JSON."""
        return {
            "kind": int(self.kind),
            "count": self.count,
            "missing": self.num_missing,
            "moments": self.moments.dump(),
            "counts": self.counts,
            "quantiles": _text(self._quantiles.serialize()),
            "distinct": _text(self._distinct.serialize_compact()),
            "frequent": _text(self._frequent.serialize()),
        }

    @classmethod
    def load(cls, saved: Mapping[str, Any], exact_distinct: int = EXACT_DISTINCT) -> ColumnSketch:
        """Return the sketch saved by `dump`."""
        sketch = cls(exact_distinct)
        library = sketch._library
        sketch.kind = ColumnKind(saved["kind"])
        sketch.count, sketch.num_missing = saved["count"], saved["missing"]
        sketch.moments = Moments.load(saved["moments"])
        sketch.counts = None if saved["counts"] is None else Counter(saved["counts"])
        sketch._quantiles = library.kll_doubles_sketch.deserialize(_bytes(saved["quantiles"]))
        sketch._distinct = library.hll_sketch.deserialize(_bytes(saved["distinct"]))
        sketch._frequent = library.frequent_strings_sketch.deserialize(_bytes(saved["frequent"]))
        return sketch

    def _add_numbers(self, numbers: Numbers | None) -> None:
        """Add numbers; None: some of the values were not numbers."""
        if numbers is None:
            self._widen(ColumnKind.TEXT)
            return
        self._widen(ColumnKind.INTEGER if numbers.dtype.kind == "i" else ColumnKind.NUMBER)
        if self.kind is not ColumnKind.TEXT:
            self.moments.add(numbers)
            self._quantiles.update(numbers.astype(np.float64))

    def _widen(self, kind: ColumnKind) -> None:
        self.kind = max(self.kind, kind)

    def _count(self, counts: Mapping[str, int]) -> None:
        if self.counts is None:
            self._sketch_all(counts)
            return
        for value, count in counts.items():
            self.counts[value] += count
        if len(self.counts) > self._exact_distinct:
            self._sketch()

    def _sketch(self) -> None:
        """Stop counting values one by one; sketch them from now on."""
        counts, self.counts = self.counts, None
        self._sketch_all(counts or {})

    def _sketch_all(self, counts: Mapping[str, int]) -> None:
        for value, count in counts.items():
            self._distinct.update(value)
            self._frequent.update(value, count)

    def _by_value(self, counts: Mapping[str, int]) -> Counter[float]:
        """Return the counts by number: texts such as 1 and 1.0 are added up."""
        by_value: Counter[float] = Counter()
        for text, count in counts.items():
            by_value[int(text) if self.kind is ColumnKind.INTEGER else float(text)] += count
        return by_value

    def _estimates(self) -> list[tuple[str, int]]:
        sure = self._library.frequent_items_error_type.NO_FALSE_POSITIVES
        return [(value, estimate) for value, estimate, _, _ in self._frequent.get_frequent_items(sure)]


def _parsed(texts: Sequence[str]) -> Numbers | None:
    """Return texts as numbers; None: not all of them are finite numbers."""
    match common_type(texts):
        case "int64":
            return np.array([int(text) for text in texts], np.int64)
        case "float64":
            numbers = np.array([float(text) for text in texts], np.float64)
            return numbers if np.isfinite(numbers).all() else None
    return None


def _shortest(number: float) -> str:
    """Return a number as text; a whole number without a fraction, as most people write it."""
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


@dataclass(slots=True)
class Analysis:
    """Statistics of the added records."""

    exact_distinct: int = EXACT_DISTINCT
    num_records: int = 0
    sketches: dict[str, ColumnSketch] = field(default_factory=dict)

    def add(self, cells: Mapping[str, Cells], num_records: int) -> None:
        """Add the cells of records.

        Raises:
            DataError: A package is missing.
        """
        for name, values in cells.items():
            if name not in self.sketches:
                self.sketches[name] = self._missing_so_far()
            self.sketches[name].add(values)
        for name in self.sketches.keys() - cells.keys():
            self.sketches[name].num_missing += num_records
        self.num_records += num_records

    def merge(self, other: Analysis) -> None:
        """Add the records of another analysis."""
        for name in sorted(self.sketches.keys() | other.sketches.keys()):
            own = self.sketches.setdefault(name, self._missing_so_far())
            if name in other.sketches:
                own.merge(other.sketches[name])
            else:
                own.num_missing += other.num_records
        self.num_records += other.num_records

    def dump(self) -> bytes:
        """Return the analysis as the content of a file."""
        columns = {name: sketch.dump() for name, sketch in self.sketches.items()}
        return zlib.compress(json.dumps({"records": self.num_records, "columns": columns}).encode(), 1)

    @classmethod
    def load(cls, data: bytes, exact_distinct: int = EXACT_DISTINCT) -> Analysis:
        """Load the result of `dump`.

        Raises:
            DataError: The content is damaged.
        """
        try:
            saved = json.loads(zlib.decompress(data))
            sketches = {name: ColumnSketch.load(part, exact_distinct) for name, part in saved["columns"].items()}
        except (zlib.error, ValueError, KeyError, TypeError) as error:
            raise DataError(f"The statistics of a task are damaged: {error}.") from error
        return cls(exact_distinct, saved["records"], sketches)

    def statistics(self, num_buckets: int, vocabulary_size: int) -> dict[str, Any]:
        """Return the statistics for users, as values for JSON.

        Args:
            num_buckets: Number of buckets for `boundaries`.
            vocabulary_size: Maximum number of values in `vocab`.
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
    """Return the statistics that `elasticdl analyze` would write for a table.

    Args:
        columns: The values of each column, the same number for each; None: missing.
        num_buckets: Number of buckets for `boundaries`.
        vocabulary_size: Maximum number of values in `vocab`.

    Raises:
        DataError: A package is missing, or a column contains both numbers and texts.
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
