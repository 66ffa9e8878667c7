"""The identity of a file's content: equal on every machine and for every copy, different after the file is replaced.

An identity is the length and a digest.  For a local file the digest covers blocks of its content (times and inodes
differ between machines, images and copies): the whole content up to 64 KiB, else eight blocks of 8 KiB, evenly
distributed.  So a larger file with the same length that differs only between the blocks has the same identity;
`SHA256SUMS` detects this case, too.  For a file in storage the digest covers its etag, which storage returns together
with the length.

`OncePerFile`: reads a file again only if its inode, length or times show that it may have changed.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from elasticdl.data.files import LocalFile
from elasticdl.protocol import Shard
from elasticdl.storage.fsspec_storage import storage_of
from elasticdl.storage.port import FileStatus
from elasticdl_client.errors import DataError
from elasticdl_client.storage_kinds import is_remote

_BLOCK_BYTES = 8 << 10
_NUM_BLOCKS = 8  # on a remote file system each block costs a round trip
_AT_ONCE = 16  # concurrent requests to storage
_DIGEST_BYTES = 4  # stored per file in the journal; two files collide with probability 1 / 4 billion


def identity_of_file(path: str) -> str:
    """Return the identity of a local file.

    Raises:
        DataError: The file cannot be read.
    """
    with closing(LocalFile(path)) as file:
        size, distance = file.size_bytes, 0
        blocks = [(0, size)]
        if size > _NUM_BLOCKS * _BLOCK_BYTES:
            distance = (size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1)
            blocks = [(number * distance, _BLOCK_BYTES) for number in range(_NUM_BLOCKS - 1)]
            blocks.append((size - _BLOCK_BYTES, _BLOCK_BYTES))
        return identity_of(size, (file.pread(length, offset) for offset, length in blocks))


def identity_of_files(paths: Iterable[str]) -> str:
    """Return one identity for several local files, from their names and content; its length is the number of files.

    Raises:
        DataError: A file cannot be read.
    """
    found = [f"{os.path.basename(path)}\n{identity_of_file(path)}\n".encode() for path in sorted(paths)]
    return identity_of(len(found), found)


def identity_of(length: int, content: Iterable[bytes]) -> str:
    """Return the identity made of a length and the digest of parts of the content."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in content:
        digest.update(part)
    return f"{length}-{digest.hexdigest()}"


class OncePerFile:
    """Checks a file before its first record is read, and again only if it may have changed."""

    def __init__(
        self, check: Callable[[str], None] | None, identify: Callable[[str], str] | None = identity_of_file
    ) -> None:
        """
        Args:
            check: Checks a local path and raises `DataError`; None: only the identity is checked.
            identify: Returns the identity of a local path; None: local files have none.
        """
        self._check = check
        self._identify = identify
        self._known: dict[str, _Known] = {}  # local files
        self._counted: dict[str, tuple[int, int]] = {}  # files being counted: length, time of change
        self._first: dict[str, FileStatus] = {}  # files in storage, at the first read
        self._lock = threading.Lock()

    def __call__(self, path: str, is_open: bool = False, identity: str = "") -> None:
        """Check a file.

        Args:
            is_open: The file has been open since an earlier check, and is read through that open file.
            identity: The required identity; empty: any.

        Raises:
            DataError: The file has another identity or a wrong checksum, or does not exist.
        """
        found = self._in_storage(path, is_open) if is_remote(path) else self._here(path, bool(identity))
        if identity and found and found != identity:
            raise _changed(path, identity, found)

    def begin_count(self, path: str) -> None:
        """Note the state of a file before its records are counted, so that `identities` detects a change meanwhile."""
        if is_remote(path) or not os.path.isfile(path):  # a directory changes when an index is stored in it
            return
        status = _stat(path)
        self._counted[path] = status.st_size, status.st_mtime_ns

    def identities(self, paths: Iterable[str]) -> dict[str, str]:
        """Return the identities of files by path; an identity is empty if it is unknown.

        Nothing else is checked, because this could require reading all data.

        Raises:
            DataError: A file changed while its records were counted, or does not exist.
        """
        paths = list(paths)
        remote = [path for path in paths if is_remote(path)]
        found = {path: self._identity_here(path) for path in paths if not is_remote(path)}
        if remote:
            with ThreadPoolExecutor(_AT_ONCE, "identities") as threads:
                found |= zip(remote, threads.map(lambda path: self._in_storage(path, False), remote), strict=True)
        counted, self._counted = self._counted, {}
        for path in counted.keys() & found.keys():
            status = _stat(path)
            if counted[path] != (status.st_size, status.st_mtime_ns):
                raise DataError(
                    f"The file {path} changed while its records were counted.",
                    "Start the job once its files are written.",
                )
        return found

    def can_tell(self, path: str) -> bool:
        """Return whether a check can detect a change; it cannot for a file in storage before the first read."""
        return not is_remote(path) or path in self._first

    def _here(self, path: str, identifies: bool) -> str:
        """Check a local file; return its identity, or empty if it is neither requested nor known."""
        with self._lock:
            known = self._known_of(path)
            if not known.is_checked and self._check is not None:
                self._check(path)
            known.is_checked = True
            if identifies and not known.identity and self._identify is not None:
                known.identity = self._identify(path)
            return known.identity

    def _identity_here(self, path: str) -> str:
        with self._lock:
            known = self._known_of(path)
        if not known.identity and self._identify is not None:
            known.identity = self._identify(path)
        return known.identity

    def _known_of(self, path: str) -> _Known:
        """Return the results for a local file; new, empty ones if the file may have changed."""
        status = _stat(path)
        state = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        known = self._known.get(path)
        if known is None or known.state != state:
            known = self._known[path] = _Known(state)
        return known

    def _in_storage(self, url: str, is_open: bool) -> str:
        """Return the identity, from the etag at the first read: a checksum would require fetching the whole file.

        No request is sent for an open file if the storage compares etags: it then refuses reads after a change.
        """
        storage, first = storage_of(url), self._first.get(url)
        if not (is_open and first and first.etag and storage.compares(first.etag)):
            status = storage.stat(url)
            first = self._first.setdefault(url, status)
            if _strong(first.etag) != _strong(status.etag):
                raise DataError(f"The file {url} changed while the job reads it.", "Put new data into a new file.")
        return identity_of(first.size_bytes, [_strong(first.etag).encode()])


@dataclass(slots=True)
class _Known:
    """Results for a local file; they are valid while its inode, length and times equal `state`."""

    state: tuple[int, ...]
    is_checked: bool = False
    identity: str = ""


def find_changed(known: Iterable[Shard], found: Iterable[Shard]) -> DataError | None:
    """Return the error for the first shard with a changed identity; None: no identity has changed."""
    now = {shard.name: shard.identity for shard in found}
    for shard in known:
        if shard.identity and now[shard.name] and shard.identity != now[shard.name]:
            return _changed(shard.name, shard.identity, now[shard.name])
    return None


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise DataError(f"The file {path} cannot be read: {error.strerror}.") from error


def _strong(etag: str) -> str:
    """Return an etag without the prefix of a weak one: servers and caches add or drop it, depending on transport."""
    return etag.removeprefix("W/")


def _changed(path: str, before: str, now: str) -> DataError:
    was, _, _ = before.partition("-")
    has, _, _ = now.partition("-")
    unit = "files" if os.path.isdir(path) else "bytes"
    what = f"it had {was} {unit}, and has {has}" if was != has else f"it has {has} {unit} as before, but others"
    return DataError(
        f"{path} has changed since the job began: {what}.",
        "Start a new job on the new data; a job that is to continue needs the files that it has counted. "
        "Write new data into new files. Pods that make or fetch a copy of their own need the same bytes.",
    )
