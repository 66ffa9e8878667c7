"""The `Reader` over text files: CSV as in RFC 4180, or one record per line.

A record is the raw bytes of a row without its line end, followed by the values of its partition.  Rows are found by
byte offset through `TextIndex`, which is built in one streaming pass; a file is never completely in memory.  The reader
does not split rows into fields (except the header).

A quoted field begins with a quote right after a delimiter or at the start of a row; inside it, a doubled quote is a
quote and a line end is data.  Elsewhere a quote is an ordinary character (as in Python's csv module).  Blank lines
between CSV rows are ignored.  Rows end with LF or CRLF.

`guess_types` infers the types of columns; `split_rows` splits rows into fields.
"""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import math
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.files import Arrays, DataFile, cached, open_file
from elasticdl.data.identity import OncePerFile
from elasticdl.data.reader import Metadata
from elasticdl.data.sources import check_file, no_records, shard_not_of_source
from elasticdl.data.table_encoder import ColumnType, Selection, describe, warn_if_rounded
from elasticdl.protocol import Shard
from elasticdl_client.data_sources import names_in_header
from elasticdl_client.errors import DataError
from elasticdl_client.partitions import Partitions
from elasticdl_client.storage_kinds import is_remote

_log = logging.getLogger(__name__)
_ROWS_BETWEEN_OFFSETS = 256
_GUESSED_FROM = 1000
_NUMBERS = ("int64", "float64")
_SHOWN = 80  # maximum number of bytes quoted from a wrong row or field
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class TextIndex:
    """The positions of the rows in one file.

    Attributes:
        header: The raw header row; empty if the file has no rows; None if the format has no header.
        offsets: Offsets of rows 0, 256, 512, … in bytes; the header is not counted.
        num_records: Number of rows without the header.
        size_bytes: Size of the file when it was indexed.
    """

    header: bytes | None
    offsets: tuple[int, ...]
    num_records: int
    size_bytes: int

    def offset_after(self, row: int) -> int:
        """Return the first known offset at or after the start of `row`."""
        number = -(-row // _ROWS_BETWEEN_OFFSETS)
        return self.offsets[number] if number < len(self.offsets) else self.size_bytes

    @classmethod
    def find(cls, file: DataFile, rules: TextRules) -> TextIndex:
        """Return the index of a file from its cache, or build it.

        Raises:
            DataError: See `build`.
        """

        def arrays() -> Arrays:
            built = cls.build(file, rules)
            numbers = np.array([built.num_records, built.size_bytes], np.int64)
            header = np.frombuffer(built.header or b"", np.uint8)
            return {"offsets": np.array(built.offsets, np.int64), "numbers": numbers, "header": header}

        kind = f"text {rules.quoted} {rules.delimiter!r} {rules.has_header}"
        found = cached(file.path, kind, arrays, file.stamp)
        num_records, size_bytes = found["numbers"].tolist()
        header = found["header"].tobytes() if rules.has_header else None
        return cls(header, tuple(found["offsets"].tolist()), num_records, size_bytes)

    @classmethod
    def build(cls, file: DataFile, rules: TextRules) -> TextIndex:
        """Build the index by reading the file once.

        Raises:
            DataError: The file cannot be read, or a quoted field is not closed.
        """
        header: bytes | None = None
        offsets: list[int] = []
        num_records = 0
        with file.scan() as stream:
            begin = len(_BYTE_ORDER_MARK) if stream.read(3) == _BYTE_ORDER_MARK else 0
            stream.seek(begin)
            rows = rows_from(stream, begin, rules, file.path)
            if rules.has_header:
                header = next((row for _, row in rows), None)
            for offset, _ in rows:
                if num_records % _ROWS_BETWEEN_OFFSETS == 0:
                    offsets.append(offset)
                num_records += 1
            size_bytes = stream.seek(0, io.SEEK_END)
        return cls(header, tuple(offsets), num_records, size_bytes)


class TextReader:
    """The `Reader` over text files: one shard per file, named by its path.  Files without rows are left out."""

    def __init__(
        self,
        source: str,
        paths: Sequence[str],
        rules: TextRules,
        partitions: Partitions,
        selection: Selection,
        seed: int,
    ) -> None:
        """Create a reader, without opening a file.

        Args:
            source: The source as the user named it, for messages.
            paths: Paths of the files.
            rules: How rows are separated.
            partitions: For CSV files with a header: values appended to the rows, unless the header has a column of the
                same name.
            selection: Selected columns, for the metadata; records are always whole rows.
            seed: Seed of the job, for the metadata.
        """
        self._partitions = partitions
        self._selection = selection
        self._source = source
        self._paths = sorted(paths)
        self._rules = rules
        self._seed = seed
        self._indexes: dict[str, TextIndex] = {}
        self._remote: dict[str, DataFile] = {}
        self._lock = threading.Lock()
        self._check = OncePerFile(check_file)

    def shards(self) -> list[Shard]:
        shards: list[Shard] = []
        for path in self._paths:
            self._check.begin_count(path)
            num_records = self._index(path).num_records
            if num_records:
                shards.append(Shard(path, 0, num_records))
            else:
                self._check(path)  # `read` will not check it: it has no records
        if not shards:
            if self._rules.has_header:
                self._header_names(self._with_header()[0])
            raise no_records(self._source)
        identities = self._check.identities(shard.name for shard in shards)
        return [replace(shard, identity=identities[shard.name]) for shard in shards]

    def read(self, shard: Shard) -> list[bytes]:
        if shard.name not in self._paths:
            raise shard_not_of_source(shard, self._source)
        index = self._index(shard.name)
        if not 0 <= shard.start <= shard.end <= index.num_records:
            raise shard_not_of_source(shard, self._source, index.num_records)
        if not len(shard):
            return []
        self._check(shard.name, shard.name in self._remote, shard.identity)
        skipped = shard.start % _ROWS_BETWEEN_OFFSETS
        with self._opened(shard.name) as file:
            if file.size_bytes != index.size_bytes:
                raise DataError(
                    f"The file {shard.name} changed while the job reads it: it had {index.size_bytes} bytes.",
                    "Put new data into a new file.",
                )
            begin = index.offsets[shard.start // _ROWS_BETWEEN_OFFSETS]
            with _stream(file, begin, index.offset_after(shard.end)) as stream:
                rows = rows_from(stream, begin, self._rules, shard.name)
                added = self._added(shard.name)
                records = [row + added for _, row in islice(rows, skipped, skipped + len(shard))]
        if not is_remote(shard.name):
            self._check(shard.name, True, shard.identity)  # raises if it was replaced meanwhile
        return records

    def metadata(self) -> Metadata:
        """Return names from the header, which is the same in all files, and types from the first rows of all files."""
        if not self._rules.has_header:
            return Metadata(seed=self._seed)
        first, *others = self._with_header()
        names = self._column_names(first)
        for path in others:
            if self._column_names(path) != names:
                raise DataError(
                    f"The header of {path} differs from that of {first}.",
                    "All files of a data source must have the same columns in the same order.",
                )
        if not self._rules.quoted:
            return Metadata(column_names=names, seed=self._seed)
        names = names_in_header(names, first)
        wanted = dict.fromkeys(self._selection.of(names, first))  # a dict: fast lookups for tables with many columns
        rows, delimiter = self._first_rows(), self._rules.delimiter.decode()
        guessed = guess_types(rows, len(names), delimiter)
        known = dict(zip(names, guessed, strict=True))
        known.update({key: self._partitions.dtypes[key] for key in self._keys(first)})
        known.update(self._selection.dtypes)
        self._warn_of(name for name in wanted if not known[name])
        for name, texts in zip(names, _columns(rows, len(names), delimiter), strict=True):
            if name in wanted and known[name] == "float64":
                warn_if_rounded(name, _fractions(texts))
            elif name in wanted and name not in self._selection.dtypes:
                self._warn_of_missing(name, texts)
        types = {name: ColumnType(dtype or "string") for name, dtype in known.items()}
        return describe(types, self._selection, self._seed, delimiter)

    def _with_header(self) -> list[str]:
        """Return the paths of non-empty files; another job may have written empty ones without a header."""
        indexes = {path: self._index(path) for path in self._paths}
        found = [path for path, index in indexes.items() if index.header or index.num_records]
        if not found:
            raise DataError(
                f"The file {self._paths[0]} has no header row: it is empty.",
                "Pass header=False if it should have none.",
            )
        return found

    def _warn_of(self, without_values: Iterable[str]) -> None:
        for name in without_values:
            _log.warning(
                "The column %s has no value in the first %s rows of %s and is read as texts: "
                '--data_reader_params=\'column_dtypes={"%s": "float64"}\' says otherwise',
                name,
                f"{_GUESSED_FROM:,}",
                self._source,
                name,
            )

    def _warn_of_missing(self, name: str, texts: Sequence[str]) -> None:
        """Warn of a column that is read as texts because other programs write such texts for missing numbers."""
        missing = next((text.strip() for text in texts if text.strip() in _MISSING), None)
        if missing is not None and _guess([text for text in texts if text.strip() not in _MISSING]) in _NUMBERS:
            _log.warning(
                "The column %s holds %r beside numbers in the first %s rows of %s and is read as texts: write "
                'missing numbers as empty fields; with --data_reader_params=\'column_dtypes={"%s": "float64"}\' such '
                "rows are bad records",
                name,
                missing,
                f"{_GUESSED_FROM:,}",
                self._source,
                name,
            )

    def _first_rows(self) -> list[bytes]:
        rows: list[bytes] = []
        for path in self._paths:
            rows += self.read(Shard(path, 0, min(_GUESSED_FROM - len(rows), self._index(path).num_records)))
        return rows

    def _column_names(self, path: str) -> tuple[str, ...]:
        return (*self._header_names(path), *self._keys(path))

    def _keys(self, path: str) -> list[str]:
        """Return the partition keys of a file that are columns: selected ones, without those in its header."""
        partition = self._partitions.values.get(path)
        if not partition:
            return []
        own, features = self._header_names(path), self._selection.features
        wanted = {*features, self._selection.label} if features else set(partition)
        return [key for key in partition if key in wanted and key not in own]

    def _added(self, path: str) -> bytes:
        """Return the bytes to append to each row of a file: the values of its partition."""
        delimiter = self._rules.delimiter.decode()
        values = [self._partitions.value(path, key) for key in self._keys(path)]
        return "".join(delimiter + _quoted(value, delimiter) for value in values).encode()

    def _header_names(self, path: str) -> tuple[str, ...]:
        header = self._index(path).header or b""
        try:
            text = header.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"The header row of {path} is not UTF-8: {error.reason}.") from error
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=self._rules.delimiter.decode()))
        if len(rows) > 1 and self._rules.quoted:
            raise DataError(
                f"The rows of {path} end with CR alone, as on an old Macintosh.",
                "Convert it: tr '\\r' '\\n' < FILE > NEW_FILE.",
            )
        return tuple(name.strip() for name in next(iter(rows), []))

    def _index(self, path: str) -> TextIndex:
        with self._lock:
            index = self._indexes.get(path)
            if index is None:
                with self._opened(path) as file:
                    index = self._indexes[path] = TextIndex.find(file, self._rules)
            return index

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[DataFile]:
        """Return a context with a file for one read; a file in storage stays open, since opening it costs a request."""
        file = self._remote.get(path) or open_file(path)
        if file.is_local:
            with contextlib.closing(file):
                yield file
        else:
            yield self._remote.setdefault(path, file)


def _stream(file: DataFile, begin: int, end: int) -> BinaryIO:
    """Return a stream that begins at an offset; from storage, the whole range is fetched with concurrent requests."""
    if not file.is_local:
        return io.BytesIO(file.pread(end - begin, begin))
    stream = file.scan()
    stream.seek(begin)
    return stream


def _quoted(value: int | str | None, delimiter: str) -> str:
    """Return a value as a field of a CSV row."""
    text = "" if value is None else str(value)
    is_plain = not any(mark in text for mark in (delimiter, '"', "\r", "\n"))
    return text if is_plain else '"' + text.replace('"', '""') + '"'


@dataclass(frozen=True, slots=True)
class TextRules:
    """How rows are separated.

    Attributes:
        quoted: CSV: quoted fields may contain line ends, and blank lines are skipped; otherwise each line is a row.
        has_header: The first row of each file contains the names of the columns.
        delimiter: The byte between the fields of a CSV row.
    """

    quoted: bool
    has_header: bool
    delimiter: bytes = b","


def rows_from(file: BinaryIO, offset: int, rules: TextRules, path: str) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes, without line end, of each row of a stream.

    Args:
        file: The stream; it is at the start of a row.
        offset: Offset of the stream's position in the file.
        rules: How rows are separated.
        path: Path of the file, for messages.

    Raises:
        DataError: A quoted field is not closed; the message has the file and the byte offset.
    """
    for line in file:
        start = offset
        offset += len(line)
        if rules.quoted:
            if line in (b"\n", b"\r\n"):
                continue
            if b'"' in line and ends_inside_quotes(line, False, rules.delimiter):
                line = _join_quoted(file, line, rules, path, start)
                offset = start + len(line)
        yield start, _without_line_end(line)


def _join_quoted(file: BinaryIO, line: bytes, rules: TextRules, path: str, start: int) -> bytes:
    """Return the whole row that begins with ``line``; the line ends inside a quoted field."""
    lines = [line]
    inside = True
    while inside:
        line = file.readline()
        if not line:
            raise DataError(
                f"{path}, byte {start}: the row that begins here has a quoted field that is never closed.",
                "Double each quote inside a quoted field; for text that is not CSV pass reader_type=Text.",
            )
        lines.append(line)
        inside = b'"' not in line or ends_inside_quotes(line, True, rules.delimiter)
    return b"".join(lines)


def ends_inside_quotes(line: bytes, inside: bool, delimiter: bytes) -> bool:
    """Return whether a line ends inside a quoted field; `inside`: it begins inside one, else at a row's start."""
    position = 0
    while True:
        if inside or line.startswith(b'"', position):
            position = _after_closing_quote(line, position if inside else position + 1)
            if position < 0:
                return True
            inside = False
        position = line.find(delimiter, position)
        if position < 0:
            return False
        position += 1


def _after_closing_quote(line: bytes, position: int) -> int:
    """Return the position after the quote that closes the field, or -1 if there is none."""
    while (quote := line.find(b'"', position)) >= 0:
        if not line.startswith(b'"', quote + 1):
            return quote + 1
        position = quote + 2
    return -1


def _without_line_end(line: bytes) -> bytes:
    if line.endswith(b"\r\n"):
        return line[:-2]
    return line[:-1] if line.endswith(b"\n") else line


csv.field_size_limit(2**31 - 1)  # a field may be a whole document
# The default texts for missing values of pandas.read_csv, without those that Python parses as numbers.
_MISSING = frozenset(
    {"#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA", "NULL"}
)
_MISSING |= {"None", "n/a", "null"}
_LEADING_ZEROS = re.compile(r"\s*[+-]?0\d+\s*")


def split_rows(rows: Sequence[bytes], delimiter: str) -> list[list[str]]:
    """Return the fields of each row; bytes that are not UTF-8 become surrogates, see `encoded`.

    Raises:
        DataError: A row is not CSV.
    """
    return [_fields(row, delimiter) for row in rows]


def _fields(row: bytes, delimiter: str) -> list[str]:
    if b'\\"' in row and _escapes_quote(row, delimiter.encode()):
        raise DataError(
            f"A row is not CSV: a quote behind a backslash in a field without quotes around it: {row[:_SHOWN]!r}.",
            "Put such fields into quotes and double the quotes inside: there is no escapechar; --max_bad_records=N "
            "leaves such rows out.",
        )
    try:
        return next(csv.reader([row.decode(errors="surrogateescape")], delimiter=delimiter, strict=True), [])
    except csv.Error as error:  # a single CR, which ends a row for the module, or text after a closing quote
        raise DataError(
            f"A row is not CSV: {str(error).partition(' - ')[0]}: {row[:_SHOWN]!r}.",
            "Quote fields that hold line ends, and double quotes inside quoted fields: there is no escapechar; "
            "--max_bad_records=N leaves such rows out.",
        ) from error


def _escapes_quote(row: bytes, delimiter: bytes) -> bool:
    """Return whether an unquoted field contains a quote after a backslash, as written by programs with an escapechar.

    Other programs quote a field that contains a quote.
    """
    position = 0
    while position >= 0:
        if row.startswith(b'"', position):
            position = _after_closing_quote(row, position + 1)
            if position < 0:
                return False
        end = row.find(delimiter, position)
        if row.find(b'\\"', position, end if end >= 0 else len(row)) >= 0:
            return True
        position = end + 1 if end >= 0 else -1
    return False


def encoded(column: str, texts: Iterable[str]) -> list[bytes]:
    """Return the fields of a column as UTF-8.

    Raises:
        DataError: A field has another encoding.
    """
    try:
        return [text.encode() for text in texts]
    except UnicodeEncodeError as error:
        field = error.object.encode(errors="surrogateescape")
        raise DataError(
            f"A row has {field[:_SHOWN]!r} in the column {column}, which is not UTF-8.",
            "Convert the file, such as by iconv -f LATIN1 -t UTF-8; --max_bad_records=N leaves such rows out.",
        ) from error


def guess_types(rows: Sequence[bytes], num_columns: int, delimiter: str) -> list[str]:
    """Return the `common_type` of each column; "float64" for integers with missing values, "" without any value."""
    return [_guess(column) for column in _columns(rows, num_columns, delimiter)]


def _columns(rows: Sequence[bytes], num_columns: int, delimiter: str) -> list[list[str]]:
    columns: list[list[str]] = [[] for _ in range(num_columns)]
    for row in rows:
        with contextlib.suppress(DataError):  # the user's `feed` may accept a row that is not CSV here
            for column, field in zip(columns, _fields(row, delimiter), strict=False):
                column.append(field)
    return columns


def _fractions(texts: Iterable[str]) -> NDArray[np.float64]:
    """Return the texts that are numbers, as numbers."""
    found = []
    for text in texts:
        with contextlib.suppress(ValueError):
            found.append(float(text))
    return np.array(found, np.float64)


def common_type(values: Iterable[str]) -> str:
    """Return the common type of texts that are not blank; training and statistics use the same rule.

    Returns:
        "int64" if all are integers, "float64" if all are numbers, else "string".  Integers beyond int64 are texts,
        because float64 would round such ids, and so are integers with leading zeros, because they are codes (02134).
    """
    found = "int64"
    for value in values:
        kind = _type(value)
        if kind == "string":
            return kind
        if kind == "float64":
            found = kind
    return found


def _guess(values: Sequence[str]) -> str:
    given = [value for value in values if value.strip()]
    if not given:
        return ""
    kind = common_type(given)
    return "float64" if kind == "int64" and len(given) < len(values) else kind


def _type(text: str) -> str:
    if "_" in text or _LEADING_ZEROS.fullmatch(text):  # Python parses both as numbers
        return "string"
    try:
        return "int64" if -(2**63) <= int(text) < 2**63 else "string"
    except ValueError:
        pass
    try:
        return "float64" if math.isfinite(float(text)) or text.strip().lower() in ("nan", "inf", "-inf") else "string"
    except ValueError:
        return "string"
