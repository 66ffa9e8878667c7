"""Records of any source as the values of each of their columns.

A record is a row of a CSV file with a header, or a tf.train.Example; what a column holds is found out from its
values, by the rule of training.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.analysis.moments import Numbers
from elasticdl.data.default_feed import wrong_cell
from elasticdl.data.example_parser import parse_all
from elasticdl.data.reader import Metadata
from elasticdl.data.text_types import common_type, split_rows
from elasticdl_client.errors import DataError


@dataclass(slots=True)
class Cells:
    """The values of one column in some records.

    Attributes:
        texts: values that came as text.
        numbers: arrays [n] of values that came as numbers, int64 or float64.
        num_missing: records without a value, and values that are missing.
        are_texts: the source says that texts are texts, also those that look like numbers.
    """

    texts: list[str] = field(default_factory=list)
    numbers: list[Numbers] = field(default_factory=list)
    num_missing: int = 0
    are_texts: bool = False


@dataclass(frozen=True, slots=True)
class Columns:
    """How the columns of a source are found.

    Attributes:
        metadata: of the source.
        wanted: names; empty: all.
        missing: texts that stand for a missing value, beside the empty one.
        declared_texts: columns whose type the user has named: string.
    """

    metadata: Metadata
    wanted: tuple[str, ...] = ()
    missing: frozenset[str] = frozenset()
    declared_texts: frozenset[str] = frozenset()

    def cells(self, records: Sequence[bytes]) -> dict[str, Cells]:
        """The values of each column.

        Raises:
            DataError: a record has no columns, or a text where the reader says that there are numbers.
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
                shown = self.metadata.delimiter.join(fields)[:200]
                raise DataError(f"A row has {len(fields)} fields, the header {len(names)}: {shown}")
        columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(names, ())
        found, dtypes = {}, dict(self.metadata.column_dtypes)
        for name in self.wanted or names:
            if name not in columns:
                raise DataError(f"The data have no column {name}, which --columns names.", f"They have {_list(names)}.")
            cells = Cells(are_texts=name in self._texts)
            self._add_texts(cells, columns[name])
            if dtypes.get(name) in ("int64", "float64"):
                _take_as_numbers(cells, name, dtypes[name])
            found[name] = cells
        return found

    @property
    def _texts(self) -> Collection[str]:
        """Return the columns of texts.  Texts for missing values among numbers mislead the reader's guess."""
        guessed = () if self.missing else (name for name, dtype in self.metadata.column_dtypes if dtype == "string")
        return self.declared_texts.union(guessed)

    def _collected(self, parts: Sequence[tuple[list[int], npt.NDArray[Any]]], num_records: int) -> Cells:
        cells = Cells(are_texts=True)  # a bytes feature is one for the model, too
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
    """Make numbers of the texts of a column that holds numbers; those that are not finite are missing values.

    Raises:
        DataError: one is no number.
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
