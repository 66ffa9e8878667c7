"""Parts in object storage: written on this machine, published whole when their lease is confirmed.

There are no files under other names to remove: an upload that a killed worker has begun is no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from elasticdl.storage.fsspec_storage import storage_of
from elasticdl.storage.paths import RemotePath
from elasticdl.worker.inference.output_parts import confirmed_file, part_name
from elasticdl.worker.leases import HeldLease


class RemoteParts:
    """The parts of one job in one directory of storage; see `Parts`."""

    def __init__(self, url: str, extension: str, confirm: Callable[[int], bool]) -> None:
        """
        Args:
            extension: of the files, without a dot.
            confirm: `MasterLink.confirm`: whether a lease still counts.

        Raises:
            StorageError: what the URL needs is not installed.
        """
        self._url = url.rstrip("/")
        self._storage = storage_of(url)
        self._extension = extension
        self._confirm = confirm

    @contextmanager
    def writing(self, held: HeldLease) -> Iterator[Path]:
        """The path of a file to be written in the block; one that is not written leaves no part.

        Raises:
            LeaseLost: another worker has the task by now.
            StorageError: the part cannot be published.
        """
        with self.writing_named(held, part_name(held, self._extension)) as temporary:
            yield temporary

    @contextmanager
    def writing_named(self, held: HeldLease, name: str) -> Iterator[Path]:
        """The same for a file of another name."""
        with confirmed_file(held, RemotePath(f"{self._url}/{name}"), self._confirm) as temporary:
            yield temporary

    def names(self) -> list[str]:
        """Of all parts, in the order of the data."""
        found = [one.url.rpartition("/")[2] for one in self._storage.list(self._url)]
        parts = [name for name in found if name.startswith("part-") and name.endswith(f".{self._extension}")]
        return sorted(parts, key=lambda name: (len(name), name))

    def sweep(self) -> None:
        """Does nothing: there is nothing but parts."""
