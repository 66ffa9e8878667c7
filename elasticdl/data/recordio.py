"""Read RecordIO files by record number: the `Reader`, a file, and its index.

`recordio_format` owns the bytes of a chunk; its writer is re-exported here. Opened chunks are checked once and kept, up
to a limit. For uncompressed chunks that are large, or have large records, only the record offsets are kept, and ranges
are read from the file. Records are never parsed.

The index contains the position and the records of each chunk. It is built in one pass over the chunk headers, 20 bytes
per chunk; the bodies are not read, decompressed or checked for it.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from elasticdl.data.files import Arrays, DataFile, LocalFile, cached, open_file, pread_in_order
from elasticdl.data.reader import Metadata, PartsReader
from elasticdl.data.recordio_format import (
    HEADER_SIZE_BYTES,
    LARGE_RECORD_BYTES,
    ChunkFormatError,
    ChunkHeader,
    Compressor,
    RecordIOWriter,
    RecordTable,
    decode_body,
)
from elasticdl_client.errors import DataError

__all__ = ["Compressor", "RecordIOFile", "RecordIOIndex", "RecordIOReader", "RecordIOWriter"]


class RecordIOReader(PartsReader):
    """The `Reader` over RecordIO files: one shard per file, named by its path.  Files without records are left out."""

    def __init__(self, source: str, paths: Sequence[str], seed: int = 0) -> None:
        """Create a reader, without opening a file.

        Args:
            source: The source as the user named it, for messages.
            paths: Paths of the files.
            seed: Seed of the job, for the metadata.
        """
        super().__init__(source, paths, RecordIOFile, lambda: Metadata(seed=seed))


_KEPT_BODY_MAX_BYTES = 1 << 20
_CACHE_SIZE_BYTES = 128 << 20
_BECAME_SHORTER = "the file became shorter while it was being read"
_BECAME_ANOTHER = "the file became another one, or shorter, while it was being read"


@dataclass(frozen=True, slots=True)
class _OpenChunk:
    """A chunk with a correct checksum and correct record lengths.

    Attributes:
        body: The uncompressed body; None: ranges are read from the file again.
    """

    place: ChunkPlace
    table: RecordTable
    body: bytes | memoryview | None

    @property
    def size_bytes(self) -> int:
        return 256 + self.table.size_bytes + (0 if self.body is None else len(self.body))


class RecordIOFile:
    """The records of one file, by number.  Thread-safe."""

    def __init__(self, path: str, cache_size_bytes: int = _CACHE_SIZE_BYTES) -> None:
        """Open the file and build the index.

        Args:
            path: Path of the file.
            cache_size_bytes: Maximum memory for opened chunks.

        Raises:
            DataError: The file is missing, truncated or not a RecordIO file.
        """
        self._file = open_file(path)
        self.index = RecordIOIndex.of(self._file)
        self.path = path
        self._cache_size_bytes = cache_size_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[int, _OpenChunk] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.index.num_records

    def read(self, start: int, end: int) -> list[bytes]:
        """Return records ``start`` (inclusive) to ``end`` (exclusive).

        Raises:
            DataError: A chunk with these records is damaged; the message has the file and the byte offset.
            IndexError: The file does not have these records.
        """
        if not 0 <= start <= end <= self.index.num_records:
            raise IndexError(f"records {start} to {end} of {self.path}, which has {self.index.num_records}")
        records: list[bytes] = []
        number = self.index.find(start)
        opened = {} if self._file.is_local or start == end else self._open_all(number, self.index.find(end - 1))
        while start < end:
            chunk = opened.get(number) or self._open(number)
            first = start - chunk.place.first_record
            last = min(end - chunk.place.first_record, chunk.table.num_records)
            records += self._records(chunk, first, last)
            start = chunk.place.first_record + last
            number += 1
        return records

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> RecordIOFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _records(self, chunk: _OpenChunk, first: int, last: int) -> list[bytes]:
        begin, end = chunk.table.byte_range(first, last)
        offset = chunk.place.body_offset + begin
        are_large = end - begin >= LARGE_RECORD_BYTES * (last - first)
        if chunk.body is None and are_large and isinstance(self._file, LocalFile):
            records = self._file.pread_records(offset, chunk.table.ends(first, last), begin)
            if records is None:
                raise chunk_error(self.path, offset, _BECAME_ANOTHER)
            return records
        piece = self._pread(end - begin, offset) if chunk.body is None else memoryview(chunk.body)[begin:end]
        return chunk.table.split(piece, first, last)

    def _open(self, number: int) -> _OpenChunk:
        with self._lock:
            chunk = self._cache.get(number)
            if chunk is not None:
                self._cache.move_to_end(number)
                return chunk
        place = self.index.chunks[number]
        return self._keep(
            number, self._verify(place, self._pread(place.header.compressed_size_bytes, place.body_offset))
        )

    def _open_all(self, first: int, last: int) -> dict[int, _OpenChunk]:
        """Return chunks by number; read all missing ones concurrently, since each request to storage takes long."""
        with self._lock:
            opened = {number: self._cache[number] for number in range(first, last + 1) if number in self._cache}
        missing = [number for number in range(first, last + 1) if number not in opened]
        places = [self.index.chunks[number] for number in missing]
        bodies = self._file.pread_all([(place.body_offset, place.header.compressed_size_bytes) for place in places])
        for number, place, body in zip(missing, places, bodies, strict=True):
            opened[number] = self._keep(number, self._verify(place, body))
        return opened

    def _keep(self, number: int, chunk: _OpenChunk) -> _OpenChunk:
        with self._lock:
            if number not in self._cache:
                self._cache[number] = chunk
                self._cached_bytes += chunk.size_bytes
            while self._cached_bytes > self._cache_size_bytes and len(self._cache) > 1:
                _, oldest = self._cache.popitem(last=False)
                self._cached_bytes -= oldest.size_bytes
        return chunk

    def _verify(self, place: ChunkPlace, compressed: bytes | memoryview) -> _OpenChunk:
        header = place.header
        try:
            body = decode_body(header, compressed)
            table = RecordTable(body, header.num_records)
        except ChunkFormatError as error:
            raise chunk_error(self.path, place.offset, str(error)) from error
        can_be_read_again = self._file.is_local and header.compressor is Compressor.NONE
        are_small = len(body) < LARGE_RECORD_BYTES * header.num_records
        is_better_kept = are_small and len(body) <= _KEPT_BODY_MAX_BYTES
        return _OpenChunk(place, table, body if is_better_kept or not can_be_read_again else None)

    def _pread(self, size_bytes: int, offset: int) -> bytes:
        """Return exactly ``size_bytes`` bytes."""
        data = self._file.pread(size_bytes, offset)
        if len(data) < size_bytes:
            raise chunk_error(self.path, offset + len(data), _BECAME_SHORTER)
        return data


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """The position of a chunk in a file.

    Attributes:
        offset: Offset of its header, in bytes.
        header: Its header, read from the file.
        first_record: Number of its first record in the file.
    """

    offset: int
    header: ChunkHeader
    first_record: int

    @property
    def body_offset(self) -> int:
        return self.offset + HEADER_SIZE_BYTES


class RecordIOIndex:
    """The chunks of one file, in order, without chunks that have no records."""

    __slots__ = ("_first_records", "chunks", "num_records", "path")

    def __init__(self, path: str, chunks: list[ChunkPlace], num_records: int) -> None:
        self.path = path
        self.chunks = chunks
        self.num_records = num_records
        self._first_records = [chunk.first_record for chunk in chunks]

    @classmethod
    def build(cls, path: str) -> RecordIOIndex:
        """Read all chunk headers of a file; for a file in storage they are cached for the next process.

        Raises:
            DataError: The file cannot be opened, or a chunk is truncated or invalid.
        """
        with closing(open_file(path)) as file:
            return cls.of(file)

    @classmethod
    def of(cls, file: DataFile) -> RecordIOIndex:
        """Build the index of an open file, like `build`."""
        if file.is_local:
            return cls._from(file.path, _headers(file))

        def arrays() -> Arrays:
            data = b"".join(header.to_bytes() for header in _headers(file))
            return {"headers": np.frombuffer(data, np.uint8)}

        data = cached(file.path, "recordio", arrays, file.stamp)["headers"].tobytes()
        pieces = (data[start : start + HEADER_SIZE_BYTES] for start in range(0, len(data), HEADER_SIZE_BYTES))
        return cls._from(file.path, map(ChunkHeader.from_bytes, pieces))

    @classmethod
    def _from(cls, path: str, headers: Iterable[ChunkHeader]) -> RecordIOIndex:
        chunks: list[ChunkPlace] = []
        num_records = offset = 0
        for header in headers:
            if header.num_records:
                chunks.append(ChunkPlace(offset, header, num_records))
                num_records += header.num_records
            offset += HEADER_SIZE_BYTES + header.compressed_size_bytes
        return cls(path, chunks, num_records)

    def find(self, record: int) -> int:
        """Return the index in `chunks` of the chunk that contains a record."""
        return bisect.bisect_right(self._first_records, record) - 1


def _headers(file: DataFile) -> list[ChunkHeader]:
    size_bytes = file.size_bytes
    headers: list[ChunkHeader] = []
    offset = 0
    with pread_in_order(file) as pread:
        while offset < size_bytes:
            try:
                header = ChunkHeader.from_bytes(pread(HEADER_SIZE_BYTES, offset))
            except ChunkFormatError as error:
                raise chunk_error(file.path, offset + error.offset, str(error)) from error
            left = size_bytes - offset - HEADER_SIZE_BYTES
            if header.compressed_size_bytes > left:
                said = header.compressed_size_bytes
                what = f"a chunk is truncated: its header says {said} bytes, the file has {left} more"
                raise chunk_error(file.path, offset, what)
            headers.append(header)
            offset += HEADER_SIZE_BYTES + header.compressed_size_bytes
    return headers


def chunk_error(path: str, offset: int, what: str) -> DataError:
    """Return the error for a damaged chunk, with file and byte offset."""
    hint = "The file was cut off or changed after it was written, or is no RecordIO file: write it again or remove it."
    if offset == 0:
        hint = (
            "A file whose name does not end as those of another kind is read as RecordIO: name the kind, such as "
            "--data_reader_params=reader_type=CSV; or the file is damaged: write it again or remove it."
        )
    return DataError(f"RecordIO file {path}, byte {offset}: {what}.", hint)
