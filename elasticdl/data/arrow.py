"""Read Parquet and Arrow (Feather) files by row number, and Hugging Face data sets, which consist of Arrow files.

Such a data set is a directory written by `save_to_disk`; it is read by record number through the package `datasets`.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import logging
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as kinds

from elasticdl.data.files import Arrays, FileView, cached, open_file
from elasticdl.data.identity import identity_of_files
from elasticdl.data.reader import Metadata, PartsReader
from elasticdl.data.sources import check_directory, need
from elasticdl.data.table_encoder import (
    ColumnType,
    Lists,
    Numbers,
    Selection,
    TableColumn,
    TextLists,
    Texts,
    check_same,
    describe,
    encode_table,
)
from elasticdl_client.errors import DataError
from elasticdl_client.partitions import Partitions
from elasticdl_client.storage_kinds import is_remote

_log = logging.getLogger(__name__)
_KEPT_BYTES = 256 << 20
_LOADING = threading.Lock()  # load_from_disk creates and deletes a global lock of tqdm: not thread-safe
_OPENED_AT_ONCE = 16  # Parquet files, to find the type of a column; in storage each takes tens of milliseconds
_HINT = "The file was cut off or changed after it was written, or is of another format: write it again or remove it."


class ParquetFile:
    """The row groups of a Parquet file."""

    def __init__(self, path: str) -> None:
        source = path if not is_remote(path) else FileView(open_file(path))
        try:
            self._file = pq.ParquetFile(
                source, memory_map=source is path, pre_buffer=source is not path, page_checksum_verification=True
            )
        except (pa.ArrowException, OSError) as error:
            raise _unreadable("Parquet", path, error) from error
        footer = self._file.metadata
        self.path = path
        self.schema = self._file.schema_arrow
        self.sizes = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
        self._lock = threading.Lock()  # a ParquetFile is not thread-safe

    def chunk(self, number: int, columns: Sequence[str]) -> Any:
        """Return a row group as a table."""
        try:
            with self._lock:
                return self._file.read_row_group(number, columns=list(columns), use_threads=False)
        except (pa.ArrowException, OSError) as error:
            first = self._file.metadata.row_group(number).column(0)
            offset = min(first.data_page_offset, first.dictionary_page_offset or first.data_page_offset)
            raise DataError(
                f"Parquet file {self.path}, byte {offset}: row group {number} cannot be read: {_text(error)}.", _HINT
            ) from error


class ArrowFile:
    """The record batches of an Arrow file, in the file format (Feather) or the stream format."""

    def __init__(self, path: str) -> None:
        self.path = path
        remote = open_file(path) if is_remote(path) else None
        try:
            source = pa.memory_map(path) if remote is None else pa.PythonFile(FileView(remote), mode="r")
            try:
                self._file = pa.ipc.open_file(source)
                self._count = self._file.num_record_batches
                self._batches: list[Any] = []
            except pa.ArrowInvalid:
                source = pa.memory_map(path) if remote is None else pa.PythonFile(remote.scan(), mode="r")
                self._file = pa.ipc.open_stream(source)
                self._batches = list(self._file)
                self._count = len(self._batches)
            self.schema = self._file.schema
        except (pa.ArrowException, OSError) as error:
            raise _unreadable("Arrow", path, error) from error
        self._lock = threading.Lock()
        self.sizes = [batch.num_rows for batch in self._batches]
        if not self._batches:  # counting rows reads and decompresses each batch: cache the counts
            stamp = remote.stamp if remote is not None else None
            found = cached(path, "arrow", self._count_rows, stamp, lambda index: len(index["sizes"]) == self._count)
            self.sizes = found["sizes"].tolist()

    def chunk(self, number: int, columns: Sequence[str]) -> Any:
        """Return a record batch as a table."""
        table = pa.Table.from_batches([self._batch(number)])
        try:
            table.validate(full=True)
        except pa.ArrowException as error:
            raise self._damaged(number, error) from error
        return table.select(list(columns))

    def _count_rows(self) -> Arrays:
        return {"sizes": np.array([self._batch(number).num_rows for number in range(self._count)], np.int64)}

    def _batch(self, number: int) -> Any:
        if self._batches:
            return self._batches[number]
        try:
            with self._lock:
                return self._file.get_batch(number)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(number, error) from error

    def _damaged(self, number: int, error: Exception) -> DataError:
        return DataError(f"Arrow file {self.path}: record batch {number} cannot be read: {_text(error)}.", _HINT)


class PartitionedFile:
    """A file with the partition columns (in names of directories); the file's own columns take precedence."""

    def __init__(self, file: ParquetFile | ArrowFile, partitions: Partitions) -> None:
        self._file = file
        self.path = file.path
        self.sizes = file.sizes
        self._partitions = partitions
        own = {name.partition(".")[0] for name in file.schema.names}
        fields = [
            field for field in partition_fields(partitions, partitions.values[file.path]) if field.name not in own
        ]
        self._keys = {field.name for field in fields}
        self.schema = pa.schema([*file.schema, *fields], file.schema.metadata)

    def chunk(self, number: int, columns: Sequence[str]) -> Any:
        """Return a row group or record batch as a table."""
        table = self._file.chunk(number, [name for name in columns if name not in self._keys])
        keys = [name for name in columns if name in self._keys]
        return with_partition(table, self.sizes[number], self._partitions, self.path, keys)


def partition_fields(partitions: Partitions, keys: Iterable[str]) -> list[Any]:
    """Return the schema fields of partition keys."""
    return [pa.field(key, pa.int64() if partitions.dtypes[key] == "int64" else pa.string()) for key in keys]


def with_partition(table: Any, num_rows: int, partitions: Partitions, path: str, keys: Sequence[str]) -> Any:
    """Return a table extended by the partition columns `keys`, with the values for a file.

    Raises:
        DataError: A value does not have its key's type.
    """
    fields = partition_fields(partitions, keys)
    added = [pa.repeat(pa.scalar(partitions.value(path, field.name), field.type), num_rows) for field in fields]
    return pa.Table.from_arrays([*table.columns, *added], [*table.column_names, *keys])


class Chunks:
    """A cache for decoded chunks of all files of a reader: the most recently used ones, up to a limit."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()

    def get(self, path: str, number: int, decode: Callable[[], Any]) -> Any:
        """Return a chunk of a file; decode it unless it is cached."""
        with self._lock:
            table = self._kept.get((path, number))
            if table is not None:
                self._kept.move_to_end((path, number))
                return table
        table = decode()
        with self._lock:
            if (path, number) not in self._kept:
                self._kept[path, number] = table
                self._size_bytes += table.nbytes
            while len(self._kept) > 1 and self._size_bytes > _KEPT_BYTES:
                self._size_bytes -= self._kept.popitem(last=False)[1].nbytes
        return table


TableFile: TypeAlias = ParquetFile | ArrowFile | PartitionedFile


class ArrowRows:
    """The records of one file."""

    def __init__(self, file: TableFile, selection: Selection, chunks: Chunks, known: Any) -> None:
        """
        Args:
            file: The file.
            selection: Selected columns.
            chunks: The cache of decoded chunks.
            known: Schema of the source; it has the type of a column without any value in this file.
        """
        self._file = file
        self._chunks = chunks
        self._where = file.path
        self._is_exact = selection.is_exact
        fields = {field.name: field for field in _selected(file, selection)}
        among = {field.name: field for field in known}
        empty = [name for name, field in fields.items() if kinds.is_null(field.type)]
        self._empty = {name: among.get(name, pa.field(name, pa.string())) for name in empty}
        types = {name: column_type(field, file.path) for name, field in (fields | self._empty).items()}
        self.types = selection.typed(types, file.path)
        roots = {name.partition(".")[0] for name in fields} | set(fields)
        self._roots = [name for name in file.schema.names if name in roots]
        self._ends = list(itertools.accumulate(file.sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, end: int) -> list[bytes]:
        number = bisect.bisect_right(self._ends, start)
        pieces = []
        while start < end:
            first = self._ends[number] - self._file.sizes[number]
            last = min(end, self._ends[number])
            if last > start:
                chunk = self._chunks.get(self._where, number, partial(self._decoded, number))
                pieces.append(chunk.slice(start - first, last - start))
                start = last
            number += 1
        return encode(pa.concat_tables(pieces), self.types, self._where, self._is_exact)

    def _decoded(self, number: int) -> Any:
        table = flat_table(self._file.chunk(number, self._roots)).select(list(self.types))
        if not self._empty:
            return table
        columns = [
            pa.nulls(table.num_rows, self._empty[name].type) if name in self._empty else column
            for name, column in zip(table.column_names, table.columns, strict=True)
        ]
        return pa.Table.from_arrays(columns, table.column_names)


def table_reader(
    source: str, paths: Sequence[str], partitions: Partitions, selection: Selection, seed: int, is_parquet: bool
) -> PartsReader:
    """Return the `Reader` over Parquet files, or over Arrow and Feather files."""
    first, *others = sorted(paths)
    chunks = Chunks()

    def opened(path: str) -> TableFile:
        file = ParquetFile(path) if is_parquet else ArrowFile(path)
        return PartitionedFile(file, partitions) if partitions.values.get(path) else file

    def columns_of(path: str) -> Any:
        return _selected(opened(path), selection)

    @functools.cache
    def schema() -> Any:
        """Return the first file's schema; a column without values there has the type of the next file with values."""
        found = columns_of(first)
        at_once = _OPENED_AT_ONCE if is_parquet else 1  # an Arrow stream is read completely
        with ThreadPoolExecutor(at_once, "schemas") as threads:
            for start in range(0, len(others), at_once):
                if not any(kinds.is_null(field.type) for field in found):
                    break
                paths = others[start : start + at_once]
                for path, fields in zip(paths, threads.map(columns_of, paths), strict=True):
                    found = pa.schema([_with_a_type(one, fields, path) for one in found])
        return with_texts_for_nothing(found, source)

    @functools.cache
    def types() -> dict[str, ColumnType]:
        return selection.typed({field.name: column_type(field, first) for field in schema()}, first)

    def open_rows(path: str) -> ArrowRows:
        rows = ArrowRows(opened(path), selection, chunks, schema())
        check_same(rows.types, path, types(), first)
        return rows

    def metadata() -> Metadata:
        return describe(types(), selection, seed)

    return PartsReader(source, paths, open_rows, metadata)


def _selected(file: TableFile, selection: Selection) -> Any:
    """Return the schema of the selected columns, with structs flattened.

    Raises:
        DataError: A column does not exist, or two columns have the same name.
    """
    flat = flat_schema(file.schema)
    twice, times = max(Counter(flat.names).items(), key=lambda item: item[1], default=("", 0))
    if times > 1:
        raise DataError(f"{file.path} has several columns {twice}.", "Rename them when you write the data.")
    return pa.schema([flat.field(name) for name in selection.of(flat.names, file.path)])


def _with_a_type(field: Any, others: Any, path: str) -> Any:
    """Return a field, or if it has no values, the field of that name in another file.

    Raises:
        DataError: The other field has a type that a record cannot hold.
    """
    place = others.get_field_index(field.name) if kinds.is_null(field.type) else -1
    if place < 0 or kinds.is_null(others.field(place).type):
        return field
    column_type(others.field(place), path)
    return others.field(place)


def with_texts_for_nothing(schema: Any, source: str) -> Any:
    """Return a schema in which columns without any value are texts; warn of them."""
    empty = {field.name for field in schema if kinds.is_null(field.type)}
    for name in sorted(empty):
        _log.warning("The column %s has no value in %s and is read as texts", name, source)
    return pa.schema([field.with_type(pa.string()) if field.name in empty else field for field in schema])


def _unreadable(kind: str, path: str, error: Exception) -> DataError:
    """Return the error for a file with an unreadable footer.

    Raises:
        DataError: The file cannot even be opened.
    """
    with contextlib.closing(open_file(path)) as file:
        size = file.size_bytes
    return DataError(f"{kind} file {path}, byte {max(0, size - 8)}: its footer cannot be read: {_text(error)}.", _HINT)


def _text(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__


_COLUMN_HINT = "Name the columns to read with --columns, or convert this one when you write the data."


def flat_schema(schema: Any) -> Any:
    """Return a schema with structs flattened."""
    fields = list(schema)  # do not flatten an empty table: pyarrow cannot make one for all types
    while any(kinds.is_struct(field.type) for field in fields):
        fields = [inner for field in fields for inner in field.flatten()]
    return pa.schema(fields)


def flat_table(table: Any) -> Any:
    """Return a table with structs flattened."""
    while any(kinds.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return table


def column_type(field: Any, where: str) -> ColumnType:
    """Return the type of a column's values in records.

    Raises:
        DataError: A record cannot hold the column's type.
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
    return ColumnType(_dtype(kind, field, where), tuple(shape), _unit(kind))


def encode(table: Any, types: Mapping[str, ColumnType], where: str, is_exact: bool) -> list[bytes]:
    """Return each row as a serialized tf.train.Example.

    Args:
        table: The rows, with structs flattened.
        types: Types of the columns.
        where: The file, for messages.
        is_exact: See `Selection`.

    Raises:
        DataError: A record cannot hold a value.
    """
    columns: dict[str, TableColumn] = {}
    for name, kind in types.items():
        array = _one_array(table.column(name))
        try:
            columns[name] = _column(array, kind)
        except pa.ArrowException as error:
            raise DataError(f"{where}: column {name}: {error}.", _COLUMN_HINT) from error
    return encode_table(columns, table.num_rows, is_exact)


def _dtype(kind: Any, field: Any, where: str) -> str:
    if kinds.is_floating(kind) or kinds.is_decimal(kind):
        return "float64"
    if kinds.is_integer(kind) or kinds.is_boolean(kind) or kinds.is_temporal(kind):
        return "int64"
    if any(check(kind) for check in (kinds.is_string, kinds.is_large_string, kinds.is_string_view)):
        return "string"
    if any(check(kind) for check in (kinds.is_binary, kinds.is_large_binary, kinds.is_fixed_size_binary)):
        return "string"
    raise DataError(f"{where}: column {field.name} is of type {field.type}, which no record can hold.", _COLUMN_HINT)


def _unit(kind: Any) -> str:
    if kinds.is_timestamp(kind):
        return "timestamp"  # `_values` converts all of them to microseconds
    return str(kind) if kinds.is_temporal(kind) else ""


def _one_array(column: Any) -> Any:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array


def _without_dictionary(array: Any) -> Any:
    if not kinds.is_dictionary(array.type):
        return array
    if kinds.is_string_view(array.type.value_type):  # written by Polars; Arrow has no kernel to decode it
        array = pa.DictionaryArray.from_arrays(array.indices, array.dictionary.cast(pa.large_string()))
    return array.dictionary_decode()


def _column(array: Any, kind: ColumnType) -> TableColumn:
    array = _without_dictionary(array)
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
    flat = _without_dictionary(array.flatten())
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
        return array.to_numpy(zero_copy_only=False)  # NaN for a missing value
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
    """Return the bytes of each value, cut out of Arrow's own buffer."""
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


class SavedDataset:
    """The rows of one data set."""

    def __init__(self, path: str, split: str, selection: Selection) -> None:
        """
        Raises:
            DataError: The data set cannot be read, or has several splits and none was named.
        """
        datasets = need("datasets", "Hugging Face data sets", "datasets")

        self._path = path
        self._is_exact = selection.is_exact
        try:
            with _LOADING:
                found = datasets.load_from_disk(path)
        except Exception as error:  # any error of the package means unreadable data
            raise DataError(
                f"The Hugging Face data set {path}, byte 0: {str(error).splitlines()[0] if str(error) else error!r}.",
                "Write it again with Dataset.save_to_disk.",
            ) from error
        if isinstance(found, datasets.DatasetDict):
            if split not in found:
                named = f"no split {split}" if split else "several splits"
                raise DataError(
                    f"The data set {path} has {named}.",
                    f"Name one: --data_reader_params='split={next(iter(found))}'; it has {', '.join(found)}.",
                )
            found = found[split]
        flat = flat_schema(found.data.schema)
        wanted = selection.of(flat.names, path)
        self.types = selection.typed({name: column_type(flat.field(name), path) for name in wanted}, path)
        self.files: list[str] = [str(one["filename"]) for one in found.cache_files]
        self._rows: Any = found.with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, end: int) -> list[bytes]:

        table = self._rows[start:end]
        table.validate(full=True)
        return encode(flat_table(table), self.types, self._path, self._is_exact)


def huggingface_reader(source: str, paths: Sequence[str], selection: Selection, split: str, seed: int) -> PartsReader:
    """Return the `Reader` over Hugging Face data sets on disk."""

    first = min(paths)

    @functools.cache
    def types_of_first() -> dict[str, ColumnType]:
        return SavedDataset(first, split, selection).types

    def open_set(path: str) -> SavedDataset:
        found = SavedDataset(path, split, selection)
        check_same(found.types, path, types_of_first(), first)
        return found

    def metadata() -> Metadata:
        return describe(types_of_first(), selection, seed)

    def identify(path: str) -> str:
        return identity_of_files(SavedDataset(path, split, selection).files)

    return PartsReader(source, paths, open_set, metadata, check_directory, identify)
