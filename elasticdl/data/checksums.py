"""`SHA256SUMS` beside the data: the output of `sha256sum *`, compared with each file before its first record is given.

`sha256sum --check SHA256SUMS` does the same by hand.  A directory without one is read as it is.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping

from elasticdl.storage.fsspec_storage import storage_of
from elasticdl_client.errors import DataError
from elasticdl_client.storage_kinds import is_remote

MANIFEST = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_HINT = f"The file was damaged or replaced: copy or write it again, or make {MANIFEST} anew where the change was meant."


class OncePerFile:
    """Checks a file before its first record is given, and again only when it is another file."""

    def __init__(self, check: Callable[[str], None]) -> None:
        """
        Args:
            check: of a path; raises a `DataError`.
        """
        self._check = check
        self._checked: set[tuple[str, int, int, int]] = set()
        self._etags: dict[str, str] = {}
        self._lock = threading.Lock()

    def __call__(self, path: str, is_open: bool = False) -> None:
        """
        Args:
            is_open: it was open at an earlier check, and is read through what was opened then.

        Raises:
            DataError: the file is not what it should be, or not there.
        """
        if is_remote(path):
            self._check_unchanged(path, is_open)
            return
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"The file {path} cannot be read: {error.strerror}.") from error
        identity = (path, status.st_ino, status.st_size, status.st_mtime_ns)
        with self._lock:
            if identity not in self._checked:
                self._check(path)
                self._checked.add(identity)

    def _check_unchanged(self, url: str, is_open: bool) -> None:
        """Of storage: its etag is the one at the first read.  To compare a checksum the whole file would be fetched.

        Storage that compares etags refuses the reads of an open file that has changed, without a request for that.
        """
        storage, first = storage_of(url), self._etags.get(url, "")
        if is_open and first and storage.compares(first):
            return
        etag = storage.stat(url).etag
        if self._etags.setdefault(url, etag) != etag:
            raise DataError(f"The file {url} changed while the job reads it.", "Put new data into a new file.")


def check_file(path: str) -> None:
    """Checks a file against the manifest of its directory, if there is one.

    Raises:
        DataError: it differs, or is not listed.
    """
    directory, name = os.path.split(path)
    sums = read_manifest(directory or ".")
    if sums is not None:
        _check(sums, directory, name)


def check_directory(directory: str) -> None:
    """Checks all files that the manifest of a directory lists, if there is one.

    Raises:
        DataError: one differs or is missing.
    """
    sums = read_manifest(directory)
    for name in sums or ():
        _check(sums or {}, directory, name)


def check_content(sums: Mapping[str, str], directory: str, name: str, data: bytes) -> None:
    """Checks what was read of a file.

    Raises:
        DataError: it differs, or is not listed.
    """
    _compare(sums, directory, name, lambda: hashlib.sha256(data).hexdigest())


def read_manifest(directory: str) -> Mapping[str, str] | None:
    """Names of files, as paths below the directory, and their SHA-256; None: there is no manifest.

    Raises:
        DataError: it cannot be read.
    """
    path = os.path.join(directory, MANIFEST)
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().removesuffix("\n").split("\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        what = f"The checksums {path} cannot be read: {error.strerror}."
        raise DataError(what, "Write them again, or remove them.") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise DataError(
                f"{path}, line {number}: {line[:80]!r} is not a checksum and a name.",
                f"Make it with sha256sum * > {MANIFEST}.",
            )
        found[os.path.normpath(match[2])] = match[1].lower()
    found.pop(MANIFEST, None)  # `sha256sum *` lists the one that it replaces
    return found


def write_manifest(directory: str, paths: Iterable[str]) -> None:
    """Writes the manifest of files in a directory.

    Raises:
        OSError: it, or a file, cannot be read or written.
    """
    lines = [f"{_sum_of(path)}  {os.path.relpath(path, directory)}\n" for path in sorted(paths)]
    with open(os.path.join(directory, MANIFEST), "w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(lines)


def _check(sums: Mapping[str, str], directory: str, name: str) -> None:
    _compare(sums, directory, name, lambda: _sum_of(os.path.join(directory, name)))


def _compare(sums: Mapping[str, str], directory: str, name: str, computed: Callable[[], str]) -> None:
    manifest, path = os.path.join(directory, MANIFEST), os.path.join(directory, name)
    if name not in sums:
        raise DataError(f"{path} is not in {manifest}.", f"Add it there with sha256sum, or remove {MANIFEST}.")
    try:
        found = computed()
    except OSError as error:
        raise DataError(f"{path}, which {manifest} lists, cannot be read: {error.strerror}.", _HINT) from error
    if found != sums[name]:
        raise DataError(f"{path}: its SHA-256 is {found}, {manifest} says {sums[name]}.", _HINT)


def _sum_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
