"""Writes RecordIO files: gathers records into chunks and gives the file its name when it is whole.

Chunks are small by default so that a range read touches little besides the range.  Never reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType

from elasticdl.data.recordio_format import Compressor, encode_chunk
from elasticdl_client.errors import DataError

DEFAULT_CHUNK_SIZE_BYTES = 64 * 1024
MAX_CHUNK_SIZE_BYTES = 1 << 30
MAX_RECORD_SIZE_BYTES = 1 << 31


class RecordIOWriter:
    """Writes records into one file, which appears under its name when the writer is closed.

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
        """Adds a record."""
        if len(record) > MAX_RECORD_SIZE_BYTES:
            raise DataError(f"A record of {len(record)} bytes for {self._path} is larger than RecordIO can hold.")
        self._records.append(record)
        self._pending_bytes += len(record) + 4
        self.num_records += 1
        if self._pending_bytes >= self._chunk_size_bytes:
            self._flush()

    def write_all(self, records: Iterable[bytes]) -> None:
        """Adds records in order."""
        for record in records:
            self.write(record)

    def close(self) -> None:
        """Writes what is pending and gives the file its name; a second call does nothing."""
        if self._file.closed:
            return
        self._flush()
        try:
            self._file.close()
            os.replace(self._partial_path, self._path)
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def abort(self) -> None:
        """Forgets everything written and removes the unfinished file."""
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
