"""The rows of a SELECT as Parquet files, which jobs read: written once, in the forms of a model's inputs."""

from __future__ import annotations

import math
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from elasticdl_client.errors import DataError
from elasticdl_client.sql.tokens import load

LABEL = "elasticdl_label"
ROW = "elasticdl_row"
_OF_OURS = "elasticdl_"
_ROWS_PER_FILE = 50_000
Value = Callable[[Any], Any]


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


def write(
    rows: Iterable[list[Sequence[Any]]],
    columns: Sequence[str],
    fields: Sequence[Field],
    directory: Path,
    classes: Sequence[Any] = (),
    seed: int | None = None,
) -> int:
    """Write rows to files of a new directory, which is there when it is whole; how many rows there are.

    Args:
        rows: of a SELECT, in parts.
        columns: of the SELECT.
        fields: of the files.
        classes: the label's values, whose places are written.
        seed: rows are permuted within a file; None: they keep their order.

    Raises:
        DataError: a value is not of its column's form, or the files cannot be written.
    """
    pyarrow, parquet = load("pyarrow"), load("pyarrow.parquet")
    converter = _Converter({value: at for at, value in enumerate(classes)})
    at = {name: number for number, name in enumerate(columns)}
    shuffle = random.Random(seed).shuffle if seed is not None else None
    unfinished = directory.with_name(f".{directory.name}.new")
    num_rows = 0
    try:
        unfinished.mkdir(parents=True)
        for number, part in enumerate(_in_files(rows)):
            if shuffle is not None:
                shuffle(part)
            values = list(zip(*part, strict=True))
            arrays = [converter.array(field, values[at[field.column]]) for field in fields]
            table = pyarrow.Table.from_arrays(arrays, [field.name for field in fields])
            parquet.write_table(table, unfinished / f"part-{number:05d}.parquet")
            num_rows += len(part)
            if sys.stderr.isatty():
                print(f"\r{num_rows:,} rows read", end="", file=sys.stderr, flush=True)
        os.replace(unfinished, directory)
    except OSError as error:
        raise DataError(
            f"The rows cannot be written to {directory}: {error.strerror}.", "Make room, or name another --models_dir."
        ) from error
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return num_rows


def natural(value: Any) -> Any:
    """Return a value of a database as JSON can hold it: a number, true or false, or a text."""
    if isinstance(value, Decimal):
        return float(value)
    return value if isinstance(value, bool | int | float) else str(value)


def _in_files(rows: Iterable[list[Sequence[Any]]]) -> Iterator[list[Sequence[Any]]]:
    waiting: list[Sequence[Any]] = []
    for part in rows:
        waiting += part
        while len(waiting) >= _ROWS_PER_FILE:
            yield waiting[:_ROWS_PER_FILE]
            del waiting[:_ROWS_PER_FILE]
    if waiting:
        yield waiting


class _Converter:
    """Makes arrays of Arrow of a database's values: at once where all are of the usual types, else one by one."""

    def __init__(self, places: Mapping[Any, int]) -> None:
        self._pyarrow, self._compute = load("pyarrow"), load("pyarrow.compute")
        self._places = places

    def array(self, field: Field, values: Sequence[Any]) -> Any:
        """Return the array of a column.

        Raises:
            DataError: a value is not of its form.
        """
        pyarrow, kinds = self._pyarrow, set(map(type, values))
        if field.form == "text":
            if kinds <= {str, type(None)}:
                texts = pyarrow.array(values, pyarrow.string()).fill_null("")
                return self._compute.utf8_trim_whitespace(texts)
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


def _number(field: Field, value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, int | float | Decimal):
        return float(value)
    raise DataError(
        f"The column {field.column} holds {str(value)[:50]!r}, where the model takes numbers.",
        f"Convert it in the SELECT: CAST({field.column} AS REAL) AS {field.column}.",
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
    if isinstance(value, float | Decimal) and value == int(value):
        return str(int(value))
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace").strip()
    return str(float(value)) if isinstance(value, Decimal) else str(value).strip()
