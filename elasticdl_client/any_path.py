"""The port `AnyPath`: what readers of models ask a path, of a file system (`pathlib.Path`) or of storage."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from typing import Literal, Protocol, Self


class AnyPath(Protocol):
    """A file or directory.

    What is not there is a `FileNotFoundError`; storage that does not answer is a `StorageError`.
    """

    @property
    def name(self) -> str: ...

    @property
    def suffix(self) -> str: ...

    @property
    def parent(self) -> Self: ...

    def __truediv__(self, name: str, /) -> Self: ...

    def exists(self) -> bool: ...

    def is_file(self) -> bool: ...

    def is_dir(self) -> bool: ...

    def iterdir(self) -> Iterator[Self]:
        """Yield what is in the directory, in any order."""
        ...

    def read_bytes(self) -> bytes: ...

    def open(self, mode: Literal["rb"], /) -> BufferedReader:
        """Open the file, to be read in order."""
        ...
