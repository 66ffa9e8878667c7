"""Data files, local or in storage: reads at an offset, sequential scans, and cached indexes.

An index is a set of arrays about a data file.  It is built once and kept in a hidden directory next to the file, so
that every process finds it.

An index is valid for one size and time of change, or one etag; it is rebuilt after the file is replaced.  If the
directory is read-only, each process builds its own index.  Indexes of files in storage are also kept in the user's
cache directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elasticdl.kernels import _native
from elasticdl.storage.fsspec_storage import FsspecStorage, storage_of
from elasticdl.storage.remote_file import PositionedStream, RemoteFile, read_together
from elasticdl_client.errors import DataError, StorageError
from elasticdl_client.storage_kinds import is_remote

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


_BUFFER_BYTES = 1 << 18
_GAP_BYTES = 4 << 10  # ranges closer than this are read together: copying a page costs less than a system call


class DataFile(Protocol):
    """An open file.  Thread-safe.

    Attributes:
        path: Path or URL.
        stamp: A value that changes when the file changes.
        is_local: The file is in a file system: reading the same bytes again costs almost nothing.
    """

    path: str
    stamp: list[object]
    is_local: bool

    @property
    def size_bytes(self) -> int: ...

    def pread(self, size_bytes: int, offset: int) -> bytes:
        """Return `size_bytes` bytes at an offset; fewer only at the end of the file."""
        ...

    def pread_all(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of several ranges (offset, size), given in ascending order; near ranges share one read."""
        ...

    def pread_spans(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of spans (start, end), read concurrently; fewer if the file has become shorter."""
        ...

    def scan(self) -> BinaryIO:
        """Return a stream over the file for sequential reads; the caller closes it."""
        ...

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        ...


class LocalFile:
    """A file in a file system."""

    is_local = True

    def __init__(self, path: str) -> None:
        """
        Raises:
            DataError: The file cannot be opened.
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
            while len(data) < size_bytes:  # the system returns at most 2 GiB per call
                more = os.pread(self._descriptor, size_bytes - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise _unread(self.path, error) from error
        return data

    def pread_records(self, offset: int, ends: NDArray[np.int64], begin: int) -> list[bytes] | None:
        """Read records, each preceded by its length; return None if the lengths differ from `ends`, or the file ends.

        Args:
            offset: Offset of the first record in the file.
            ends: End of each record, including the length fields; the first record begins at `begin`.
            begin: Position of the first record, in the numbering of `ends`.
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
    """A data file as a Python file object: each read reads exactly the requested bytes.  Not thread-safe."""

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
    """Open a file by its path or URL.

    Raises:
        DataError: The file does not exist, or cannot be read.
    """
    return RemoteFile(path) if is_remote(path) else LocalFile(path)


@contextlib.contextmanager
def pread_in_order(file: DataFile) -> Iterator[Callable[[int, int], bytes]]:
    """Return a context with a `pread` for ascending offsets; for a file in storage it reads ahead."""
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


Arrays: TypeAlias = Mapping[str, NDArray[Any]]

_FOLDER = ".elasticdl"
_FORMAT = 1
_log = logging.getLogger("elasticdl.data")


def cached(
    path: str,
    kind: str,
    build: Callable[[], Arrays],
    stamp: object = None,
    holds: Callable[[Arrays], bool] = lambda index: True,
) -> Arrays:
    """Return the index of a file from the cache; build and store it if it is not there.

    Args:
        path: Path of the file; its index is stored in a hidden directory next to it.
        kind: Kind of the index, including all parameters that it depends on.
        build: Builds the index.
        stamp: A value that changes when the source changes; None: size and time of change of the file.
        holds: Returns whether a stored index is still valid, for an index that contains what must not have changed.
    """
    if is_remote(path):
        return _cached_of_storage(path, kind, build, stamp)
    if stamp is None:
        status = os.stat(path)
        stamp = [status.st_size, status.st_mtime_ns]
    words = json.dumps([_FORMAT, os.path.abspath(path), kind, stamp])
    name = f"{os.path.basename(path)}.{hashlib.sha256(words.encode()).hexdigest()[:16]}.npz"
    target = Path(os.path.dirname(os.path.abspath(path)), _FOLDER, name)
    found = _load(target, words)
    if found is None or not holds(found):
        found = build()
        _save(target, found, words)
    return found


def _cached_of_storage(url: str, kind: str, build: Callable[[], Arrays], stamp: object) -> Arrays:
    words = json.dumps([_FORMAT, url, kind, stamp])
    directory, _, name = url.rpartition("/")
    name = f"{name.partition('?')[0]}.{hashlib.sha256(words.encode()).hexdigest()[:16]}.npz"
    here = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "elasticdl", "index", name)
    found = _load(here, words)
    if found is not None:
        return found
    storage = storage_of(url)
    there = f"{directory}/{_FOLDER}/{name}"
    found = _fetch(storage, there, words) if storage.can_write else None
    if found is None:
        found = build()
        if storage.can_write:
            try:
                storage.publish(there, _encoded(found, words))
            except StorageError as error:
                _log.debug("The index %s cannot be kept: %s", there, error)
    _save(here, found, words)
    return found


def _fetch(storage: FsspecStorage, url: str, words: str) -> Arrays | None:
    try:
        return _load(io.BytesIO(storage.read(url, 0, storage.stat(url).size_bytes)), words)
    except StorageError as error:  # there is no index, or reading it is not allowed
        _log.debug("The index %s is not taken: %s", url, error)
        return None


def _encoded(arrays: Arrays, words: str) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, words=np.array(words), **arrays)
    return file.getvalue()


def _load(source: Path | io.BytesIO, words: str) -> Arrays | None:
    try:
        with np.load(source, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None  # there is no index, or it is truncated: a new one replaces it
    return found if str(found.pop("words", "")) == words else None


def _save(target: Path, arrays: Arrays, words: str) -> None:
    try:
        target.parent.mkdir(exist_ok=True, parents=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".part")
    except OSError as error:
        _log.debug("The index %s cannot be kept: %s", target, error)
        return
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, allow_pickle=False, words=np.array(words), **arrays)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except OSError as error:
        _log.debug("The index %s cannot be kept: %s", target, error)
        with contextlib.suppress(OSError):
            os.unlink(temporary)
