"""The `Reader` over text files: CSV by the rules of RFC 4180, or one record a line.

A record is the raw bytes of a row without its line end, and the values of its partition.  Rows are found by byte
offsets through `TextIndex`, which one streaming pass builds; no file is ever held in memory.  Never splits a row into
fields (the header excepted).

A quoted field begins with a quote right after a delimiter or at the start of a row; inside it, a doubled quote is a
quote and a line end is data.  Elsewhere a quote is an ordinary character (as in Python's csv module).  Blank lines
between CSV rows are no rows.  Rows end with LF or CRLF.

`guess_types` and `split_rows`: guesses at the types of columns, and rows taken apart into columns.
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
_SHOWN = 80  # bytes of a wrong row or field
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class TextIndex:
    """Where the rows of one file are.

    Attributes:
        header: the raw header row; empty in a file without any row, and None where none is wanted.
        offsets: of rows 0, 256, 512, … in bytes; the header is not counted.
        num_records: rows without the header.
        size_bytes: of the file when it was indexed.
    """

    header: bytes | None
    offsets: tuple[int, ...]
    num_records: int
    size_bytes: int

    def offset_after(self, row: int) -> int:
        """The first known offset that is not before the end of the row before `row`."""
        number = -(-row // _ROWS_BETWEEN_OFFSETS)
        return self.offsets[number] if number < len(self.offsets) else self.size_bytes

    @classmethod
    def find(cls, file: DataFile, rules: TextRules) -> TextIndex:
        """The index of a file from its cache, or built.

        Raises:
            DataError: see `build`.
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
        """Reads a file once.

        Raises:
            DataError: if it cannot be read, or a quoted field is never closed.
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
    """The `Reader` over text files: one shard a file, named by its path.  Files without rows are left out."""

    def __init__(
        self,
        source: str,
        paths: Sequence[str],
        rules: TextRules,
        partitions: Partitions,
        selection: Selection,
        seed: int,
    ) -> None:
        """Opens no file yet.

        Args:
            source: as the user named it; for messages.
            paths: of the files.
            rules: how rows are separated.
            partitions: of CSV files with a header: rows end with those values that the header does not name.
            selection: of the columns, for the metadata: records are whole rows.
            seed: of the job; for the metadata.
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
                self._check(path)  # nothing of it will be read
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
            self._check(shard.name, True, shard.identity)  # it was not replaced meanwhile
        return records

    def metadata(self) -> Metadata:
        """Column names come from the header, which all files must share, types from the first rows of all together."""
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
        wanted = dict.fromkeys(self._selection.of(names, first))  # of a table of many columns each is looked up
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
        """Return the paths of the files that are not empty, as the files of a job may be that had no row for one."""
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
        """Warn of a column that is read as texts because of texts that others write for missing numbers."""
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
        """Columns that are in the names of a file's directories alone; where the user names columns, those of them."""
        partition = self._partitions.values.get(path)
        if not partition:
            return []
        own, features = self._header_names(path), self._selection.features
        wanted = {*features, self._selection.label} if features else set(partition)
        return [key for key in partition if key in wanted and key not in own]

    def _added(self, path: str) -> bytes:
        """The values of its partition at the end of each row of a file."""
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
        """A file for one read; one of storage, which is a request to open, is opened once."""
        file = self._remote.get(path) or open_file(path)
        if file.is_local:
            with contextlib.closing(file):
                yield file
        else:
            yield self._remote.setdefault(path, file)


def _stream(file: DataFile, begin: int, end: int) -> BinaryIO:
    """A stream that begins at an offset: of storage all that is wanted, in requests at once."""
    if not file.is_local:
        return io.BytesIO(file.pread(end - begin, begin))
    stream = file.scan()
    stream.seek(begin)
    return stream


def _quoted(value: int | str | None, delimiter: str) -> str:
    """A field of a CSV row."""
    text = "" if value is None else str(value)
    is_plain = not any(mark in text for mark in (delimiter, '"', "\r", "\n"))
    return text if is_plain else '"' + text.replace('"', '""') + '"'


@dataclass(frozen=True, slots=True)
class TextRules:
    """How rows are separated.

    Attributes:
        quoted: CSV: quotes may hold line ends, and blank lines are skipped; else each line is a row.
        has_header: the first row of each file names the columns.
        delimiter: one byte between the fields of a CSV row.
    """

    quoted: bool
    has_header: bool
    delimiter: bytes = b","


def rows_from(file: BinaryIO, offset: int, rules: TextRules, path: str) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes, without line end, of each row of a stream that begins at ``offset``, where a row begins.

    Raises:
        DataError: naming file and byte offset, if a quoted field is never closed.
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
    """The whole row that begins with ``line``, which ends inside a quoted field."""
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
    """Whether a line that begins inside a quoted field, or at a row's start, ends inside a quoted field."""
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
    """The position after the quote that closes the field, or -1 if none does."""
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
# The texts that pandas.read_csv takes for missing values by default, but for those that Python takes for numbers.
_MISSING = frozenset(
    {"#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA", "NULL"}
)
_MISSING |= {"None", "n/a", "null"}
_LEADING_ZEROS = re.compile(r"\s*[+-]?0\d+\s*")


def split_rows(rows: Sequence[bytes], delimiter: str) -> list[list[str]]:
    """Return the fields of each row; bytes that are not UTF-8 are surrogates: see `encoded`.

    Raises:
        DataError: a row is not CSV.
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
    except csv.Error as error:  # a CR alone, at which the module ends a row, or text behind a closing quote
        raise DataError(
            f"A row is not CSV: {str(error).partition(' - ')[0]}: {row[:_SHOWN]!r}.",
            "Quote fields that hold line ends, and double quotes inside quoted fields: there is no escapechar; "
            "--max_bad_records=N leaves such rows out.",
        ) from error


def _escapes_quote(row: bytes, delimiter: bytes) -> bool:
    """Whether a quote in a field without quotes around it follows a backslash: so writers with an escapechar make it.

    Others put a field with a quote into quotes.
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
        DataError: one is in another encoding.
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
    """For each column its `common_type`; whole numbers of which some are missing are "float64", nothing is ""."""
    return [_guess(column) for column in _columns(rows, num_columns, delimiter)]


def _columns(rows: Sequence[bytes], num_columns: int, delimiter: str) -> list[list[str]]:
    columns: list[list[str]] = [[] for _ in range(num_columns)]
    for row in rows:
        with contextlib.suppress(DataError):  # a `feed` may read what is not CSV for us
            for column, field in zip(columns, _fields(row, delimiter), strict=False):
                column.append(field)
    return columns


def _fractions(texts: Iterable[str]) -> NDArray[np.float64]:
    """The numbers among texts."""
    found = []
    for text in texts:
        with contextlib.suppress(ValueError):
            found.append(float(text))
    return np.array(found, np.float64)


def common_type(values: Iterable[str]) -> str:
    """Return the type of the texts that are not blank: the one rule of training and of statistics.

    Returns:
        "int64" if all are whole numbers, "float64" if all are numbers, else "string".  Whole numbers beyond int64 are
        texts, for float64 would round such ids, and so are those with leading zeros, which are codes: 02134 is no 2134.
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
    if "_" in text or _LEADING_ZEROS.fullmatch(text):  # Python takes both for numbers
        return "string"
    try:
        return "int64" if -(2**63) <= int(text) < 2**63 else "string"
    except ValueError:
        pass
    try:
        return "float64" if math.isfinite(float(text)) or text.strip().lower() in ("nan", "inf", "-inf") else "string"
    except ValueError:
        return "string"
