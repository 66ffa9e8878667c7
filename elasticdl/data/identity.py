"""Which content a file has: the same on every machine and after any copy, another one once the file is replaced.

An identity is the length and a digest.  Of a local file the digest is over blocks of its content, for times of change
and inodes differ between machines, images and copies of equal content: all of a file of at most 64 KiB, else eight
blocks of 8 KiB from its begin to its end.  So a larger file that keeps its length and differs between the blocks alone
has the same identity; `SHA256SUMS` finds that, too.  Of a file of storage the digest is over its etag, which comes with
its length.

`OncePerFile`: a file is looked into again only where its inode, length or times say that it may be another one.
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
_NUM_BLOCKS = 8  # on a disk that is far away each is a wait
_AT_ONCE = 16  # questions to storage
_DIGEST_BYTES = 4  # each file has one in the journal; another file has the same once in four billion times


def identity_of_file(path: str) -> str:
    """Return the identity of a local file.

    Raises:
        DataError: it cannot be read.
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
    """Return the identity of local files together, by their names and content; its length is their number.

    Raises:
        DataError: one cannot be read.
    """
    found = [f"{os.path.basename(path)}\n{identity_of_file(path)}\n".encode() for path in sorted(paths)]
    return identity_of(len(found), found)


def identity_of(length: int, content: Iterable[bytes]) -> str:
    """Return the identity of what has a length and content."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in content:
        digest.update(part)
    return f"{length}-{digest.hexdigest()}"


class OncePerFile:
    """Checks a file before its first record is given, and again only when it may be another file."""

    def __init__(
        self, check: Callable[[str], None] | None, identify: Callable[[str], str] | None = identity_of_file
    ) -> None:
        """
        Args:
            check: of a local path; raises a `DataError`; None: nothing is checked but the identity.
            identify: returns the identity of a local path; None: it has none.
        """
        self._check = check
        self._identify = identify
        self._known: dict[str, _Known] = {}  # of local files
        self._counted: dict[str, tuple[int, int]] = {}  # length and time of those that are being counted
        self._first: dict[str, FileStatus] = {}  # of files of storage
        self._lock = threading.Lock()

    def __call__(self, path: str, is_open: bool = False, identity: str = "") -> None:
        """
        Args:
            is_open: it was open at an earlier check, and is read through what was opened then.
            identity: that it must have; empty: any.

        Raises:
            DataError: the file is not what it should be, or not there.
        """
        found = self._in_storage(path, is_open) if is_remote(path) else self._here(path, bool(identity))
        if identity and found and found != identity:
            raise _changed(path, identity, found)

    def begin_count(self, path: str) -> None:
        """Call before the records of a file are counted, so that `identities` refuses one that changes meanwhile."""
        if is_remote(path) or not os.path.isfile(path):  # a directory changes where an index is kept in it
            return
        status = _stat(path)
        self._counted[path] = status.st_size, status.st_mtime_ns

    def identities(self, paths: Iterable[str]) -> dict[str, str]:
        """Return the identities of files by their paths; empty where nothing says which file it is.

        Nothing else is checked, for that may take a pass over all data.

        Raises:
            DataError: one has changed while its records were counted, or is not there.
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
        """Whether a check may find something: not of a file of storage that none has seen."""
        return not is_remote(path) or path in self._first

    def _here(self, path: str, identifies: bool) -> str:
        """Check a local file; return its identity where that is wanted."""
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
        """Return the findings about a local file, empty for one that may be another than before."""
        status = _stat(path)
        state = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        known = self._known.get(path)
        if known is None or known.state != state:
            known = self._known[path] = _Known(state)
        return known

    def _in_storage(self, url: str, is_open: bool) -> str:
        """Return the identity; the etag is the one at the first read.  For a checksum the whole file would be fetched.

        Storage that compares etags refuses the reads of an open file that has changed, without a request for that.
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
    """The findings about a local file, valid as long as its inode, length and times are these."""

    state: tuple[int, ...]
    is_checked: bool = False
    identity: str = ""


def find_changed(known: Iterable[Shard], found: Iterable[Shard]) -> DataError | None:
    """Return the error for the first shard that has another identity now; None: there is none."""
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
    """Return an etag without the mark of a weak one, which servers and caches set or not by the way of transport."""
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
