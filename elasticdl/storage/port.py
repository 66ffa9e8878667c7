"""The port `Storage`: files with whole URLs as names, read by range and replaced as a whole.

Below the port, requests may fail and be retried; above it, a call has succeeded or failed for good.  There is no append
and no rename: a file appears completely or not at all, and a set of files is complete when the file that lists them,
which is published last, exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class FileStatus:
    """A file or directory.

    Attributes:
        url: The whole URL, as an argument of `Storage`.
        size_bytes: Size of a file.
        etag: Changes whenever the file is replaced; empty for directories.
        is_directory: Whether it is a directory.
    """

    url: str
    size_bytes: int
    etag: str
    is_directory: bool = False


class Storage(Protocol):
    """Files of object storage.  Thread-safe.

    Methods raise `StorageFileMissing` for missing files, and `StorageError` for all other failures: no permission, or
    no successful answer in the time of the retries.
    """

    def list(self, directory: str) -> list[FileStatus]:
        """Return the files and directories directly in a directory, sorted by name; maybe none."""
        ...

    def stat(self, url: str) -> FileStatus:
        """Return the current status of a file or directory."""
        ...

    def read(self, url: str, start: int, end: int, etag: str = "") -> bytes:
        """Return bytes ``start`` to ``end`` - 1 of a file, all of them.

        Args:
            etag: If the file has another etag now, and `compares` is true, raise a `StorageError`; empty: any.
        """
        ...

    def compares(self, etag: str) -> bool:
        """Return whether reads with this etag fail once the file has another one."""
        ...

    def publish(self, url: str, content: bytes | Path) -> None:
        """Create or replace a file, from bytes or a local file; readers see the old or the new one."""
        ...

    def delete(self, url: str) -> None:
        """Delete a file; a missing file is no error."""
        ...

    def exists(self, url: str) -> bool:
        """Return whether a file or directory exists."""
        ...
