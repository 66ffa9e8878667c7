"""The index of one RecordIO file: where each chunk lies and which records it holds.

Built in one pass over the chunk headers, 20 bytes a chunk; never reads, decompresses or checks a body.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from elasticdl.data.files import DataFile, open_file, pread_in_order
from elasticdl.data.index_cache import Arrays, cached
from elasticdl.data.recordio_format import HEADER_SIZE_BYTES, ChunkFormatError, ChunkHeader
from elasticdl_client.errors import DataError


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """A chunk of a file.

    Attributes:
        offset: of its header, in bytes.
        header: as read from the file.
        first_record: the number, in the file, of its first record.
    """

    offset: int
    header: ChunkHeader
    first_record: int

    @property
    def body_offset(self) -> int:
        return self.offset + HEADER_SIZE_BYTES


class RecordIOIndex:
    """Chunks of one file in order; chunks without records are left out."""

    __slots__ = ("_first_records", "chunks", "num_records", "path")

    def __init__(self, path: str, chunks: list[ChunkPlace], num_records: int) -> None:
        self.path = path
        self.chunks = chunks
        self.num_records = num_records
        self._first_records = [chunk.first_record for chunk in chunks]

    @classmethod
    def build(cls, path: str) -> RecordIOIndex:
        """Reads all chunk headers of a file; those of a file of storage are found again by the next process.

        Raises:
            DataError: if the file cannot be opened, or a chunk is truncated or is none.
        """
        file = open_file(path)
        try:
            return cls.of(file)
        finally:
            file.close()

    @classmethod
    def of(cls, file: DataFile) -> RecordIOIndex:
        """As `build`, of an open file."""
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
        """The position in `chunks` of the chunk that holds a record."""
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
    """The error for a damaged chunk, naming file and byte offset."""
    hint = "The file was cut off or changed after it was written, or is no RecordIO file: write it again or remove it."
    return DataError(f"RecordIO file {path}, byte {offset}: {what}.", hint)
