"""The port `Reader`: a data source as shards, which can be counted and read by range.

A reader finds out its number of records itself, and reads any range without reading the records before it.  It never
parses a record: the user's `feed` does.

`PartsReader`, for readers with one shard per part, counts records, checks ranges and keeps parts open.  A part can be
opened by name and read by record number: a file, a table.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from elasticdl.data.identity import OncePerFile, identity_of_file
from elasticdl.data.sources import check_file, no_records, reading, shard_not_of_source
from elasticdl.protocol import Shard
from elasticdl_client.storage_kinds import is_remote


@dataclass(frozen=True, slots=True)
class Metadata:
    """A source's description of its records; passed to the user's `feed`.

    Attributes:
        column_names: Names of the columns, in order; empty if the source has no columns.
        column_dtypes: Pairs of a name and "int64", "float64", "string" or "image" (an encoded image); empty: unknown.
        seed: Seed of the job, for stateless random ops in `feed`.
        column_shapes: Pairs of a name and the shape of a record's values; (-1,): any number of values; a column
            without an entry has one value.
        label_column: Name from --label_column; empty if the source has no such column.
        features: Names from --columns; empty: all columns except the label.
        delimiter: Delimiter of CSV rows; empty: each record is a tf.train.Example, if there are columns.
    """

    column_names: tuple[str, ...] = ()
    column_dtypes: tuple[tuple[str, str], ...] = ()
    seed: int = 0
    column_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    label_column: str = ""
    features: tuple[str, ...] = ()
    delimiter: str = ""


class Reader(Protocol):
    """A data source.  Methods raise `DataError`, with file and offset, for missing, empty, damaged or changed data."""

    def shards(self) -> list[Shard]:
        """Return all shards, sorted by name, each starting at 0, with their identity; always the same list."""
        ...

    def read(self, shard: Shard) -> Sequence[bytes]:
        """Return the records of a slice of a shard, in order: exactly ``len(shard)``, from data of its identity."""
        ...

    def metadata(self) -> Metadata:
        """Return the description of the records."""
        ...


_KEPT_OPEN = 256  # parts; the number of open files per process is limited


class ShardPart(Protocol):
    """The records of one shard, by number.  Thread-safe."""

    def __len__(self) -> int: ...

    def read(self, start: int, end: int) -> Sequence[bytes]:
        """Return records ``start`` to ``end`` - 1; the range is inside the part."""
        ...


class PartsReader:
    """The `Reader` over parts; each part is a shard with its name, and parts without records are left out."""

    def __init__(
        self,
        source: str,
        names: Sequence[str],
        open_part: Callable[[str], ShardPart],
        metadata: Callable[[], Metadata],
        check: Callable[[str], None] | None = check_file,
        identify: Callable[[str], str] | None = identity_of_file,
    ) -> None:
        """Create a reader, without opening a part.

        Args:
            source: The source as the user named it, for messages.
            names: Names of the parts.
            open_part: Opens a part by name.
            metadata: Returns the metadata; called at most once.
            check: Checks a part that is a file or directory before its first record is read; None: no check.
            identify: Returns the identity of such a part (see `elasticdl.data.identity`); None: parts have none.
        """
        self._source = source
        self._names = sorted(names)
        self._known = frozenset(names)
        self._open_part = open_part
        self._make_metadata = metadata
        self._check = None if check is None and identify is None else OncePerFile(check, identify)
        self._metadata: Metadata | None = None
        self._parts: OrderedDict[str, ShardPart] = OrderedDict()
        self._lock = threading.Lock()

    def shards(self) -> list[Shard]:
        found = []
        for name in self._names:
            with reading(name):
                if self._check is not None:
                    self._check.begin_count(name)
                count = len(self._open(name))
                if not count and self._check is not None:
                    self._check(name)  # `read` will not check it: it has no records
            if count:
                found.append(Shard(name, 0, count))
        if not found:
            raise no_records(self._source)
        if self._check is None:
            return found
        identities = self._check.identities(shard.name for shard in found)
        return [replace(shard, identity=identities[shard.name]) for shard in found]

    def read(self, shard: Shard) -> Sequence[bytes]:
        if shard.name not in self._known:
            raise shard_not_of_source(shard, self._source)
        with reading(shard.name):
            try:
                records = self._read(shard)
            except Exception:
                if self._check is not None and shard.identity:
                    self._check(shard.name, False, shard.identity)  # prefer the error of a changed file
                raise
            if self._check is not None and not is_remote(shard.name):
                self._check(shard.name, True, shard.identity)  # raises if it was replaced meanwhile
            return records

    def metadata(self) -> Metadata:
        if self._metadata is None:
            with reading(self._source):
                self._metadata = self._make_metadata()
        return self._metadata

    def _read(self, shard: Shard) -> Sequence[bytes]:
        part = self._checked(shard)
        if not 0 <= shard.start <= shard.end <= len(part):
            raise shard_not_of_source(shard, self._source, len(part))
        return part.read(shard.start, shard.end) if len(shard) else []

    def _checked(self, shard: Shard) -> ShardPart:
        """Return a checked part; if it has to be opened, check it before, if possible, and after."""
        name = shard.name
        if self._check is None:
            return self._open(name)
        with self._lock:
            is_open = name in self._parts
        if is_open or self._check.can_tell(name):
            self._check(name, is_open, shard.identity)
        part = self._open(name)
        if not is_open:
            self._check(name, False, shard.identity)  # ensures that the open file is the checked one
        return part

    def _open(self, name: str) -> ShardPart:
        with self._lock:
            part = self._parts.get(name)
            if part is None:
                part = self._parts[name] = self._open_part(name)
                if len(self._parts) > _KEPT_OPEN:
                    self._parts.popitem(last=False)
            self._parts.move_to_end(name)
            return part
