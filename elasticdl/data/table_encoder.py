"""Encode rows of typed sources (Parquet, SQL, …) as tf.train.Example messages; select the columns of a source.

Works column by column; per record only pieces of bytes are joined.  Float features of fixed size come first, then all
others, each sorted by name, so that a row always gives the same bytes, regardless of the rows read with it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.example import pack_varints, varint
from elasticdl.data.reader import Metadata
from elasticdl_client.errors import DataError

_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_EXACT_IN_FLOAT32, _EXACT_IN_FLOAT64 = 1 << 24, 1 << 53  # largest n such that all integers up to n are exact
_log = logging.getLogger("elasticdl.data")


@dataclass(frozen=True, slots=True)
class Numbers:
    """A fixed number of numbers in each row.

    Attributes:
        values: Array of shape (rows, …).
        missing: Whether each row has no value, (rows,); None: all rows have values.
    """

    values: NDArray[Any]
    missing: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Lists:
    """Any number of numbers in each row.

    Attributes:
        values: The values of all rows, concatenated.
        offsets: The begin of each row in the values, and the end of the last row.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Texts:
    """One bytes value in each row."""

    values: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class TextLists:
    """Any number of bytes values in each row."""

    values: Sequence[Sequence[bytes]]


TableColumn: TypeAlias = Numbers | Lists | Texts | TextLists


class _Heads(dict[int, bytes]):
    """Maps the size of a feature's packed values to the bytes that precede them; computed on demand."""

    def __init__(self, name: bytes, kind: int, is_list: bool, may_be_nothing: bool) -> None:
        """
        Args:
            name: Name of the feature.
            kind: Field number of the list in tf.train.Feature.
            is_list: The following bytes are the whole list, not the single packed piece in it.
            may_be_nothing: Size 0 means a list without values.
        """
        super().__init__()
        self._name = _field(1, name)
        self._kind = kind
        self._is_list = is_list
        self._may_be_nothing = may_be_nothing

    def __missing__(self, size: int) -> bytes:
        if size == 0 and self._may_be_nothing:
            feature = b""
        else:
            piece = b"" if self._is_list else _head(1, size)
            feature = _head(self._kind, len(piece) + size) + piece
        payload = size if feature else 0
        value = _head(2, len(feature) + payload) + feature
        found = self[size] = _head(1, len(self._name) + len(value) + payload) + self._name + value
        return found


class _RecordHeads(dict[int, bytes]):
    def __missing__(self, size: int) -> bytes:
        found = self[size] = _head(1, size)
        return found


def encode_table(columns: Mapping[str, TableColumn], num_rows: int, is_exact: bool = False) -> list[bytes]:
    """Return one serialized tf.train.Example per row.

    Args:
        columns: Columns by name, all with `num_rows` rows.
        num_rows: Number of rows.
        is_exact: See `Selection`; `exact_fractions` decodes such values.
    """
    if is_exact:
        columns = {name: _exact(column) for name, column in columns.items()}
    for name, column in columns.items():
        if isinstance(column, Numbers) and column.values.dtype == np.float64:
            warn_if_rounded(name, column.values)
    if not columns:
        return [b"\x0a\x00"] * num_rows
    blocks = [name for name in sorted(columns) if _is_fixed(columns[name])]
    pieces = [_block({name: columns[name] for name in blocks}, num_rows)] if blocks else []
    for name in sorted(set(columns) - set(blocks)):
        pieces.append(_entries(name.encode(), columns[name]))
    heads = _RecordHeads()
    bodies = pieces[0] if len(pieces) == 1 else [b"".join(parts) for parts in zip(*pieces, strict=True)]
    return [heads[len(body)] + body for body in bodies]


def exact_fractions(values: Sequence[bytes]) -> NDArray[np.floating[Any]]:
    """Return the floating-point numbers [rows] of a column encoded with `is_exact`, in their original precision."""
    sizes = {len(value) for value in values}
    if len(sizes) == 1:
        return np.frombuffer(b"".join(values), f"<f{sizes.pop()}")
    return np.concatenate([np.frombuffer(value, f"<f{len(value)}") for value in values] or [np.zeros(0)])


def warn_if_rounded(name: str, values: NDArray[np.float64]) -> None:
    """Warn once per column of floats that are whole numbers, if float32 rounds some of them: they may be ids.

    Args:
        name: Name of the column.
        values: Values of the column; NaN: missing.
    """
    sizes = np.abs(values)
    if not (sizes > _EXACT_IN_FLOAT32).any():
        return
    known = values[sizes < _EXACT_IN_FLOAT64]  # larger floats are always whole
    if (known.astype(np.float32) != known).any() and (known == np.floor(known)).all():
        _warn_of_rounded(name)


@functools.cache
def _warn_of_rounded(name: str) -> None:
    _log.warning(
        "The column %s holds whole numbers as fractions, of which float32 rounds those beyond %d: if they are ids, "
        "write them as whole numbers, none missing, or as texts",
        name,
        _EXACT_IN_FLOAT32,
    )


def _exact(column: TableColumn) -> TableColumn:
    if not isinstance(column, Numbers) or column.values.dtype.kind != "f" or column.values.ndim > 1:
        return column
    size = min(column.values.dtype.itemsize, 8)
    data = column.values.astype(f"<f{size}").tobytes()
    return Texts([data[begin : begin + size] for begin in range(0, len(data), size)])


def _is_fixed(column: TableColumn) -> bool:
    """Return whether all rows of a column are encoded in the same number of bytes."""
    return isinstance(column, Numbers) and column.values.dtype.kind == "f" and column.missing is None


def _block(columns: Mapping[str, TableColumn], num_rows: int) -> list[bytes]:
    """Return the map entries of several float columns, one piece per row."""
    parts: list[NDArray[np.uint8]] = []
    for name, column in columns.items():
        assert isinstance(column, Numbers)
        packed = np.ascontiguousarray(column.values.reshape(num_rows, -1), "<f4").view(np.uint8)
        head = _Heads(name.encode(), _FLOAT_LIST, is_list=False, may_be_nothing=True)[packed.shape[1]]
        parts.append(np.broadcast_to(np.frombuffer(head, np.uint8), (num_rows, len(head))))
        parts.append(packed)
    block = np.concatenate(parts, axis=1)
    size, data = block.shape[1], block.tobytes()
    return [data[begin : begin + size] for begin in range(0, num_rows * size, size)]


def _entries(name: bytes, column: TableColumn) -> list[bytes]:
    """Return the map entries of one column, one per row."""
    match column:
        case Numbers(values, missing):
            width = math.prod(values.shape[1:])
            offsets = np.arange(len(values) + 1, dtype=np.int64) * width
            pieces = _packed(values.reshape(-1), offsets)
            if missing is not None:
                for row in np.flatnonzero(missing).tolist():
                    pieces[row] = b""
            heads = _Heads(name, _kind(values), is_list=False, may_be_nothing=True)
        case Lists(values, offsets):
            pieces = _packed(values, offsets)
            heads = _Heads(name, _kind(values), is_list=False, may_be_nothing=True)
        case Texts(texts):
            pieces = list(texts)
            heads = _Heads(name, _BYTES_LIST, is_list=False, may_be_nothing=False)
        case TextLists(rows):
            pieces = [b"".join([_field(1, item) for item in row]) for row in rows]
            heads = _Heads(name, _BYTES_LIST, is_list=True, may_be_nothing=True)
    return [heads[len(piece)] + piece for piece in pieces]


def _kind(values: NDArray[Any]) -> int:
    return _FLOAT_LIST if values.dtype.kind == "f" else _INT64_LIST


def _packed(values: NDArray[Any], offsets: NDArray[np.int64]) -> list[bytes]:
    """Return the packed numbers of each row."""
    if values.dtype.kind == "f":
        data, places = values.astype("<f4").tobytes(), offsets * 4
    else:
        data, ends = pack_varints(values.astype(np.int64).reshape(-1, 1))
        places = np.concatenate([np.zeros(1, np.int64), ends])[offsets]
    return [data[begin:end] for begin, end in itertools.pairwise(places.tolist())]


def _head(number: int, size: int) -> bytes:
    return bytes([number << 3 | 2]) + varint(size)


def _field(number: int, content: bytes) -> bytes:
    return _head(number, len(content)) + content


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The type of a column.

    Attributes:
        dtype: "int64", "float64", "string" or "image".
        shape: Shape of the values in one record; (-1,): it varies.
        unit: Unit of dates and times; empty: plain numbers.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    unit: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.dtype, str(list(self.shape)) if self.shape else "", self.unit)))


@dataclass(frozen=True, slots=True)
class Selection:
    """The user's choice of columns.

    Attributes:
        features: Names from --columns, without the label; empty: all columns.
        label: Name from --label_column; may be empty.
        is_exact: Encode single floating-point numbers as bytes in their own precision, instead of float32 as usual in
            a tf.train.Example.
        dtypes: Types from column_dtypes.  For CSV files: the types that are not inferred.  For other files: "float64"
            for columns of whole numbers with missing values.
    """

    features: tuple[str, ...] = ()
    label: str = ""
    is_exact: bool = False
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(name for name in self.features if name != self.label))

    def of(self, available: Sequence[str], where: str) -> list[str]:
        """Return the columns to read, in the order of the source.  A missing label is ignored: predictions need none.

        Args:
            available: The columns of the source.
            where: The source, for messages.

        Raises:
            DataError: A selected column does not exist.
        """
        unknown = next((name for name in self.dtypes if name not in available), None)
        if unknown is not None:
            raise DataError(
                f"{where} has no column {unknown}, which column_dtypes names.",
                f"It has: {', '.join(available) or 'none'}.",
            )
        known, wanted = set(available), set(self.features or available)
        missing = next((name for name in self.features if name not in known), None)
        if missing is not None:
            raise DataError(
                f"{where} has no column {missing}, which --columns names.", f"It has: {', '.join(available) or 'none'}."
            )
        return [name for name in available if name in wanted or name == self.label]

    def typed(self, types: Mapping[str, ColumnType], where: str) -> dict[str, ColumnType]:
        """Return types of columns, with float64 instead of int64 if column_dtypes requests it.

        Raises:
            DataError: A column in column_dtypes has another type.
        """
        found = dict(types)
        for name in set(self.dtypes) & set(types):
            if types[name] == ColumnType("int64"):
                found[name] = ColumnType("float64")
            elif types[name] != ColumnType("float64"):
                raise DataError(
                    f"{where}: column {name} is {types[name]}, and column_dtypes names it.",
                    "Of this kind of data only whole numbers can be read as float64, where missing ones are NaN.",
                )
        return found


def check_same(types: Mapping[str, ColumnType], path: str, expected: Mapping[str, ColumnType], first: str) -> None:
    """Check that one part of a source has the same columns as the first part.

    Raises:
        DataError: A column is missing, new or has another type.
    """
    different = next((name for name in [*types, *expected] if types.get(name) != expected.get(name)), None)
    if different is not None:
        raise DataError(
            f"The column {different} of {path} is not that of {first}: {types.get(different, 'missing')}, "
            f"not {expected.get(different, 'missing')}.",
            "All files of a data source must have the same columns of the same types.",
        )


def describe(types: Mapping[str, ColumnType], selection: Selection, seed: int, delimiter: str = "") -> Metadata:
    """Return the metadata of a source with these columns."""
    return Metadata(
        column_names=tuple(types),
        column_dtypes=tuple((name, kind.dtype) for name, kind in types.items() if kind.dtype),
        seed=seed,
        column_shapes=tuple((name, kind.shape) for name, kind in types.items() if kind.shape),
        label_column=selection.label if selection.label in types else "",
        features=selection.features,
        delimiter=delimiter,
    )
