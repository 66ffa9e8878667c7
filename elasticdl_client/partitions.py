"""Columns of a table in the names of its directories, `dt=2026-01-01/country=DE/`, as Hive and Spark write them.

Those below what the user names count: for `/data/clicks` and `/data/clicks/**/*` the directories in `/data/clicks`.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from elasticdl_client.errors import DataError

_KEY = re.compile(r"([^=]+)=(.*)", re.DOTALL)
_NULL = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile(r"[+-]?[0-9]+")


def is_partition(name: str) -> bool:
    """Return whether a directory's name is one of a partition."""
    return _KEY.fullmatch(name) is not None


def partition_of(source: str, path: str) -> dict[str, str | None]:
    """The values in the names of the directories between a source and one of its files, outermost first; None: null.

    Raises:
        DataError: two of the directories have one key.
    """
    found: dict[str, str | None] = {}
    for key, value in _pairs(source, path):
        if key in found:
            raise DataError(
                f"{path} is in several directories {key}=….",
                "A key stands for one column: rename all but one of them, or name the innermost as the data.",
            )
        found[key] = value
    return found


def keys_of(files: Iterable[tuple[str, str]]) -> list[str]:
    """Return the keys in the names of the directories between sources and their files, each once."""
    directories = dict.fromkeys((source, path.rpartition("/")[0]) for source, path in files)
    return sorted({key for source, directory in directories for key, _ in _pairs(source, f"{directory}/file")})


def _pairs(source: str, path: str) -> Iterator[tuple[str, str | None]]:
    names = _names(source)
    is_named = path == source or path.startswith(source.rstrip("/") + "/")  # whatever is in its name
    if not is_named and glob.has_magic(source):
        names = names[: next((n for n, name in enumerate(names) if glob.has_magic(name)), 0)]
    for name in _names(path)[len(names) : -1]:
        if (pair := _KEY.fullmatch(name)) is not None:
            yield unquote(pair[1]), None if pair[2] == _NULL else unquote(pair[2])


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


def dtypes_of(partitions: Iterable[Mapping[str, str | None]], given: Mapping[str, str]) -> dict[str, str]:
    """The types of the values in the names of directories, by key: "int64" where all are whole numbers, else "string".

    Args:
        given: Types of keys that the user has set.
    """
    texts: dict[str, set[str]] = {}
    for partition in partitions:
        for key, value in partition.items():
            texts.setdefault(key, set()).update(() if value is None else (value,))
    found = {key: "int64" if values and all(map(_is_whole, values)) else "string" for key, values in texts.items()}
    return found | {key: dtype for key, dtype in given.items() if key in found}


def _is_whole(text: str) -> bool:
    return _WHOLE.fullmatch(text) is not None and -(2**63) <= int(text) < 2**63


@dataclass(frozen=True, slots=True)
class Partitions:
    """Of the files of a table.

    Attributes:
        values: Values of each file by key.
        dtypes: "int64" or "string", by key, of all files.
    """

    values: Mapping[str, Mapping[str, str | None]]
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, files: Iterable[tuple[str, str]], given: Mapping[str, str]) -> Partitions:
        """Return the partitions of pairs of a source and one of its files; `given`: see `dtypes_of`.

        Raises:
            DataError: see `partition_of`.
        """
        of_directories: dict[tuple[str, str], dict[str, str | None]] = {}
        values: dict[str, Mapping[str, str | None]] = {}
        for source, path in files:
            directory = (source, path.rpartition("/")[0])
            if directory not in of_directories:
                of_directories[directory] = partition_of(source, path)
            values[path] = of_directories[directory]
        return cls(values, dtypes_of(of_directories.values(), given))

    @property
    def keys(self) -> list[str]:
        """The keys of all files."""
        return sorted(self.dtypes)

    def value(self, path: str, key: str) -> int | str | None:
        """Return the value of a key for a file; None: null.

        Raises:
            DataError: it is not of the key's type.
        """
        text = self.values[path][key]
        if text is None or self.dtypes[key] == "string":
            return text
        if not _is_whole(text):
            raise DataError(
                f"{path} is in the directory {key}={text}, and {key} holds whole numbers.",
                f'Give --data_reader_params=\'partition_dtypes={{"{key}": "string"}}\', or rename the directory.',
            )
        return int(text)
