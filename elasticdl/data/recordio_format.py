"""The format of RecordIO chunks, compatible with pyrecordio: header, checksum, compression, record framing.

A file is a sequence of chunks.  A chunk is a header of five little-endian uint32 (magic, CRC-32 of the compressed
body, compressor, size of the compressed body, number of records) and the body: a uint32 length before each record.
`RecordIOWriter` collects records in chunks, and renames the file to its final name when it is complete.  Chunks are
small by default, so that reading a range reads little else.  `recordio` reads files.
"""

from __future__ import annotations

import enum
import gzip
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

import cramjam
import numpy as np
from numpy.typing import NDArray

from elasticdl.kernels import _native
from elasticdl_client.errors import DataError

MAGIC = 0x01020304
HEADER_SIZE_BYTES = 20
LARGE_RECORD_BYTES = 4096  # average size from which on records are copied without the GIL

_HEADER = struct.Struct("<5I")
_LENGTH = struct.Struct("<I")
_crc32 = _native.crc32 if _native.has_crc32() else zlib.crc32


class ChunkFormatError(Exception):
    """A chunk that cannot be read; the caller, which knows the file, converts it to a `DataError`.

    Attributes:
        offset: Offset of the fault in the chunk, in bytes.
    """

    def __init__(self, what: str, offset: int = 0) -> None:
        super().__init__(what)
        self.offset = offset


class Compressor(enum.IntEnum):
    """The compression of a chunk's body; the values are the ones in the file."""

    NONE = 0
    SNAPPY = 1
    GZIP = 2


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The 20 bytes before a chunk's body."""

    checksum: int
    compressor: Compressor
    compressed_size_bytes: int
    num_records: int

    def to_bytes(self) -> bytes:
        return _HEADER.pack(MAGIC, self.checksum, self.compressor, self.compressed_size_bytes, self.num_records)

    @classmethod
    def from_bytes(cls, data: bytes) -> ChunkHeader:
        """Parse 20 bytes.

        Raises:
            ChunkFormatError: The bytes are not a chunk header.
        """
        if len(data) < HEADER_SIZE_BYTES:
            raise ChunkFormatError(f"a chunk header is cut off after {len(data)} of {HEADER_SIZE_BYTES} bytes")
        magic, checksum, compressor, compressed_size_bytes, num_records = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise ChunkFormatError(
                f"no RecordIO chunk begins here: its magic number is {magic:#010x}, not {MAGIC:#010x}"
            )
        try:
            known_compressor = Compressor(compressor)
        except ValueError:
            raise ChunkFormatError(f"the chunk names the unknown compressor {compressor}", 8) from None
        return cls(checksum, known_compressor, compressed_size_bytes, num_records)


def encode_chunk(records: Sequence[bytes], compressor: Compressor) -> bytes:
    """Return ``records`` as a chunk, header and body."""
    pieces: list[bytes] = []
    for record in records:
        pieces.append(_LENGTH.pack(len(record)))
        pieces.append(record)
    body = _compress(b"".join(pieces), compressor)
    return ChunkHeader(_crc32(body), compressor, len(body), len(records)).to_bytes() + body


def decode_body(header: ChunkHeader, compressed: bytes | memoryview) -> bytes | memoryview:
    """Check the checksum of a chunk's body, and return the uncompressed body.

    Raises:
        ChunkFormatError: The checksum is wrong, or the body cannot be decompressed.
    """
    checksum = _crc32(compressed)
    if checksum != header.checksum:
        raise ChunkFormatError(
            f"a chunk is corrupt: its CRC-32 is {checksum:#010x}, its header says {header.checksum:#010x}"
        )
    try:
        return _decompress(compressed, header.compressor)
    except (cramjam.DecompressionError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise ChunkFormatError(
            f"a chunk cannot be decompressed as {header.compressor.name.lower()}: {error}"
        ) from error


def _compress(body: bytes, compressor: Compressor) -> bytes:
    if compressor is Compressor.SNAPPY:
        return bytes(cramjam.snappy.compress(body))
    if compressor is Compressor.GZIP:
        return gzip.compress(body, compresslevel=6, mtime=0)
    return body


def _decompress(compressed: bytes | memoryview, compressor: Compressor) -> bytes | memoryview:
    if compressor is Compressor.SNAPPY:
        return bytes(cramjam.snappy.decompress(compressed))
    if compressor is Compressor.GZIP:
        return gzip.decompress(compressed)
    return compressed


class RecordTable:
    """The positions of the records in an uncompressed chunk body; one number if all have the same length."""

    __slots__ = ("_ends", "_record_length", "num_records")

    def __init__(self, body: bytes | memoryview, num_records: int) -> None:
        """Read all length prefixes of the body.

        Raises:
            ChunkFormatError: The lengths do not add up to the size of the body.
        """
        self.num_records = num_records
        self._record_length = _equal_length(body, num_records)
        self._ends: NDArray[np.int64] | None = None
        if self._record_length is None:
            self._ends = _walk(body, num_records)

    @property
    def size_bytes(self) -> int:
        """The memory used by the table."""
        return 0 if self._ends is None else self._ends.nbytes

    def byte_range(self, first: int, last: int) -> tuple[int, int]:
        """Return the byte range of records ``first`` to ``last`` (exclusive) in the body, with length prefixes."""
        if self._ends is None:
            stride = self._stride()
            return first * stride, last * stride
        begin = 0 if first == 0 else int(self._ends[first - 1])
        return begin, int(self._ends[last - 1])

    def ends(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the end of each of the records ``first`` to ``last`` (exclusive) in the body."""
        if self._ends is None:
            return np.arange(first + 1, last + 1, dtype=np.int64) * self._stride()
        return self._ends[first:last]

    def split(self, piece: bytes | memoryview, first: int, last: int) -> list[bytes]:
        """Return records ``first`` to ``last`` (exclusive) from the bytes of their `byte_range`."""
        if self._ends is None and self._stride() < LARGE_RECORD_BYTES:
            stride = self._stride()
            if stride == _LENGTH.size:
                return [b""] * (last - first)
            layout = np.dtype([("length", "<u4"), ("record", f"V{stride - _LENGTH.size}")])
            records: list[bytes] = np.frombuffer(piece, layout)["record"].tolist()
            return records
        return _native.split_records(piece, self.ends(first, last), self.byte_range(first, last)[0])

    def _stride(self) -> int:
        return _LENGTH.size + (self._record_length or 0)


def _equal_length(body: bytes | memoryview, num_records: int) -> int | None:
    """Return the length of every record if all have the same length, else None."""
    if num_records == 0 or len(body) % num_records or len(body) // num_records < _LENGTH.size:
        return None
    stride = len(body) // num_records
    lengths = np.ndarray((num_records,), "<u4", body, strides=(stride,))
    return stride - _LENGTH.size if bool((lengths == stride - _LENGTH.size).all()) else None


def _walk(body: bytes | memoryview, num_records: int) -> NDArray[np.int64]:
    """Return the end of each record in the body."""
    if num_records * _LENGTH.size > len(body):
        raise ChunkFormatError(f"a chunk of {len(body)} bytes cannot hold the {num_records} records its header names")
    ends = _native.record_ends(body, num_records)
    if len(ends) < num_records or (ends[-1] if num_records else 0) != len(body):
        raise _fault(body, num_records, ends.tolist())
    return ends


def _fault(body: bytes | memoryview, num_records: int, ends: Sequence[int]) -> ChunkFormatError:
    """Return the error for record ends that do not fit the body."""
    for number, end in enumerate(ends):
        if end > len(body):
            begin = (ends[number - 1] if number else 0) + _LENGTH.size
            what = f"record {number} of a chunk says {end - begin} bytes, {len(body) - begin} are left in it"
            return ChunkFormatError(what)
    if len(ends) < num_records:
        return ChunkFormatError(f"a chunk ends before record {len(ends)} of the {num_records} its header names")
    left = len(body) - ends[-1]
    return ChunkFormatError(f"a chunk has {left} bytes left after the {num_records} records its header names")


DEFAULT_CHUNK_SIZE_BYTES = 64 * 1024
MAX_CHUNK_SIZE_BYTES = 1 << 30
MAX_RECORD_SIZE_BYTES = 1 << 31


class RecordIOWriter:
    """Writes records to a file; the file gets its name when the writer is closed.

    Use it as a context manager: an exception in the block leaves no file behind.
    """

    def __init__(
        self,
        path: str,
        compressor: Compressor = Compressor.NONE,
        chunk_size_bytes: int = DEFAULT_CHUNK_SIZE_BYTES,
    ) -> None:
        if not 1 <= chunk_size_bytes <= MAX_CHUNK_SIZE_BYTES:
            raise ValueError(f"chunk_size_bytes is {chunk_size_bytes}, must be 1 to {MAX_CHUNK_SIZE_BYTES}")
        self._path = path
        self._compressor = compressor
        self._chunk_size_bytes = chunk_size_bytes
        directory, name = os.path.split(path)
        self._partial_path = os.path.join(directory, f".{name}.partial")
        self._records: list[bytes] = []
        self._pending_bytes = 0
        self.num_records = 0
        try:
            self._file = open(self._partial_path, "wb")  # noqa: SIM115 - closed by close() or abort()
        except OSError as error:
            raise _cannot_write(path, error) from error

    def write(self, record: bytes) -> None:
        """Add a record."""
        if len(record) > MAX_RECORD_SIZE_BYTES:
            raise DataError(f"A record of {len(record)} bytes for {self._path} is larger than RecordIO can hold.")
        self._records.append(record)
        self._pending_bytes += len(record) + 4
        self.num_records += 1
        if self._pending_bytes >= self._chunk_size_bytes:
            self._flush()

    def write_all(self, records: Iterable[bytes]) -> None:
        """Add records in order."""
        for record in records:
            self.write(record)

    def close(self) -> None:
        """Write the pending records and rename the file to its final name; a second call does nothing."""
        if self._file.closed:
            return
        self._flush()
        try:
            self._file.close()
            os.replace(self._partial_path, self._path)
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def abort(self) -> None:
        """Discard all records and remove the unfinished file."""
        if not self._file.closed:
            self._file.close()
            os.unlink(self._partial_path)

    def __enter__(self) -> RecordIOWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _flush(self) -> None:
        if not self._records:
            return
        chunk = encode_chunk(self._records, self._compressor)
        self._records = []
        self._pending_bytes = 0
        try:
            self._file.write(chunk)
        except OSError as error:
            raise _cannot_write(self._path, error) from error


def _cannot_write(path: str, error: OSError) -> DataError:
    return DataError(
        f"The RecordIO file {path} cannot be written: {error.strerror}.",
        "Check that its directory exists, may be written to and has space left.",
    )
