"""Paths of object storage beside those of file systems: `RemotePath`, and functions that write to both kinds.

Readers take an `AnyPath` and never ask for its kind.  Writers use the functions here: a file appears completely or not
at all, on a file system through a rename, in storage through being published.

`sync_directory`: makes created or renamed files survive a crash of the machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Literal

from elasticdl.storage.fsspec_storage import FsspecStorage, storage_of
from elasticdl.storage.port import FileStatus
from elasticdl.storage.remote_file import RemoteFile
from elasticdl_client.errors import StorageError, StorageFileMissing
from elasticdl_client.storage_kinds import AnyPath, is_remote

DONE_FILE = "_SUCCESS"  # in a directory of storage: lists the files of a complete set; published last
UNFINISHED_PARTS = r"\..*\.part-"  # files of killed writers, beside the parts of a job
PARTS = rf"({UNFINISHED_PARTS}|part-)"
_COPY_BYTES = 1 << 20
_FILES_AHEAD = 16


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or directory of object storage; see `AnyPath`.

    Attributes:
        url: The URL, without a slash at the end.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rpartition("/")[0])

    def __truediv__(self, name: str, /) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    def exists(self) -> bool:
        return self.storage.exists(self.url)

    def is_file(self) -> bool:
        status = self._status()
        return status is not None and not status.is_directory

    def is_dir(self) -> bool:
        status = self._status()
        return status is not None and status.is_directory

    def iterdir(self) -> Iterator[RemotePath]:
        return (self / _name(status) for status in self.storage.list(self.url))

    def read_bytes(self) -> bytes:
        file = self._file()
        return file.pread(file.size_bytes, 0)

    def open(self, mode: Literal["rb"], /) -> BufferedReader:
        return self._file().scan()

    def unlink(self) -> None:
        """Delete the file; a missing file is no error."""
        self.storage.delete(self.url)

    def files(self) -> list[str]:
        """Return the names of all files below the directory, relative to it."""
        found: list[str] = []
        for status in self.storage.list(self.url):
            name = _name(status)
            found += [f"{name}/{below}" for below in (self / name).files()] if status.is_directory else [name]
        return found

    @property
    def storage(self) -> FsspecStorage:
        """The storage of the URL.

        Raises:
            StorageError: a package for the URL is not installed.
        """
        return storage_of(self.url)

    def _status(self) -> FileStatus | None:
        try:
            return self.storage.stat(self.url)
        except StorageFileMissing:
            return None

    def _file(self) -> RemoteFile:
        try:
            return RemoteFile(self.url, self.storage)
        except StorageFileMissing as error:
            raise FileNotFoundError(errno.ENOENT, "it does not exist", self.url) from error


def _name(status: FileStatus) -> str:
    return status.url.rpartition("/")[2]


def path_of(text: str) -> AnyPath:
    """Return the path for the value of a flag: a path of a file system, or a URL of storage."""
    return RemotePath(text.rstrip("/")) if is_remote(text) else Path(text)


@contextlib.contextmanager
def writing(path: AnyPath, tag: str = "new") -> Iterator[IO[bytes]]:
    """Open a local file that becomes `path` when the block ends, durably and completely; an error leaves nothing.

    Args:
        path: The final path; its directory must exist, except in storage.
        tag: Part of the temporary name beside a local path: writers with different tags do not collide.

    Raises:
        OSError: it cannot be written.
        StorageError: it cannot be published.
    """
    if isinstance(path, RemotePath):
        with tempfile.NamedTemporaryFile(prefix="elasticdl-") as file:
            yield file
            file.flush()
            path.storage.publish(path.url, Path(file.name))
        return
    final = Path(str(path))
    temporary = final.with_name(f".{final.name}.{tag}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)
        sync_directory(final.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def real_path(path: AnyPath) -> AnyPath:
    """Return the path with symbolic links and ``..`` resolved; storage has neither.

    Raises:
        ValueError: the path is invalid.
    """
    return path if isinstance(path, RemotePath) else Path(os.path.realpath(str(path)))


def make_directory(path: AnyPath) -> None:
    """Create a directory and its parents; in storage, do nothing.

    Raises:
        OSError: it cannot be created.
    """
    if not isinstance(path, RemotePath):
        directory = Path(str(path))
        directory.mkdir(parents=True, exist_ok=True)
        sync_directory(directory.parent)


def remove_file(path: AnyPath) -> None:
    """Delete a file; a missing file is no error.

    Raises:
        OSError: it cannot be deleted.
        StorageError: the same, in storage.
    """
    if isinstance(path, RemotePath):
        path.unlink()
    else:
        Path(str(path)).unlink(missing_ok=True)


def remove_directory(path: AnyPath) -> None:
    """Delete a directory and its content; a missing directory is no error.

    Raises:
        OSError: it cannot be deleted.
        StorageError: the same, in storage.
    """
    if isinstance(path, RemotePath):
        _delete_all([path / name for name in path.files()])
    else:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(Path(str(path)))


def remove_if_empty(path: AnyPath) -> None:
    """Delete a directory if it is empty; storage has no empty directories.

    Raises:
        OSError: it cannot be deleted.
    """
    if not isinstance(path, RemotePath):
        with contextlib.suppress(FileNotFoundError):
            try:
                Path(str(path)).rmdir()
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise


def remove_matching(directory: AnyPath, pattern: str) -> None:
    """Delete the files of a directory whose names begin with a pattern; in storage, several in parallel.

    Args:
        pattern: A regular expression, such as `PARTS`.

    Raises:
        OSError: a file cannot be deleted.
        StorageError: the same, in storage.
    """
    if isinstance(directory, RemotePath):
        _delete_all([path for path in directory.iterdir() if re.match(pattern, path.name)])
    elif directory.is_dir():
        for path in list(Path(str(directory)).iterdir()):
            if re.match(pattern, path.name):
                path.unlink(missing_ok=True)


def _delete_all(paths: Sequence[RemotePath]) -> None:
    """Delete files of one storage, several in parallel."""
    if paths:
        list(paths[0].storage.pool.map(RemotePath.unlink, paths))


def read_in_order(directory: AnyPath, names: Sequence[str]) -> Iterator[bytes]:
    """Yield the content of files of a directory, in order; in storage, a few are read ahead.

    Raises:
        OSError: a file cannot be read.
        StorageError: the same, in storage, or a file is missing.
    """
    if not isinstance(directory, RemotePath):
        yield from ((directory / name).read_bytes() for name in names)
        return
    statuses = {_name(status): status for status in directory.storage.list(directory.url)}
    ahead: deque[list[Future[bytes]]] = deque()
    for name in names:
        ahead.append(RemoteFile((directory / name).url, directory.storage, statuses.get(name)).fetch_all())
        if len(ahead) == _FILES_AHEAD:
            yield b"".join(part.result() for part in ahead.popleft())
    for parts in ahead:
        yield b"".join(part.result() for part in parts)


@contextlib.contextmanager
def on_this_machine(path: AnyPath) -> Iterator[Path]:
    """Yield a local path, or in the block a local copy from storage, for libraries that open files.

    Raises:
        StorageError: the files cannot be read, or a name leads out of the copy.
    """
    if not isinstance(path, RemotePath):
        yield Path(str(path))
        return
    with tempfile.TemporaryDirectory(prefix="elasticdl-") as directory:
        copy = Path(directory, path.name)
        if path.is_dir():
            for name in path.files():
                _fetch(path / name, place_below(copy, name))
        else:
            _fetch(path, copy)
        yield copy


def place_below(directory: Path, name: str) -> Path:
    """Return the local path in a directory for a name in storage, which may contain anything.

    Raises:
        StorageError: the path would be outside of the directory.
    """
    if ".." in name.split("/") or name.startswith("/"):
        raise StorageError(f"The name {name} leads out of its directory.", "Copy the file to another name.")
    return directory / name


def _fetch(path: RemotePath, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    with path.open("rb") as source, open(copy, "wb") as file:
        shutil.copyfileobj(source, file, _COPY_BYTES)


def check_writable(path: AnyPath, flag: str) -> None:
    """Publish and delete a file in a directory of storage, so that a job without write permission ends at once.

    Raises:
        StorageError: the storage rejects it, or does not answer.
    """
    if not isinstance(path, RemotePath):
        return
    probe = path / ".elasticdl-probe"
    try:
        path.storage.publish(probe.url, b"")
        probe.unlink()
    except StorageError as error:
        raise StorageError(f"--{flag}={path} cannot be written: {error.what}", error.hint) from error


def sync_file(path: Path) -> None:
    """Sync a file that another library has written, so that it survives a crash of the machine."""
    with open(path, "rb") as written:
        os.fsync(written.fileno())


def sync_directory(path: Path) -> None:
    """Sync a directory, so that creations and renames in it survive a crash of the machine."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # of mode 0711, like some home directories: the file system syncs it later
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync directories: older CIFS, VirtualBox
            raise
    finally:
        os.close(descriptor)
