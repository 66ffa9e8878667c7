"""Parquet and Arrow (Feather) files, read by row number.

A file is a row of chunks (row groups, record batches) that are decoded whole and kept, up to a limit.  So small chunks,
of some ten thousand rows, are read best.  The index is the file's own footer.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elasticdl.data.arrow_columns import column_type, encode, flat_schema, flat_table
from elasticdl.data.columns import ColumnType, Selection, check_same, describe
from elasticdl.data.files import FileView, open_file
from elasticdl.data.reader import Metadata
from elasticdl.data.shard_files import PartsReader
from elasticdl_client.errors import DataError
from elasticdl_client.storage_kinds import is_remote

_KEPT_BYTES = 256 << 20
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
        self._lock = threading.Lock()  # a ParquetFile is of one thread at a time

    def chunk(self, number: int, columns: Sequence[str]) -> Any:
        """A row group as a table."""
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
    """The record batches of an Arrow file, in its file format (Feather) or that of streams."""

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
        self.sizes = [self._batch(number).num_rows for number in range(self._count)]

    def chunk(self, number: int, columns: Sequence[str]) -> Any:
        """A record batch as a table."""
        table = pa.Table.from_batches([self._batch(number)])
        try:
            table.validate(full=True)
        except pa.ArrowException as error:
            raise self._damaged(number, error) from error
        return table.select([name for name in table.column_names if name in columns])

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


class Chunks:
    """Decoded chunks of all files of a reader, the last ones used, up to a limit."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()

    def get(self, path: str, number: int, decode: Callable[[], Any]) -> Any:
        """A chunk of a file, decoded unless it is kept."""
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


class ArrowRows:
    """The records of one file."""

    def __init__(self, file: ParquetFile | ArrowFile, selection: Selection, chunks: Chunks) -> None:
        self._file = file
        self._chunks = chunks
        self._where = file.path
        flat = flat_schema(file.schema)
        twice = next((name for name in flat.names if flat.names.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"{file.path} has several columns {twice}.", "Rename them when you write the data.")
        wanted = selection.of(flat.names, file.path)
        self.types = {name: column_type(flat.field(name), file.path) for name in wanted}
        roots = {name.partition(".")[0] for name in wanted} | set(wanted)
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
        return encode(pa.concat_tables(pieces), self._where)

    def _decoded(self, number: int) -> Any:
        return flat_table(self._file.chunk(number, self._roots)).select(list(self.types))


def parquet_reader(source: str, paths: Sequence[str], selection: Selection, seed: int) -> PartsReader:
    """The `Reader` over Parquet files."""
    return _reader(source, paths, selection, seed, ParquetFile)


def arrow_reader(source: str, paths: Sequence[str], selection: Selection, seed: int) -> PartsReader:
    """The `Reader` over Arrow and Feather files."""
    return _reader(source, paths, selection, seed, ArrowFile)


def _reader(
    source: str,
    paths: Sequence[str],
    selection: Selection,
    seed: int,
    open_file: Callable[[str], ParquetFile | ArrowFile],
) -> PartsReader:
    first = min(paths)
    known: dict[str, dict[str, ColumnType]] = {}
    chunks = Chunks()

    def types_of_first() -> dict[str, ColumnType]:
        if first not in known:
            known[first] = ArrowRows(open_file(first), selection, chunks).types
        return known[first]

    def open_rows(path: str) -> ArrowRows:
        rows = ArrowRows(open_file(path), selection, chunks)
        check_same(rows.types, path, types_of_first(), first)
        return rows

    def metadata() -> Metadata:
        return describe(types_of_first(), selection, seed)

    return PartsReader(source, paths, open_rows, metadata)


def _unreadable(kind: str, path: str, error: Exception) -> DataError:
    """
    Raises:
        DataError: it cannot even be opened.
    """
    with contextlib.closing(open_file(path)) as file:
        size = file.size_bytes
    return DataError(f"{kind} file {path}, byte {max(0, size - 8)}: its footer cannot be read: {_text(error)}.", _HINT)


def _text(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
