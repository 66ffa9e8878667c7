"""The content of one PS at one moment: the common word of the state, which makes and takes it, and of checkpoints.

Dense values are those of the PS's own buckets, in order: bucket b of a flat vector of n floats holds the elements
b·n // 1024 … (b+1)·n // 1024 - 1.  Rows come in chunks, because a table may be larger than the memory that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from elasticdl.frameworks.framework import Floats, Ids, Table
from elasticdl.rpc import elasticdl_pb2 as pb

Buckets = tuple[tuple[int, int], ...]  # ranges [start, end), ascending, of 1,024


@dataclass(frozen=True, slots=True)
class Piece:
    """Buckets whose values have one history.  A PS that has never been restored by another number of PS has one piece.

    Attributes:
        version: updates applied: the optimizer's step count.
        applied: the names that these buckets hold.
    """

    buckets: Buckets
    version: int
    applied: pb.AppliedSet


@dataclass(frozen=True, slots=True)
class TableChunk:
    """Ids [n], rows [n, dim], optimizer slots by name, each [n, dim]."""

    ids: Ids
    rows: Floats
    slots: Mapping[str, Floats]


Chunks = Callable[[], Iterator[TableChunk]]


@dataclass(frozen=True, slots=True)
class PartSnapshot:
    """One PS's part of a model, with all that is needed to continue from it.

    Attributes:
        optimizer: Keras config as JSON; empty: the model is only read.
        total_trainable: floats of the model's whole flat vector of trainable values.
        trainable: those of this PS's buckets [t]; slots by name, each [t].
        tables: by name; `chunks` has one function for each, which begins anew with every call.
        num_rows: by table, as far as known; a hint.
        close: lets go of what the chunks hold; call it when they are not needed any more.
    """

    optimizer: str
    seed: int
    pieces: tuple[Piece, ...]
    total_trainable: int
    total_non_trainable: int
    trainable: Floats
    trainable_slots: Mapping[str, Floats]
    non_trainable: Floats
    tables: tuple[Table, ...] = ()
    chunks: Mapping[str, Chunks] = field(default_factory=dict)
    num_rows: Mapping[str, int] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None
