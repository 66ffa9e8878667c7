"""The port `Storage`: files with whole URLs as names, read by range and replaced whole.

Below the port there are requests that may fail and be sent again; above it a call has worked, or is an error for good.
There is no append and no rename: a file appears whole or not at all, and a set of files is complete once the one that
lists them, published last, is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class FileStatus:
    """A file or directory.

    Attributes:
        url: whole, as `Storage` takes it.
        size_bytes: of a file.
        etag: changes whenever the file is replaced; empty for directories.
        is_directory: whether it holds files.
    """

    url: str
    size_bytes: int
    etag: str
    is_directory: bool = False


class Storage(Protocol):
    """Six verbs, and the guarantees of reads.  Safe to use from several threads.

    Raise `StorageFileMissing` for what is not there, `StorageError` for all else that fails: no permission, or no good
    answer in the time of the retries.
    """

    def list(self, directory: str) -> list[FileStatus]:
        """Return the files and directories in a directory, not those below, in order of name; maybe none."""
        ...

    def stat(self, url: str) -> FileStatus:
        """The file, or the directory, as it is now."""
        ...

    def read(self, url: str, start: int, end: int, etag: str = "") -> bytes:
        """Bytes ``start`` to ``end`` - 1 of a file, all of them.

        Args:
            etag: raise a `StorageError` if the file has another one by now, where `compares` says so; empty: any.
        """
        ...

    def compares(self, etag: str) -> bool:
        """Whether reads that name this etag are refused once the file has another one."""
        ...

    def publish(self, url: str, content: bytes | Path) -> None:
        """Makes a file of these bytes, or of a local file, or replaces it; readers see the old or the new one."""
        ...

    def delete(self, url: str) -> None:
        """Removes a file; one that is not there is no error."""
        ...

    def exists(self, url: str) -> bool:
        """Whether there is such a file or directory."""
        ...
