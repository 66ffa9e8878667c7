"""The port `Reader`: a data source cut into countable, range-addressable shards.

A reader knows how many records it has without being told and reads any range of them without reading what comes
before.  It never parses a record: that is the business of the user's `feed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from elasticdl.protocol.values import Shard


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
    """Three verbs.  Raise `DataError` naming file and offset for anything missing, empty or damaged."""

    def shards(self) -> list[Shard]:
        """All shards, sorted by name, each starting at 0; the same list every time."""
        ...

    def read(self, shard: Shard) -> Sequence[bytes]:
        """The records of a slice of a shard, in order: exactly ``len(shard)`` of them."""
        ...

    def metadata(self) -> Metadata: ...
