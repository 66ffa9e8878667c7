"""The index of one RecordIO file: where each chunk lies and which records it holds.

Built in one pass over the chunk headers, 20 bytes a chunk; never reads, decompresses or checks a body.
"""

from __future__ import annotations

import bisect
import os
from dataclasses import dataclass

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
        """Reads all chunk headers of a file.

        Raises:
            DataError: if the file cannot be opened, or a chunk is truncated or is none.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"The RecordIO file {path} cannot be opened: {error.strerror}.") from error
        try:
            return cls._walk(path, descriptor)
        except OSError as error:
            raise DataError(f"The RecordIO file {path} cannot be read: {error.strerror}.") from error
        finally:
            os.close(descriptor)

    @classmethod
    def _walk(cls, path: str, descriptor: int) -> RecordIOIndex:
        size_bytes = os.fstat(descriptor).st_size
        chunks: list[ChunkPlace] = []
        num_records = 0
        offset = 0
        while offset < size_bytes:
            try:
                header = ChunkHeader.from_bytes(os.pread(descriptor, HEADER_SIZE_BYTES, offset))
            except ChunkFormatError as error:
                raise chunk_error(path, offset + error.offset, str(error)) from error
            left = size_bytes - offset - HEADER_SIZE_BYTES
            if header.compressed_size_bytes > left:
                said = header.compressed_size_bytes
                what = f"a chunk is truncated: its header says {said} bytes, the file has {left} more"
                raise chunk_error(path, offset, what)
            if header.num_records:
                chunks.append(ChunkPlace(offset, header, num_records))
                num_records += header.num_records
            offset += HEADER_SIZE_BYTES + header.compressed_size_bytes
        return cls(path, chunks, num_records)

    def find(self, record: int) -> int:
        """The position in `chunks` of the chunk that holds a record."""
        return bisect.bisect_right(self._first_records, record) - 1


def chunk_error(path: str, offset: int, what: str) -> DataError:
    """The error for a damaged chunk, naming file and byte offset."""
    hint = "The file was cut off or changed after it was written, or is no RecordIO file: write it again or remove it."
    return DataError(f"RecordIO file {path}, byte {offset}: {what}.", hint)
