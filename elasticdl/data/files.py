"""One file of data, local or of storage, as readers take it: bytes from an offset on, and a scan in order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticdl.kernels import _native
from elasticdl.storage.remote_file import PositionedStream, RemoteFile, read_together
from elasticdl_client.errors import DataError
from elasticdl_client.storage_kinds import is_remote

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_BUFFER_BYTES = 1 << 18
_GAP_BYTES = 4 << 10  # between two ranges: copying a page costs less than another system call


class DataFile(Protocol):
    """A file that is open.  Safe to use from several threads.

    Attributes:
        path: its path or URL.
        stamp: changes when the file does.
        is_local: a second read of the same bytes costs next to nothing.
    """

    path: str
    stamp: list[object]
    is_local: bool

    @property
    def size_bytes(self) -> int: ...

    def pread(self, size_bytes: int, offset: int) -> bytes:
        """Bytes from an offset on: fewer than asked for only at the end of the file."""
        ...

    def pread_all(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of several ranges, (offset, size), in ascending order: near ones are views of one read."""
        ...

    def pread_spans(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of spans, (start, end), of the file, all read at once: fewer where it has become shorter."""
        ...

    def scan(self) -> BinaryIO:
        """A stream over the file, to be closed, that is best read in order."""
        ...

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        ...


class LocalFile:
    """A file of a file system."""

    is_local = True

    def __init__(self, path: str) -> None:
        """
        Raises:
            DataError: it cannot be opened.
        """
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise _unopened(path, error) from error
        status = os.fstat(self._descriptor)
        self.stamp: list[object] = [status.st_size, status.st_mtime_ns]

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def pread(self, size_bytes: int, offset: int) -> bytes:
        try:
            data = os.pread(self._descriptor, size_bytes, offset)
            while len(data) < size_bytes:  # the system gives 2 GiB at once, at most
                more = os.pread(self._descriptor, size_bytes - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise _unread(self.path, error) from error
        return data

    def pread_records(self, offset: int, ends: NDArray[np.int64], begin: int) -> list[bytes] | None:
        """Framed records from an offset on, each read to where it stays; None where the file has others, or its end.

        Args:
            ends: of the records with the lengths before them, counted from `begin`, where the first one begins.
        """
        try:
            return _native.read_records(self._descriptor, offset, ends, begin)
        except OSError as error:
            raise _unread(self.path, error) from error

    def pread_all(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return read_together([(offset, offset + size) for offset, size in ranges], self.pread_spans, _GAP_BYTES)

    def pread_spans(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.pread(end - start, start) for start, end in spans]

    def scan(self) -> BinaryIO:
        try:
            return open(self.path, "rb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise _unopened(self.path, error) from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()


class FileView(PositionedStream):
    """A file as libraries want it: each read is one of exactly those bytes.  Of one thread at a time."""

    def __init__(self, file: DataFile) -> None:
        super().__init__(lambda: file.size_bytes)
        self._file = file

    def read(self, size: int = -1) -> bytes:
        data = self._file.pread(max(0, self._size_bytes() - self._position) if size < 0 else size, self._position)
        self._position += len(data)
        return data

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


def open_file(path: str) -> DataFile:
    """Opens a file by its path or URL.

    Raises:
        DataError: it is not there, or cannot be read.
    """
    return RemoteFile(path) if is_remote(path) else LocalFile(path)


@contextlib.contextmanager
def pread_in_order(file: DataFile) -> Iterator[Callable[[int, int], bytes]]:
    """A `pread` for offsets that ascend: of storage it reads ahead where they are near each other."""
    if file.is_local:
        yield file.pread
        return
    with file.scan() as stream:

        def pread(size_bytes: int, offset: int) -> bytes:
            stream.seek(offset)
            return stream.read(size_bytes)

        yield pread


def _unread(path: str, error: OSError) -> DataError:
    return DataError(f"The file {path} cannot be read: {error.strerror}.")


def _unopened(path: str, error: OSError) -> DataError:
    return DataError(f"The file {path} cannot be opened: {error.strerror}.")
