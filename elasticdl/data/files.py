"""One file of data, local or of storage: bytes from an offset on, a scan in order, and indexes.

Indexes are built once: arrays of a data source, kept in a hidden directory beside it, found again by every process.

An index belongs to a file of one size and time of change, or of one etag; another file under its name is built
anew.  Where nothing can be written (read-only data), each process builds its own; those of storage are kept in
the user's cache directory, too.
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
    """The index of a file: from its cache, or built and put there.

    Args:
        path: of the file; its index goes into a hidden directory beside it.
        kind: which index, with everything but the file that it depends on.
        stamp: equal as long as the source is the same; None: size and time of change of the file.
        holds: asked of an index that was found, where the index itself says what must not have changed.
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
    except StorageError as error:  # there is none, or it may not be read
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
        return None  # there is none, or it was cut off: the next one replaces it
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
