"""Columns of a table in the names of its directories, `dt=2026-01-01/country=DE/`, as Hive and Spark write them.

Those below what the user names count: for `/data/clicks` and `/data/clicks/**/*` the directories in `/data/clicks`.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

_KEY = re.compile(r"([^=]+)=(.*)", re.DOTALL)
_NULL = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")  # of an int64, whatever the digits


def is_partition(name: str) -> bool:
    """Whether a directory's name is one of a partition."""
    return _KEY.fullmatch(name) is not None


def partition_of(source: str, path: str) -> dict[str, str | None]:
    """The values in the names of the directories between a source and one of its files, outermost first; None: null."""
    names = _names(source)
    is_named = path == source or path.startswith(source.rstrip("/") + "/")  # whatever is in its name
    if not is_named and glob.has_magic(source):
        names = names[: next((n for n, name in enumerate(names) if glob.has_magic(name)), 0)]
    inner = _names(path)[len(names) : -1]
    pairs = [found.groups() for found in map(_KEY.fullmatch, inner) if found is not None]
    return {unquote(key): None if value == _NULL else unquote(value) for key, value in pairs}


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


@dataclass(frozen=True, slots=True)
class Partitions:
    """Of the files of a table.

    Attributes:
        values: of each file, by key.
        whole: keys of which each value is a whole number; the others hold texts.
    """

    values: Mapping[str, Mapping[str, str | None]]
    whole: frozenset[str] = frozenset()

    @classmethod
    def of(cls, files: Iterable[tuple[str, str]]) -> Partitions:
        """Of pairs of a source and one of its files."""
        values = {path: partition_of(source, path) for source, path in files}
        texts: dict[str, set[str]] = {}
        for partition in values.values():
            for key, value in partition.items():
                texts.setdefault(key, set()).update(() if value is None else (value,))
        whole = {key for key, found in texts.items() if found and all(map(_WHOLE.fullmatch, found))}
        return cls(values, frozenset(whole))

    @property
    def keys(self) -> list[str]:
        """Those of all files."""
        return sorted({key for partition in self.values.values() for key in partition})
