"""Decode records of typed sources and CSV rows to columns; choose the features and the label for the default feed.

Records written by `elasticdl.data.table_encoder` have the same features in the same order, so all of them are decoded
together, field by field.  Other records are decoded by `elasticdl.data.example`.

Modules without a `feed` use the default feed; here it is decided which columns are features, and which one is the
label.  The feeds themselves are in `elasticdl.frameworks`, one per framework.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.example import parse_all, parse_examples
from elasticdl.data.reader import Metadata
from elasticdl.data.text import common_type, encoded, split_rows
from elasticdl_client.errors import DataError, ModelDefinitionError

Column: TypeAlias = "NDArray[Any] | list[Any]"  # the list: bytes, or lists of bytes
_BYTES, _FLOATS = 1, 2  # fields of tf.train.Feature
_LONGEST_VARINT = 10
_LIST_DTYPES = {"int64": "i8", "float64": "f4", "string": "O"}


class _OtherLayout(Exception):
    """Raised if the records do not all have the same features in the same order."""


def decode(records: Sequence[bytes], table: FeedColumns) -> dict[str, Column]:
    """Return the used columns of records: numbers [records, *shape] (float32, int64), or a list of bytes.

    Columns of lists of any length become numbers [records, longest], padded with 0, or one list of texts per record.

    Raises:
        DataError: A record does not fit the table, or lacks a whole number.
    """
    if table.delimiter:
        return _from_rows(records, table)
    if table.lists:
        return _with_lists(records, table)
    try:
        walked = _Walk(records, len(table.dtypes)).spans()
        missing = next((name for name in table.used if name not in walked), None)
        if missing is not None:
            raise DataError(f"A record has no column {missing}; it has {', '.join(walked)}.")
        return {name: walked[name](table.shapes.get(name, ())) for name in table.used}
    except _OtherLayout:
        return _parsed(records, table, table.used)


def _parsed(records: Sequence[bytes], table: FeedColumns, names: Sequence[str]) -> dict[str, Column]:
    parsed = parse_examples(records, {name: table.shapes.get(name, ()) for name in names})
    return {name: column.tolist() if column.dtype == object else column for name, column in parsed.items()}


def _with_lists(records: Sequence[bytes], table: FeedColumns) -> dict[str, Column]:
    columns = _parsed(records, table, [name for name in table.used if name not in table.lists])
    parsed = parse_all(records)
    for name in table.lists:
        columns[name] = _filled_up(name, table.dtypes[name], parsed.get(name, []), len(records))
    return columns


def _filled_up(name: str, dtype: str, parts: Sequence[tuple[list[int], NDArray[Any]]], num_records: int) -> Column:
    """Return the lists of one column from the parts found by `parse_all`; records without a part get an empty list."""
    wanted = np.dtype(_LIST_DTYPES[dtype])
    if any(values.dtype != wanted for _, values in parts):
        raise DataError(f"The column {name} of a record does not hold {dtype}.")
    if dtype == "string":
        texts: list[list[bytes]] = [[] for _ in range(num_records)]
        for rows, values in parts:
            for row, value in zip(rows, values.tolist(), strict=True):
                texts[row] = value
        return texts
    longest = max((values.shape[1] for _, values in parts), default=0)
    filled: NDArray[Any] = np.zeros((num_records, longest), wanted)
    for rows, values in parts:
        filled[rows, : values.shape[1]] = values
    return filled


def _from_rows(records: Sequence[bytes], table: FeedColumns) -> dict[str, Column]:
    rows = split_rows(records, table.delimiter)
    places = {name: number for number, name in enumerate(table.dtypes)}
    for fields in rows:
        if len(fields) != len(places):
            raise wrong_row(len(fields), len(places), table.delimiter.join(fields))
    columns: dict[str, Column] = {}
    for name in table.used:
        number, dtype = places[name], table.dtypes[name]
        texts = [fields[number] for fields in rows]
        if dtype == "string":
            columns[name] = encoded(name, texts)
            continue
        columns[name] = numbers_of_cells(name, dtype, texts)
        if dtype == "float64":
            columns[name] = np.asarray(columns[name], np.float32)
    return columns


def numbers_of_cells(name: str, dtype: str, texts: Sequence[str]) -> Column:
    """Return the fields of a CSV column as numbers [rows], float64 or int64.

    Raises:
        DataError: A field is not such a number.
    """
    number: Callable[[str], float] = _fraction if dtype == "float64" else int
    values: list[float] = []
    try:
        for text in texts:
            values.append(number(text))
        return np.array(values, np.float64 if dtype == "float64" else np.int64)
    except ValueError as error:
        raise wrong_cell(name, dtype, texts[len(values)]) from error
    except OverflowError as error:
        largest = max(texts, key=lambda text: abs(int(text)))
        raise wrong_cell(name, dtype, largest) from error


def _fraction(text: str) -> float:
    return float(text) if text.strip() else np.nan


class _Walk:
    """A cursor with one position per record, which moves through all records together."""

    def __init__(self, records: Sequence[bytes], num_columns: int) -> None:
        self._records = records
        self._num_columns = num_columns
        sizes = np.fromiter(map(len, records), np.int64, len(records))
        ends = np.cumsum(sizes)
        self._starts = ends - sizes
        self._ends = ends
        self._data = np.frombuffer(b"".join(records) + bytes(_LONGEST_VARINT), np.uint8)
        self._at = self._starts.copy()

    def spans(self) -> dict[str, Callable[[tuple[int, ...]], Column]]:
        """Return for each feature a function from a shape to its values."""
        found: dict[str, Callable[[tuple[int, ...]], Column]] = {}
        if not self._records:
            return found
        self._enter(0x0A)
        for _ in range(self._num_columns):
            if (self._at >= self._ends).any():
                raise _OtherLayout
            self._enter(0x0A)
            name = self._name()
            found[name] = self._value(name)
        if (self._at != self._ends).any():
            raise _OtherLayout
        return found

    def _name(self) -> str:
        sizes = self._enter(0x0A)
        size = int(sizes[0])
        if (sizes != size).any():
            raise _OtherLayout
        names = self._data[self._at[:, None] + np.arange(size)]
        if (names != names[0]).any():
            raise _OtherLayout
        self._at = self._at + size
        return str(names[0].tobytes(), "utf-8")

    def _value(self, name: str) -> Callable[[tuple[int, ...]], Column]:
        sizes = self._enter(0x12)
        after = self._at + sizes
        if (sizes == 0).any():
            self._at = after
            return lambda shape: _without_value(name)
        kind = int(self._data[self._at[0]])
        self._enter(kind)
        lengths = self._pieces(after)
        begins = self._at
        self._at = after
        match kind >> 3:
            case 1:
                return lambda shape: self._texts(begins, lengths)
            case 2:
                return lambda shape: self._floats(name, begins, lengths, shape)
            case _:
                return lambda shape: self._integers(name, begins, lengths, shape)

    def _pieces(self, after: NDArray[np.int64]) -> NDArray[np.int64]:
        """Enter the single packed piece of each list; return the sizes."""
        lengths = self._enter(0x0A)
        if (self._at + lengths != after).any():
            raise _OtherLayout
        return lengths

    def _enter(self, tag: int) -> NDArray[np.int64]:
        """Move to the content of a field with this tag; return its size in each record."""
        if (self._data[self._at] != tag).any():
            raise _OtherLayout
        self._at = self._at + 1
        sizes = np.zeros(len(self._at), np.int64)
        going = np.ones(len(self._at), bool)
        for shift in range(0, 35, 7):
            byte = self._data[np.minimum(self._at, len(self._data) - 1)].astype(np.int64)
            sizes |= np.where(going, (byte & 0x7F) << shift, 0)
            self._at = self._at + going
            going &= byte >= 0x80
            if not going.any():
                break
        if going.any() or (self._at + sizes > self._ends).any():
            raise _OtherLayout
        return sizes

    def _texts(self, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[bytes]:
        first, size = (begins - self._starts).tolist(), lengths.tolist()
        return [record[a : a + n] for record, a, n in zip(self._records, first, size, strict=True)]

    def _floats(
        self, name: str, begins: NDArray[np.int64], lengths: NDArray[np.int64], shape: tuple[int, ...]
    ) -> Column:
        wanted = int(np.prod(shape, dtype=np.int64))
        if (lengths != 4 * wanted).any():
            raise DataError(f"The column {name} of a record does not have {wanted} values.")
        data = self._data[begins[:, None] + np.arange(4 * wanted)]
        values: NDArray[Any] = data.view("<f4").astype(np.float32)
        return values.reshape(len(begins), *shape)

    def _integers(
        self, name: str, begins: NDArray[np.int64], lengths: NDArray[np.int64], shape: tuple[int, ...]
    ) -> Column:
        wanted = int(np.prod(shape, dtype=np.int64))
        offsets = np.cumsum(lengths) - lengths
        places = np.repeat(begins - offsets, lengths) + np.arange(int(lengths.sum()))
        data = self._data[places]
        lasts = np.flatnonzero(data < 0x80)
        counts = np.diff(np.searchsorted(lasts, np.append(offsets, len(data))))
        if (counts != wanted).any():
            raise DataError(f"The column {name} of a record does not have {wanted} values.")
        firsts = np.concatenate([np.zeros(1, np.int64), lasts[:-1] + 1])
        shifts = np.arange(len(data)) - np.repeat(firsts, lasts - firsts + 1)
        groups = (data & 0x7F).astype(np.uint64) << (shifts * 7).astype(np.uint64)
        values: NDArray[Any] = np.bitwise_or.reduceat(groups, firsts).view(np.int64)
        return values.reshape(len(begins), *shape)


def _without_value(name: str) -> Column:
    raise missing_number(name)


_SHOWN = 200  # maximum number of characters quoted from a wrong row or field


@dataclass(frozen=True, slots=True)
class FeedColumns:
    """The columns of a source for the default feed.

    Attributes:
        dtypes: "int64", "float64", "string" or "image" for all columns of a record, by name, in order.
        shapes: Shape of the values, by name; (-1,): it varies.
        features: Names of the columns for the model.
        label: Name of the label column; empty: prediction.
        delimiter: Delimiter of CSV rows; empty: records are tf.train.Example.
    """

    dtypes: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    features: tuple[str, ...]
    label: str
    delimiter: str

    @property
    def used(self) -> tuple[str, ...]:
        """The names of the features, and of the label if there is one."""
        return (*self.features, self.label) if self.label else self.features

    @property
    def lists(self) -> tuple[str, ...]:
        """The names of used columns with lists of any length."""
        return tuple(name for name in self.used if -1 in self.shapes.get(name, ()))

    @property
    def is_one_image(self) -> bool:
        """Whether the model gets a single image, not a dictionary of columns."""
        return len(self.features) == 1 and self.dtypes[self.features[0]] == "image"


def table_of(metadata: Metadata, is_prediction: bool, path: str) -> FeedColumns:
    """Return the columns for the default feed.

    Args:
        metadata: Metadata of the source.
        is_prediction: Ignore the label, if there is one.
        path: Path of the user's module, for messages.

    Raises:
        ModelDefinitionError: The source has no columns, or no label is named.
    """
    dtypes = dict(metadata.column_dtypes)
    if not metadata.column_names or not dtypes:
        raise ModelDefinitionError(
            f"{path} has no feed, and the data have no columns.",
            "Define feed(dataset, mode, metadata), or train on tables (CSV with a header, Parquet, SQL, …); a CSV file "
            "whose name does not end in .csv needs --data_reader_params=reader_type=CSV.",
        )
    if not is_prediction and not metadata.label_column:
        raise ModelDefinitionError(
            f"{path} has no feed, and --label_column names no column of the data.",
            f"Define feed, or give --label_column, one of {', '.join(metadata.column_names)}.",
        )
    features = metadata.features or metadata.column_names
    shapes = dict(metadata.column_shapes)
    for name in features:
        if dtypes[name] == "image" and not shapes.get(name):
            raise ModelDefinitionError(
                f"{path} has no feed, and images may be of any size.",
                "Give --data_reader_params='image_size=[224,224]' (height, width), or define feed.",
            )
    return FeedColumns(
        {name: dtypes[name] for name in metadata.column_names},
        shapes,
        tuple(name for name in features if name != metadata.label_column),
        "" if is_prediction else metadata.label_column,
        metadata.delimiter,
    )


def wrong_cell(column: str, dtype: str, value: str) -> DataError:
    """Return the error for a field of a CSV row that does not have its column's type."""
    if not value.strip():
        what = f"A row has no value in the column {column}, which holds whole numbers"
    else:
        what = f"A row has {value[:_SHOWN]!r} in the column {column}, which is read as {dtype}"
    is_fraction = not value.strip() or common_type((value,)) == "float64"
    wider = "float64" if dtype == "int64" and is_fraction else "string"
    missing = ", where a missing number is NaN" if wider == "float64" else ""
    return DataError(
        f"{what}: the types of CSV columns are those of the first rows.",
        f'Say --data_reader_params=\'column_dtypes={{"{column}": "{wider}"}}\'{missing}; or repair the row; '
        "--max_bad_records=N leaves such rows out.",
    )


def wrong_row(num_fields: int, num_columns: int, row: str = "") -> DataError:
    """Return the error for a CSV row with more or fewer fields than the header."""
    shown = row[:_SHOWN].encode(errors="replace").decode()  # replace surrogates, which stand for invalid UTF-8
    return DataError(
        f"A row has {num_fields} fields, the header {num_columns}{row and ': '}{shown}",
        "Quote fields that hold the delimiter, a backslash (escapechar of pandas) does not help; --max_bad_records=N "
        "leaves such rows out.",
    )


def missing_number(column: str) -> DataError:
    """Return the error for a record of a typed source that lacks a whole number."""
    return DataError(
        f"A record has no value of the column {column}, which holds whole numbers.",
        f'Give it a value; or say --data_reader_params=\'column_dtypes={{"{column}": "float64"}}\', where missing is '
        "NaN; --max_bad_records=N leaves such records out.",
    )
