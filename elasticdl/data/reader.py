"""The port `Reader`: a data source cut into countable, range-addressable shards.

A reader finds its number of records itself and reads any range of them without reading what comes
before.  It never parses a record: that is the business of the user's `feed`.

`PartsReader`, the base of readers with one shard a part, counts, checks ranges and keeps opened parts.

A part is what can be opened by name and read by record number: a file, a table.  Never looks into one.
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
        column_names: in order, empty when the source has no columns.
        column_dtypes: name to "int64", "float64", "string" or "image" (an encoded one); empty when unknown.
        seed: of the job; for stateless random ops in `feed`.
        column_shapes: name to the shape of a record's values; (-1,): any number of them; left out: one value.
        label_column: of --label_column; empty where the source has none of that name.
        features: of --columns; empty: all columns but the label.
        delimiter: of CSV rows; empty: each record is a tf.train.Example, if there are columns.
    """

    column_names: tuple[str, ...] = ()
    column_dtypes: tuple[tuple[str, str], ...] = ()
    seed: int = 0
    column_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    label_column: str = ""
    features: tuple[str, ...] = ()
    delimiter: str = ""


class Reader(Protocol):
    """Three verbs.  Raise `DataError` naming file and offset for anything missing, empty, damaged or replaced."""

    def shards(self) -> list[Shard]:
        """All shards, sorted by name, each starting at 0, with their identity; the same list every time."""
        ...

    def read(self, shard: Shard) -> Sequence[bytes]:
        """The records of a slice of a shard, in order: exactly ``len(shard)`` of them, of its identity."""
        ...

    def metadata(self) -> Metadata: ...


_KEPT_OPEN = 256  # parts; a process may not have many more files open


class ShardPart(Protocol):
    """Records of one shard by number.  Safe to use from several threads."""

    def __len__(self) -> int: ...

    def read(self, start: int, end: int) -> Sequence[bytes]:
        """Records ``start`` to ``end`` - 1; the range is one of the part."""
        ...


class PartsReader:
    """The `Reader` over parts, each a shard of its name.  Parts without records are left out."""

    def __init__(
        self,
        source: str,
        names: Sequence[str],
        open_part: Callable[[str], ShardPart],
        metadata: Callable[[], Metadata],
        check: Callable[[str], None] | None = check_file,
        identify: Callable[[str], str] | None = identity_of_file,
    ) -> None:
        """Opens nothing yet.

        Args:
            source: as the user named it; for messages.
            names: of the parts.
            open_part: by its name.
            metadata: asked for once at most.
            check: of a part that is a file or directory, before its first record is given; None: there is none.
            identify: returns the identity of such a part (see `elasticdl.data.identity`); None: it has none.
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
                    self._check(name)  # nothing of it will be read
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
                    self._check(shard.name, False, shard.identity)  # of another file nearly any error comes
                raise
            if self._check is not None and not is_remote(shard.name):
                self._check(shard.name, True, shard.identity)  # it was not replaced meanwhile
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
        """Return a part that was checked; one that is opened for it is checked before that, if it can be, and after."""
        name = shard.name
        if self._check is None:
            return self._open(name)
        with self._lock:
            is_open = name in self._parts
        if is_open or self._check.can_tell(name):
            self._check(name, is_open, shard.identity)
        part = self._open(name)
        if not is_open:
            self._check(name, False, shard.identity)  # the open file is the checked one
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
