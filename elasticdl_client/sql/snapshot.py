"""The rows of a SELECT as Parquet files, which jobs read: written once, in the forms of a model's inputs."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from elasticdl_client.data_sources import ROW
from elasticdl_client.errors import DataError
from elasticdl_client.sql.tokens import load

LABEL = "elasticdl_label"
_OF_OURS = "elasticdl_"
_ROWS_PER_FILE = 50_000


@dataclass(frozen=True, slots=True)
class Field:
    """A column of the files.

    Attributes:
        name: in the files.
        column: in the SELECT.
        form: `number` (float64, NaN: missing), `text` (empty: missing), `class` (int64) or `row` (int64).
    """

    name: str
    column: str
    form: str


def input_fields(inputs: Iterable[tuple[str, str]]) -> list[Field]:
    """Return the columns of a model's inputs: each (column, form) under a name that a model's input may have."""
    fields: list[Field] = []
    taken: set[str] = set()
    for column, form in inputs:
        is_plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", column) and not column.lower().startswith(_OF_OURS)
        name = column if is_plain else f"column_{len(fields)}"
        while name.lower() in taken:
            name += f"_{form}"
        taken.add(name.lower())
        fields.append(Field(name, column, form))
    return fields


def only_numbers(fields: Iterable[Field]) -> set[str]:
    """Return the columns of which fields take numbers and nothing else."""
    listed = list(fields)
    return {one.column for one in listed} - {one.column for one in listed if one.form != "number"}


def write(
    parts: Iterable[Any],
    columns: Sequence[str],
    fields: Sequence[Field],
    directory: Path,
    classes: Sequence[Any] = (),
    seed: int | None = None,
) -> int:
    """Write rows to files of a new directory, which is there when it is whole; how many rows there are.

    Args:
        parts: of the rows of a SELECT: tables of Arrow, or lists of rows.
        columns: Columns of the SELECT.
        fields: Fields of the files.
        classes: the label's values, whose places are written.
        seed: rows are permuted within a file; None: they keep their order.

    Raises:
        DataError: a value is not of its column's form, or the files cannot be written.
    """
    parquet = load("pyarrow.parquet")
    repeating = [field.name for field in fields if field.form in ("text", "class")]
    unfinished = directory.with_name(f".{directory.name}.new")
    num_rows = 0
    try:
        unfinished.mkdir(parents=True)
        for number, table in enumerate(converted(parts, columns, fields, classes, seed)):
            parquet.write_table(table, unfinished / f"part-{number:05d}.parquet", use_dictionary=repeating or False)
            num_rows += table.num_rows
        os.replace(unfinished, directory)
    except OSError as error:
        raise DataError(
            f"The rows cannot be written to {directory}: {error.strerror}.", "Make room, or name another --models_dir."
        ) from error
    return num_rows


def converted(
    parts: Iterable[Any],
    columns: Sequence[str],
    fields: Sequence[Field],
    classes: Sequence[Any] = (),
    seed: int | None = None,
) -> Iterator[Any]:
    """Yield rows as tables of Arrow with some fields, of equal length but for the last.  Arguments: see `write`.

    Raises:
        DataError: a value is not of its column's form.
    """
    converter = _Converter(columns, fields, {value: at for at, value in enumerate(classes)})
    num_rows = 0
    for number, table in enumerate(_in_files(converter.table(part) for part in parts)):
        yield table if seed is None else _permuted(table, seed + number)
        num_rows += table.num_rows
        if sys.stderr.isatty():
            print(f"\r{num_rows:,} rows read", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)


def numbered(table: Any, first: int) -> Any:
    """Return a table of Arrow with numbers of its rows, from `first`, unless it has them."""
    if ROW in table.column_names:
        return table
    pyarrow = load("pyarrow")
    return table.append_column(ROW, pyarrow.array(range(first, first + table.num_rows), pyarrow.int64()))


def natural(value: Any) -> Any:
    """Return a value of a database as JSON can hold it: a number, true or false, or a text."""
    if isinstance(value, Decimal):
        return float(value)
    return value if isinstance(value, bool | int | float) else str(value)


def _in_files(tables: Iterable[Any]) -> Iterator[Any]:
    """Yield tables of equal length, but for the last one."""
    pyarrow = load("pyarrow")
    waiting: list[Any] = []
    num_rows = 0
    for table in tables:
        waiting.append(table)
        num_rows += table.num_rows
        while num_rows >= _ROWS_PER_FILE:
            whole = pyarrow.concat_tables(waiting)
            yield whole.slice(0, _ROWS_PER_FILE)
            waiting = [whole.slice(_ROWS_PER_FILE)]
            num_rows -= _ROWS_PER_FILE
    if num_rows:
        yield pyarrow.concat_tables(waiting)


def _permuted(table: Any, seed: int) -> Any:
    compute = load("pyarrow.compute")
    return table.take(compute.array_sort_indices(compute.random(table.num_rows, initializer=seed)))


class _Converter:
    """Makes tables of fields of a database's rows: at once where all are of the usual types, else one by one."""

    def __init__(self, columns: Sequence[str], fields: Sequence[Field], places: Mapping[Any, int]) -> None:
        self._pyarrow, self._compute = load("pyarrow"), load("pyarrow.compute")
        self._columns, self._fields, self._places = columns, fields, places

    def table(self, part: Any) -> Any:
        """Return a part of the rows, a table of Arrow or a list, with the columns of the files.

        Raises:
            DataError: a value is not of its form.
        """
        if isinstance(part, self._pyarrow.Table):
            arrays = [self._of_arrow(field, part.column(field.column)) for field in self._fields]
        else:
            values = dict(zip(self._columns, zip(*part, strict=True), strict=True))
            arrays = [self._of_values(field, values[field.column]) for field in self._fields]
        for field, array in zip(self._fields, arrays, strict=True):
            if field.name == LABEL and field.form == "number":
                self._check_label(field, array)
        return self._pyarrow.Table.from_arrays(arrays, [field.name for field in self._fields])

    def _check_label(self, field: Field, numbers: Any) -> None:
        if not self._compute.all(self._compute.is_finite(numbers), min_count=0).as_py():
            raise DataError(
                f"The label {field.column} is NULL, NaN or infinite in some rows.", "Leave them out by WHERE."
            )

    def _of_values(self, field: Field, values: Sequence[Any]) -> Any:
        pyarrow, kinds = self._pyarrow, set(map(type, values))
        if field.form == "text":
            if kinds <= {str, type(None)}:
                return self._trimmed(pyarrow.array(values, pyarrow.string()))
            return pyarrow.array(["" if value is None else _text(value) for value in values], pyarrow.string())
        if field.form == "number":
            if kinds <= {float, type(None)}:
                return pyarrow.array(values, pyarrow.float64()).fill_null(math.nan)
            numbers = map(float, values) if kinds == {int} else (_number(field, value) for value in values)
            return pyarrow.array(list(numbers), pyarrow.float64())
        if field.form == "row":
            return pyarrow.array(values, pyarrow.int64())
        if kinds <= {int, str, bool} and self._places.keys() >= set(values):
            return pyarrow.array([self._places[value] for value in values], pyarrow.int64())
        return pyarrow.array([_class(field, value, self._places) for value in values], pyarrow.int64())

    def _of_arrow(self, field: Field, column: Any) -> Any:
        pyarrow, types = self._pyarrow, self._pyarrow.types
        if field.form == "text":
            if types.is_string(column.type):
                return self._trimmed(column)
            return self._by_value(column, lambda value: "" if value is None else _text(value), pyarrow.string())
        if field.form == "number":
            if types.is_string(column.type):
                for value in column.drop_null().to_pylist()[:1]:
                    _number(field, value)  # which refuses it
            return column.cast(pyarrow.float64(), safe=False).fill_null(math.nan)
        if field.form == "row":
            return column
        return self._by_value(column, lambda value: _class(field, value, self._places), pyarrow.int64())

    def _trimmed(self, texts: Any) -> Any:
        return self._compute.utf8_trim_whitespace(texts.fill_null(""))

    def _by_value(self, column: Any, convert: Callable[[Any], Any], kind: Any) -> Any:
        """Return a column with each of its values converted once."""
        encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
        converted = self._pyarrow.array([convert(value) for value in encoded.dictionary.to_pylist()], kind)
        return converted.take(encoded.indices)


def _number(field: Field, value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, int | float | Decimal):
        return float(value)
    raise DataError(
        f"The column {field.column} holds {str(value)[:50]!r}, where the model takes numbers.",
        f"Convert it in the SELECT: CAST({field.column} AS DECIMAL(20, 6)) AS {field.column}.",
    )


def _class(field: Field, value: Any, places: Mapping[Any, int]) -> int:
    place = places.get(natural(value)) if value is not None else None
    if place is None:
        known = ", ".join(str(one) for one in list(places)[:10])
        raise DataError(
            f"The label {field.column} is {'NULL' if value is None else repr(str(value)[:50])}, which is no class.",
            f"The classes are {known}: leave such rows out by WHERE.",
        )
    return place


def _text(value: Any) -> str:
    """Return a value as the vocabularies of `elasticdl analyze` have it: whole numbers without a fraction."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float | Decimal) and math.isfinite(value) and value == int(value):
        return str(int(value))
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace").strip()
    return str(float(value)) if isinstance(value, Decimal) else str(value).strip()
