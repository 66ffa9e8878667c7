"""Rows of PostgreSQL as tables of Arrow, and back, by COPY: about four times as fast as rows of Python values.

Only SELECTs whose columns are of types that CSV and Arrow hold without loss are read so; other ones are read as rows.
What is written has few types, so it goes in COPY's binary format, which no number is made a text for.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from elasticdl_client.errors import DataError
from elasticdl_client.sql.tokens import load as load_package

_BOOLEANS, _WHOLE, _FLOATS, _TEXTS = (16,), (20, 21, 23), (700, 701), (19, 25, 1042, 1043)  # pg_type.oid
_NUMERIC = 1700
_EXACT_DIGITS = 15  # that a float64 holds
_CHUNK_BYTES = 4 << 20
_WRITTEN_BYTES = 1 << 20
_FORMATS = {"double": ">f8", "int64": ">i8"}  # of numbers in the binary format of COPY, by Arrow's type
_BEGIN = b"PGCOPY\n\xff\r\n\0" + bytes(8)  # without flags and extensions
_END = b"\xff\xff"


def types_of(columns: Sequence[Any], as_numbers: Collection[str]) -> Mapping[str, Any] | None:
    """Return Arrow's type of each column; None: one needs Python's values.

    Args:
        columns: psycopg's description of a SELECT.
        as_numbers: the names of columns of which only the number matters, not its decimal places.
    """
    pyarrow = load_package("pyarrow")
    types: dict[str, Any] = {}
    for column in columns:
        is_short = column.precision is not None and column.precision <= _EXACT_DIGITS
        if column.type_code in _BOOLEANS:
            types[column.name] = pyarrow.bool_()
        elif column.type_code in _WHOLE:
            types[column.name] = pyarrow.int64()
        elif column.type_code in _FLOATS or (column.type_code == _NUMERIC and (is_short or column.name in as_numbers)):
            types[column.name] = pyarrow.float64()
        elif column.type_code in _TEXTS:
            types[column.name] = pyarrow.string()
        else:
            return None
    return types


def tables(connection: Any, select: str, types: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the rows of a SELECT as tables of Arrow, in its order.

    Args:
        connection: of psycopg, in the transaction to read in.
        types: of the columns.

    Raises:
        DataError: the database's texts are not UTF-8.
    """
    pyarrow, csv = load_package("pyarrow"), load_package("pyarrow.csv")
    parsing = csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False)
    converting = csv.ConvertOptions(
        column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False,
        true_values=["t"], false_values=["f"],
    )  # fmt: skip
    statement = f"COPY (\n{select}\n) TO STDOUT (FORMAT csv, ENCODING 'UTF8')"
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for chunk in _chunks(copy):
            reading = csv.ReadOptions(column_names=list(types), block_size=len(chunk) + 1)
            try:
                yield csv.read_csv(pyarrow.BufferReader(chunk), reading, parsing, converting)
            except pyarrow.ArrowInvalid as error:
                raise DataError(
                    f"The rows of the SELECT cannot be read: {error}.", "Check the encoding of the database's texts."
                ) from error


def load(connection: Any, name: str, table: Any) -> None:
    """Add the rows of a table of Arrow, which has no NULL, to a table.

    Args:
        connection: of psycopg, in the transaction to write in.
        name: of the table.
        table: of columns of the same names, whose types are those of `_FORMATS`, or texts; NaN stays NaN.
    """
    if not table.num_rows:
        return
    sql = load_package("psycopg.sql")
    is_text = load_package("pyarrow").types.is_string
    texts = [one.name for one in table.schema if is_text(one.type)]
    numbers = [one for one in table.column_names if one not in texts]
    statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT binary)").format(
        sql.Identifier(name), sql.SQL(", ").join(map(sql.Identifier, numbers + texts))
    )
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL client_encoding TO 'UTF8'")  # COPY's own ENCODING is for its other formats
        with cursor.copy(statement) as copy:
            copy.write(_BEGIN)
            rows = _rows(table, numbers, texts)
            for start in range(0, len(rows), _WRITTEN_BYTES):  # libpq keeps a copy of what it is given at once
                copy.write(rows[start : start + _WRITTEN_BYTES])
            copy.write(_END)


def _rows(table: Any, numbers: Sequence[str], texts: Sequence[str]) -> memoryview:
    """Return rows in the binary format of COPY: how many columns, then the length and the bytes of each."""
    numpy, compute = load_package("numpy"), load_package("pyarrow.compute")
    formats = [_FORMATS[str(table.schema.field(name).type)] for name in numbers]
    layout = [part for at, one in enumerate(formats) for part in ((f"length_{at}", ">i4"), (f"value_{at}", one))]
    fixed = numpy.empty(table.num_rows, [("columns", ">i2"), *layout])
    fixed["columns"] = len(numbers) + len(texts)
    for at, name in enumerate(numbers):
        fixed[f"length_{at}"] = 8
        fixed[f"value_{at}"] = table.column(name).to_numpy()
    parts = [_of_one_length(fixed)]
    for name in texts:
        values = table.column(name).combine_chunks().cast("large_binary")
        parts += [_of_one_length(compute.binary_length(values).to_numpy().astype(">i4")), values]
    joined = compute.binary_join_element_wise(*parts, load_package("pyarrow").scalar(b"", "large_binary"))
    _, ends, values = joined.buffers()
    size_bytes = int(numpy.frombuffer(ends, numpy.int64)[len(joined)])  # the buffer may be longer
    return memoryview(values)[:size_bytes]


def _of_one_length(values: Any) -> Any:
    """Return the bytes of an array of NumPy as an array of Arrow, one value each."""
    numpy, pyarrow = load_package("numpy"), load_package("pyarrow")
    ends = numpy.arange(len(values) + 1, dtype=numpy.int64) * values.itemsize
    buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(values)]
    return pyarrow.Array.from_buffers(pyarrow.large_binary(), len(values), buffers)


def _chunks(copy: Any) -> Iterator[bytes]:
    """Yield whole rows, some megabytes at once: libpq gives one row at a time."""
    rows = io.BytesIO()
    for row in copy:
        rows.write(row)
        if rows.tell() >= _CHUNK_BYTES:
            yield rows.getvalue()
            rows = io.BytesIO()
    if rows.tell():
        yield rows.getvalue()
