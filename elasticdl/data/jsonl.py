"""Read JSON Lines files (one object per line) by record number; a record has a column for each key.

One pass over a file finds the offsets of its rows and the types of all values; both are stored in the index.  So the
type of a column covers all rows: if one number has a fraction, the column is float64.  A nested object becomes a column
per key, `outer.inner`.  Texts remain texts, including dates.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.json as pj
import pyarrow.types as kinds

from elasticdl.data.arrow import (
    column_type,
    encode,
    flat_schema,
    flat_table,
    partition_fields,
    with_partition,
    with_texts_for_nothing,
)
from elasticdl.data.files import Arrays, DataFile, cached, open_file
from elasticdl.data.reader import Metadata, PartsReader
from elasticdl.data.table_encoder import ColumnType, Selection, describe
from elasticdl_client.errors import DataError
from elasticdl_client.partitions import Partitions

_ROWS_BETWEEN_OFFSETS = 256
_BLOCK_BYTES = 8 << 20  # size of the blocks of rows for type inference
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONG_NUMBER = re.compile(rb"[\s:\[,]-?\d{19,}[\s,\]}]")
_ROW = re.compile(r" in row (\d+)")
_HINT = "Repair or remove the row; each line is one object, {…}, in UTF-8."


class _TooLarge(ValueError):
    pass


class JsonLinesFile:
    """The rows of one file."""

    def __init__(self, path: str) -> None:
        """Build the index, or load the cached one.

        Raises:
            DataError: The file cannot be read, or a line is not an object.
        """
        self.path = path
        file = open_file(path)
        self._file = None if file.is_local else file  # local files are reopened: their number may exceed a limit
        index = cached(path, "jsonl", partial(self._index, file), file.stamp)
        if file.is_local:
            file.close()
        self._offsets = index["offsets"]
        self._num_records, self._size_bytes = index["numbers"].tolist()
        self.schema = pa.ipc.read_schema(pa.py_buffer(index["schema"].tobytes()))

    def __len__(self) -> int:
        return int(self._num_records)

    def table(self, start: int, end: int, schema: Any) -> Any:
        """Return rows ``start`` to ``end`` - 1 with the columns of a schema."""
        first = start // _ROWS_BETWEEN_OFFSETS
        after = (end - 1) // _ROWS_BETWEEN_OFFSETS + 1
        begin = int(self._offsets[first])
        stop = int(self._offsets[after]) if after < len(self._offsets) else self._size_bytes
        with self._opened() as file:
            data, size_bytes = file.pread(stop - begin, begin), file.size_bytes
        if size_bytes != self._size_bytes:
            raise DataError(
                f"The file {self.path} changed while the job reads it: it had {self._size_bytes} bytes.",
                "Put new data into a new file.",
            )
        rows = [row for row in data.split(b"\n") if row.strip()]
        skipped = start - first * _ROWS_BETWEEN_OFFSETS
        return self._parsed(rows[skipped : skipped + end - start], start, schema)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[DataFile]:
        if self._file is not None:
            yield self._file
            return
        with contextlib.closing(open_file(self.path)) as file:
            yield file

    def _index(self, opened: DataFile) -> Arrays:
        offsets: list[int] = []
        found: list[Any] = []
        num_records = 0
        with opened.scan() as file:
            position = len(_BYTE_ORDER_MARK) if file.read(3) == _BYTE_ORDER_MARK else 0
            file.seek(position)
            while block := _whole_lines(file):
                rows = list[bytes]()
                for line in block.split(b"\n"):
                    if line.strip():
                        if (num_records + len(rows)) % _ROWS_BETWEEN_OFFSETS == 0:
                            offsets.append(position)
                        rows.append(line)
                    position += len(line) + 1
                position -= 1  # no line end follows the last part
                if rows:
                    self._check_long_numbers(block, rows, num_records)
                    schema = _of_json(self._parsed(rows, num_records).schema)
                    found = [self._joined([*found, schema], num_records, len(rows))]
                    num_records += len(rows)
            size_bytes = file.tell()
        schema = found[0] if found else pa.schema([])
        return {
            "offsets": np.array(offsets, np.int64),
            "numbers": np.array([num_records, size_bytes], np.int64),
            "schema": np.frombuffer(schema.serialize().to_pybytes(), np.uint8),
        }

    def _parsed(self, rows: Sequence[bytes], first: int, schema: Any = None) -> Any:
        """Return rows as a table; `first` is the number of the first row."""
        data = b"\n".join(rows)
        options = pj.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
        )
        try:
            table = pj.read_json(
                pa.BufferReader(data), pj.ReadOptions(use_threads=False, block_size=len(data) + 1), options
            )
            table.validate(full=True)
        except pa.ArrowException as error:
            raise self._damaged(rows, first, str(error)) from error
        if table.num_rows != len(rows):
            raise self._damaged(rows, first, "two objects are on one line")
        return table

    def _damaged(self, rows: Sequence[bytes], first: int, what: str) -> DataError:
        """Return the error for rows, at the row reported by Arrow, or else at the first row that is not an object."""
        place = _ROW.search(what)
        what = _ROW.sub("", what.strip().splitlines()[0]).removeprefix("JSON parse error: ").rstrip(".")
        number = (
            int(place[1]) if place is not None else next((i for i, row in enumerate(rows) if not _is_object(row)), 0)
        )
        number = min(number, len(rows) - 1)
        record = first + number
        hint = _HINT
        if record == 0 and rows[0].lstrip().startswith(b"["):
            what, hint = "the file is one array, not an object a line", "Convert it: jq -c '.[]' FILE > NEW_FILE."
        elif record == 0 and rows[0].strip() == b"{":
            what, hint = "an object is on several lines", "Convert it: jq -c . FILE > NEW_FILE."
        text = rows[number][:100].decode(errors="replace")
        return DataError(f"{self.path}, byte {self._byte_of(record)}, record {record}: {what}: {text}", hint)

    def _byte_of(self, record: int) -> int:
        """Return the offset of a record, for messages; this reads the file up to it."""
        position, number = 0, -1
        with self._opened() as opened, opened.scan() as file:
            for line in file:
                number += bool(line.strip())
                if number == record:
                    break
                position += len(line)
        return position

    def _joined(self, schemas: Sequence[Any], first: int, count: int) -> Any:
        try:
            return joined(schemas)
        except pa.ArrowException as error:
            what = str(error).removeprefix("Unable to merge: ")
            raise DataError(
                f"{self.path}, byte {self._byte_of(first)}, records {first} to {first + count - 1}: {what}.",
                "A column holds values of one type: write all of them as texts, or all as numbers.",
            ) from error

    def _check_long_numbers(self, block: bytes, rows: Sequence[bytes], first: int) -> None:
        """Refuse whole numbers beyond int64, because Arrow would round them."""
        if not _LONG_NUMBER.search(block):
            return
        for record, row in enumerate(rows, first):
            try:
                if _LONG_NUMBER.search(row):
                    json.loads(row, parse_int=_int64)
            except _TooLarge as error:
                raise DataError(
                    f"{self.path}, byte {self._byte_of(record)}, record {record}: {error} is beyond int64.",
                    "Write such ids as texts, or large quantities as fractions (1e20).",
                ) from error
            except ValueError:
                pass  # not JSON: the parser reports the position


class _Rows:
    """The records of one file, with the selected columns."""

    def __init__(
        self,
        file: JsonLinesFile,
        schema: Any,
        partitions: Partitions,
        keys: Sequence[str],
        types: Mapping[str, ColumnType],
        is_exact: bool,
    ) -> None:
        """
        Args:
            file: The file.
            schema: Schema of all files.
            partitions: The values of partition columns (in names of directories).
            keys: The partition columns.
            types: Types of the selected columns.
            is_exact: See `Selection`.
        """
        self._file = file
        self._is_exact = is_exact
        self._types = types
        roots = {name.partition(".")[0] for name in types} | set(types)
        self._schema = pa.schema([field for field in schema if field.name in roots])
        self._partitions = partitions
        self._keys = [key for key in keys if key in types]

    def __len__(self) -> int:
        return len(self._file)

    def read(self, start: int, end: int) -> list[bytes]:
        table = pa.table({})
        if len(self._schema) or not self._keys:
            table = flat_table(self._file.table(start, end, self._schema))
        table = with_partition(table, end - start, self._partitions, self._file.path, self._keys)
        return encode(table, self._types, self._file.path, self._is_exact)


def jsonl_reader(
    source: str, paths: Sequence[str], partitions: Partitions, selection: Selection, seed: int
) -> PartsReader:
    """Return the `Reader` over JSON Lines files; the type of a column covers all values in all files."""

    @functools.cache
    def open_file(path: str) -> JsonLinesFile:
        return JsonLinesFile(path)

    @functools.cache
    def schema() -> Any:
        known = pa.schema([])
        for path in sorted(paths):
            try:
                known = joined([known, open_file(path).schema])
            except pa.ArrowException as error:
                raise DataError(
                    f"{path}, byte 0: {str(error).removeprefix('Unable to merge: ')} in the files before it.",
                    "All files of a data source must have columns of the same types.",
                ) from error
        return with_texts_for_nothing(known, source)

    @functools.cache
    def keys() -> list[str]:
        return _keys(partitions, schema())

    @functools.cache
    def types() -> dict[str, ColumnType]:
        flat = flat_schema(schema())
        for field in partition_fields(partitions, keys()):
            flat = flat.append(field)
        types = {name: column_type(flat.field(name), source) for name in selection.of(flat.names, source)}
        return selection.typed(types, source)

    def open_rows(path: str) -> _Rows:
        return _Rows(open_file(path), schema(), partitions, keys(), types(), selection.is_exact)

    def metadata() -> Metadata:
        return describe(types(), selection, seed)

    return PartsReader(source, paths, open_rows, metadata)


def _keys(partitions: Partitions, schema: Any) -> list[str]:
    """Return the keys of partitions that become columns; a key of the objects takes precedence over a partition's.

    Raises:
        DataError: Some files are not in a directory for such a key.
    """
    keys = [key for key in partitions.keys if key not in schema.names]
    for path, partition in partitions.values.items():
        if missing := [key for key in keys if key not in partition]:
            raise DataError(
                f"{path} is in no directory {missing[0]}=…, as other files of the data source are.",
                "All files of a data source must have the same columns.",
            )
    return keys


def joined(schemas: Sequence[Any]) -> Any:
    """Return a schema that can hold the values of all these schemas.

    Raises:
        ArrowException: A column has incompatible types.
    """
    return pa.unify_schemas(list(schemas), promote_options="permissive")


def _whole_lines(file: BinaryIO) -> bytes:
    """Return the next block of complete lines; empty at the end of the file."""
    block = file.read(_BLOCK_BYTES)
    return block + file.readline() if block else block


def _of_json(schema: Any) -> Any:
    """Return a schema inferred by Arrow, with texts instead of times."""
    return pa.schema([field.with_type(_text_for_times(field.type)) for field in schema])


def _text_for_times(kind: Any) -> Any:
    if kinds.is_timestamp(kind):
        return pa.string()
    if kinds.is_list(kind):
        return pa.list_(_text_for_times(kind.value_type))
    if kinds.is_struct(kind):
        return pa.struct([field.with_type(_text_for_times(field.type)) for field in kind.fields])
    return kind


def _is_object(row: bytes) -> bool:
    try:
        return isinstance(json.loads(row), dict)
    except ValueError:
        return False


def _int64(digits: str) -> int:
    number = int(digits)
    if not -(2**63) <= number < 2**63:
        raise _TooLarge(digits)
    return number
