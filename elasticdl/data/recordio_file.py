"""One RecordIO file, read by record number.

Opened chunks are checked once and kept, up to a limit; of uncompressed chunks that are large, or whose records are,
only the record offsets are kept, and ranges are read from the file.  Never parses a record.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from types import TracebackType

from elasticdl.data.files import LocalFile, open_file
from elasticdl.data.recordio_format import LARGE_RECORD_BYTES, ChunkFormatError, Compressor, RecordTable, decode_body
from elasticdl.data.recordio_index import ChunkPlace, RecordIOIndex, chunk_error

_KEPT_BODY_MAX_BYTES = 1 << 20
_CACHE_SIZE_BYTES = 128 << 20
_BECAME_SHORTER = "the file became shorter while it was being read"
_BECAME_ANOTHER = "the file became another one, or shorter, while it was being read"


@dataclass(frozen=True, slots=True)
class _OpenChunk:
    """A chunk whose checksum and record lengths were found right.

    Attributes:
        body: uncompressed, or None when it is read from the file again, range by range.
    """

    place: ChunkPlace
    table: RecordTable
    body: bytes | memoryview | None

    @property
    def size_bytes(self) -> int:
        return 256 + self.table.size_bytes + (0 if self.body is None else len(self.body))


class RecordIOFile:
    """Records of one file by number.  Safe to use from several threads."""

    def __init__(self, path: str, cache_size_bytes: int = _CACHE_SIZE_BYTES) -> None:
        """Builds the index.

        Args:
            path: of the file.
            cache_size_bytes: how much memory opened chunks may take.

        Raises:
            DataError: if the file is missing, truncated or no RecordIO file.
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
        """Records ``start`` (inclusive) to ``end`` (exclusive).

        Raises:
            DataError: naming file and byte offset, if a chunk they lie in is damaged.
            IndexError: if the file does not have these records.
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
        """Closes the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> RecordIOFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """Chunks by their numbers, those that are not kept read at once: each request to storage is a wait."""
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
        """Exactly ``size_bytes`` bytes."""
        data = self._file.pread(size_bytes, offset)
        if len(data) < size_bytes:
            raise chunk_error(self.path, offset + len(data), _BECAME_SHORTER)
        return data
