"""Convert records of any source to the values of each column.

A record is a row of a CSV file with a header, or a tf.train.Example; the type of a column is inferred from its
values, as in training.

`Moments`: number, sum, sum of squares, minimum and maximum of numbers, added exactly, so that the mean and the
deviation are bit-identical for any order of merging.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.data.example import parse_all
from elasticdl.data.reader import Metadata
from elasticdl.data.table_decoder import wrong_cell, wrong_row
from elasticdl.data.text import common_type, encoded, split_rows
from elasticdl_client.errors import DataError


@dataclass(slots=True)
class Cells:
    """The values of one column in some records.

    Attributes:
        texts: Values that the source has as text.
        numbers: Arrays [n] of values that the source has as numbers, int64 or float64.
        num_missing: Number of records without a value, and of missing values.
        are_texts: Texts are never parsed as numbers, because the source defines them as texts.
    """

    texts: list[str] = field(default_factory=list)
    numbers: list[Numbers] = field(default_factory=list)
    num_missing: int = 0
    are_texts: bool = False


@dataclass(frozen=True, slots=True)
class Columns:
    """Extracts the columns of a source from its records.

    Attributes:
        metadata: Metadata of the source.
        wanted: Names of columns to extract; empty: all.
        missing: Texts that mean a missing value, in addition to the empty text.
        declared_texts: Columns that the user has declared as string.
    """

    metadata: Metadata
    wanted: tuple[str, ...] = ()
    missing: frozenset[str] = frozenset()
    declared_texts: frozenset[str] = frozenset()

    def cells(self, records: Sequence[bytes]) -> dict[str, Cells]:
        """Return the values of each column.

        Raises:
            DataError: A record has no columns, or a text in a column of numbers.
        """
        if self.metadata.delimiter:
            return self._from_rows(records)
        images = {name for name, dtype in self.metadata.column_dtypes if dtype == "image"}
        parsed = {name: parts for name, parts in self._parsed(records).items() if name not in images}
        names = self.wanted or self.metadata.column_names or parsed.keys()
        return {name: self._collected(parsed.get(name, ()), len(records)) for name in names if name not in images}

    def _parsed(self, records: Sequence[bytes]) -> Mapping[str, Sequence[tuple[list[int], npt.NDArray[Any]]]]:
        try:
            return parse_all(records)
        except DataError as error:
            raise DataError(
                f"The records have no columns: {error.what}",
                "Statistics are for tables: CSV with a header, Parquet, SQL, records that are a tf.train.Example.",
            ) from error

    def _from_rows(self, records: Sequence[bytes]) -> dict[str, Cells]:
        names = self.metadata.column_names
        rows = split_rows(records, self.metadata.delimiter)
        for fields in rows:
            if len(fields) != len(names):
                raise wrong_row(len(fields), len(names), self.metadata.delimiter.join(fields))
        columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(names, ())
        found, dtypes = {}, dict(self.metadata.column_dtypes)
        for name in self.wanted or names:
            if name not in columns:
                raise DataError(f"The data have no column {name}, which --columns names.", f"They have {_list(names)}.")
            encoded(name, columns[name])  # raises here if a text cannot be encoded: statistics are JSON
            cells = Cells(are_texts=name in self._texts)
            self._add_texts(cells, columns[name])
            if dtypes.get(name) in ("int64", "float64"):
                _take_as_numbers(cells, name, dtypes[name])
            found[name] = cells
        return found

    @property
    def _texts(self) -> Collection[str]:
        """The columns of texts; the reader's guess is not used if texts among numbers can mean missing values."""
        guessed = () if self.missing else (name for name, dtype in self.metadata.column_dtypes if dtype == "string")
        return self.declared_texts.union(guessed)

    def _collected(self, parts: Sequence[tuple[list[int], npt.NDArray[Any]]], num_records: int) -> Cells:
        cells = Cells(are_texts=True)  # the model also treats a bytes feature as text
        num_present = 0
        for rows, values in parts:
            if not values.shape[1]:
                continue
            num_present += len(rows)
            if values.dtype == object:
                self._add_texts(cells, [value.decode(errors="backslashreplace") for value in values.ravel().tolist()])
            elif values.dtype.kind == "i":
                cells.numbers.append(values.ravel())
            else:
                numbers = values.ravel().astype(np.float64)
                kept = numbers[np.isfinite(numbers)]
                cells.numbers.append(kept)
                cells.num_missing += len(numbers) - len(kept)
        cells.num_missing += num_records - num_present
        return cells

    def _add_texts(self, cells: Cells, texts: Sequence[str]) -> None:
        kept = [text for text in texts if (stripped := text.strip()) and stripped not in self.missing]
        cells.texts += kept
        cells.num_missing += len(texts) - len(kept)


def _take_as_numbers(cells: Cells, name: str, dtype: str) -> None:
    """Convert the texts of a numeric column to numbers; numbers that are not finite count as missing.

    Raises:
        DataError: A text is not a number.
    """
    kind = common_type(cells.texts)
    if kind == "string":
        value = next(text for text in cells.texts if common_type((text,)) == "string")
        error = wrong_cell(name, dtype, value)
        raise DataError(error.what, f"{error.hint}; --missing_values={shlex.quote(value[:200])} counts it as missing.")
    numbers: Numbers = np.array(cells.texts, np.float64)
    if kind == "int64":
        numbers = np.array(cells.texts, np.int64)
    kept: Numbers = numbers[np.isfinite(numbers)]
    cells.texts = []
    cells.numbers.append(kept)
    cells.num_missing += len(numbers) - len(kept)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


Numbers = npt.NDArray[np.float64] | npt.NDArray[np.int64]

_MANTISSA_BITS = 53
_ROOT_BITS = 64
_SCALE = 1074 + _MANTISSA_BITS  # every double is a multiple of 2 ** -_SCALE


@dataclass(slots=True)
class Moments:
    """Exact sums over numbers; initially there are none.

    Attributes:
        count: Number of numbers.
        total: Sum, in units of 2 ** -_SCALE.
        squares: Sum of squares, in units of 2 ** (-2 * _SCALE).
        smallest: Minimum.
        largest: Maximum.
    """

    count: int = 0
    total: int = 0
    squares: int = 0
    smallest: float = float("inf")
    largest: float = float("-inf")

    def add(self, numbers: Numbers) -> None:
        """Add finite numbers."""
        if not len(numbers):
            return
        self.count += len(numbers)
        self.smallest = min(self.smallest, numbers.min().item())
        self.largest = max(self.largest, numbers.max().item())
        if numbers.dtype.kind == "i":
            self._add(numbers, _SCALE)
            return
        mantissas, exponents = np.frexp(numbers)
        whole = np.ldexp(mantissas, _MANTISSA_BITS).astype(np.int64)
        for exponent in np.unique(exponents).tolist():
            self._add(whole[exponents == exponent], exponent - _MANTISSA_BITS + _SCALE)

    def _add(self, whole: npt.NDArray[Any], shift: int) -> None:
        values = whole.tolist()
        self.total += sum(values) << shift
        self.squares += sum(value * value for value in values) << (2 * shift)

    def merge(self, other: Moments) -> None:
        """Add the numbers of another one."""
        self.count += other.count
        self.total += other.total
        self.squares += other.squares
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    @property
    def mean(self) -> float:
        return float(Fraction(self.total, self.count << _SCALE))

    @property
    def deviation(self) -> float:
        """The population standard deviation: the sum of squares is divided by n, not by n − 1."""
        square = self.count * self.squares - self.total**2  # (count · deviation)²; it exceeds the range of floats
        return float(Fraction(math.isqrt(square << (2 * _ROOT_BITS)), self.count << (_SCALE + _ROOT_BITS)))

    def dump(self) -> list[Any]:
        """Return the sums as values for JSON."""
        return [self.count, hex(self.total), hex(self.squares), self.smallest, self.largest]

    @classmethod
    def load(cls, saved: list[Any]) -> Moments:
        count, total, squares, smallest, largest = saved
        return cls(count, int(total, 16), int(squares, 16), smallest, largest)
