"""Arrow tables to records: the types that a record's columns have, and its bytes.

Whole numbers, truth values, dates and times become int64 (times: microseconds), fractions and decimals floats, text
and binary strings bytes; lists keep their values; a struct becomes a column for each field, `struct.field`.  A missing
fraction is NaN, a missing string is empty, a missing whole number is a feature without a value.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from elasticdl.data.columns import ColumnType
from elasticdl.data.table_encoder import Lists, Numbers, TableColumn, TextLists, Texts, encode_table
from elasticdl_client.errors import DataError

_HINT = "Name the columns to read with --columns, or convert this one when you write the data."


def flat_schema(schema: Any) -> Any:
    """A schema with structs taken apart."""
    return flat_table(schema.empty_table()).schema


def flat_table(table: Any) -> Any:
    """A table with structs taken apart."""
    while any(kinds.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return table


def column_type(field: Any, where: str) -> ColumnType:
    """Return the type of a column's values in records.

    Raises:
        DataError: a type that a record cannot hold.
    """
    kind, shape = field.type, []
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    while kinds.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    if not shape and (kinds.is_list(kind) or kinds.is_large_list(kind)):
        shape, kind = [-1], kind.value_type
    if kinds.is_dictionary(kind):
        kind = kind.value_type
    return ColumnType(_dtype(kind, field, where), tuple(shape))


def encode(table: Any, where: str) -> list[bytes]:
    """Each row as a serialized tf.train.Example.

    Raises:
        DataError: a type, or a value, that a record cannot hold.
    """
    table = flat_table(table)
    columns: dict[str, TableColumn] = {}
    for field in table.schema:
        kind = column_type(field, where)
        array = _one_array(table.column(field.name))
        try:
            columns[field.name] = _column(array, kind)
        except pa.ArrowException as error:
            raise DataError(f"{where}: column {field.name}: {error}.", _HINT) from error
    return encode_table(columns, table.num_rows)


def _dtype(kind: Any, field: Any, where: str) -> str:
    if kinds.is_floating(kind) or kinds.is_decimal(kind):
        return "float64"
    if kinds.is_integer(kind) or kinds.is_boolean(kind) or kinds.is_temporal(kind):
        return "int64"
    if any(check(kind) for check in (kinds.is_string, kinds.is_large_string, kinds.is_string_view)):
        return "string"
    if any(check(kind) for check in (kinds.is_binary, kinds.is_large_binary, kinds.is_fixed_size_binary)):
        return "string"
    raise DataError(f"{where}: column {field.name} is of type {field.type}, which no record can hold.", _HINT)


def _one_array(column: Any) -> Any:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array


def _column(array: Any, kind: ColumnType) -> TableColumn:
    if kinds.is_dictionary(array.type):
        array = array.dictionary_decode()
    if not kind.shape:
        return Texts(_texts(array)) if kind.dtype == "string" else _numbers(array, kind)
    if kind.shape == (-1,):
        return _lists(array, kind)
    width = math.prod(kind.shape)
    if array.null_count:
        raise pa.ArrowInvalid("a list of fixed size is missing")
    while kinds.is_fixed_size_list(array.type):
        array = array.flatten()
    if kind.dtype == "string":
        texts = _texts(array)
        return TextLists([texts[start : start + width] for start in range(0, len(texts), width)])
    values = _values(array, kind)
    if array.null_count:
        raise pa.ArrowInvalid("a list holds a missing value")
    return Numbers(values.reshape(-1, width))


def _lists(array: Any, kind: ColumnType) -> TableColumn:
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    flat = array.flatten()
    if kinds.is_dictionary(flat.type):
        flat = flat.dictionary_decode()
    if kind.dtype == "string":
        texts, places = _texts(flat), offsets.tolist()
        return TextLists([texts[begin:end] for begin, end in itertools.pairwise(places)])
    if flat.null_count and kind.dtype == "int64":
        raise pa.ArrowInvalid("a list holds a missing whole number")
    return Lists(_values(flat, kind), offsets)


def _numbers(array: Any, kind: ColumnType) -> Numbers:
    missing = None
    if array.null_count and kind.dtype == "int64":
        missing = array.is_null().to_numpy(zero_copy_only=False)
    return Numbers(_values(array, kind), missing)


def _values(array: Any, kind: ColumnType) -> Any:
    if kind.dtype == "float64":
        if not kinds.is_floating(array.type):
            array = pc.cast(array, pa.float64())
        return array.to_numpy(zero_copy_only=False)  # NaN where a value is missing
    if kinds.is_timestamp(array.type):
        array = pc.cast(array, pa.timestamp("us", array.type.tz), safe=False)
    elif kinds.is_date32(array.type) or kinds.is_time32(array.type):
        array = pc.cast(array, pa.int32())
    if array.type != pa.int64():
        array = pc.cast(array, pa.int64())
    if array.null_count:
        array = pc.fill_null(array, 0)
    return array.to_numpy(zero_copy_only=False)


def _texts(array: Any) -> list[bytes]:
    """The bytes of each value, cut out of Arrow's own buffer."""
    if array.type != pa.large_binary():
        array = pc.cast(array, pa.large_binary())
    if not len(array):
        return []
    _, offsets_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[array.offset : array.offset + len(array) + 1]
    begin = int(offsets[0])
    size = int(offsets[-1]) - begin
    data = data_buffer.slice(begin, size).to_pybytes() if data_buffer is not None and size else b""
    places = (offsets - begin).tolist()
    texts = [data[a:b] for a, b in itertools.pairwise(places)]
    if array.null_count:
        for row in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            texts[row] = b""
    return texts
