"""The index of a part file: the layout of its content, and its checksums.  docs/checkpoint.md is its text.

A part is blocks back to back, then the index as JSON, then a tail that says where the index begins and its checksum.
The index holds the checksum of every block, so its own stands for the whole file: the manifest keeps that one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from elasticdl.frameworks.framework import Table
from elasticdl.ps.partition import joined_buckets
from elasticdl.ps.snapshot import Buckets, Piece
from elasticdl.rpc import elasticdl_pb2 as pb

FORMAT = 2
MAGIC = b"ELDLPS02"
OLD_MAGIC = b"ELDLPS01"
TAIL = struct.Struct("<QII8s")  # size and crc32 of the index, format, magic

INTS, FLOATS, IDS = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<i8")


class Block(NamedTuple):
    """A run of bytes with a checksum of its own.

    Attributes:
        offset: from the beginning of the file.
        num_items: numbers, or rows.
        checksum: crc32c.
    """

    offset: int
    num_items: int
    checksum: int


Blocks = tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class TableIndex:
    """A table's blocks: of each the ids [n], then the rows [n, dim], then each slot [n, dim]."""

    table: Table
    slots: tuple[str, ...]
    blocks: Blocks

    @property
    def num_rows(self) -> int:
        return sum(block.num_items for block in self.blocks)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.table.dim, len(self.slots))


@dataclass(frozen=True, slots=True)
class PieceIndex:
    """A piece whose applied set is in blocks: AppliedTask by AppliedTask four int32, then all their extras."""

    buckets: Buckets
    version: int
    num_applies: int
    tasks: Blocks
    extras: Blocks


@dataclass(frozen=True, slots=True)
class PartIndex:
    """Everything that a part says of itself."""

    ps_id: int
    num_ps: int
    incarnation: int
    optimizer: str
    seed: int
    total_trainable: int
    total_non_trainable: int
    pieces: tuple[PieceIndex, ...]
    trainable: Blocks
    trainable_slots: Mapping[str, Blocks]
    non_trainable: Blocks
    tables: tuple[TableIndex, ...]

    @property
    def buckets(self) -> Buckets:
        """All that the part holds, ranges that touch as one."""
        return joined_buckets(span for piece in self.pieces for span in piece.buckets)

    def blocks(self) -> list[tuple[Block, int]]:
        """Every block with its size in bytes, as they lie in the file."""
        ints = [block for piece in self.pieces for block in (*piece.tasks, *piece.extras)]
        dense = (self.trainable, *self.trainable_slots.values(), self.non_trainable)
        sized = [(block, block.num_items * INTS.itemsize) for block in ints]
        sized += [(block, block.num_items * FLOATS.itemsize) for blocks in dense for block in blocks]
        sized += [(block, block.num_items * table.row_bytes) for table in self.tables for block in table.blocks]
        return sorted(sized)

    def encode(self) -> bytes:
        return json.dumps({"format": FORMAT} | asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> PartIndex:
        """
        Raises:
            ValueError, TypeError, KeyError: it is not an index.
        """
        values = json.loads(data)
        del values["format"]
        values["pieces"] = tuple(_piece(piece) for piece in values["pieces"])
        values["tables"] = tuple(
            TableIndex(Table(**table["table"]), tuple(table["slots"]), _blocks(table["blocks"]))
            for table in values["tables"]
        )
        values["trainable_slots"] = {slot: _blocks(blocks) for slot, blocks in values["trainable_slots"].items()}
        for name in ("trainable", "non_trainable"):
            values[name] = _blocks(values[name])
        return cls(**values)


def row_bytes(dim: int, num_slots: int) -> int:
    """Return the size of a row: its id, itself, its slots."""
    return IDS.itemsize + FLOATS.itemsize * dim * (1 + num_slots)


def applied_arrays(applied: pb.AppliedSet) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """An applied set as numbers: [tasks, 4] epoch, task, watermark, number of extras; the extras of all tasks."""
    tasks = [(task.epoch, task.task, task.watermark, len(task.extras)) for task in applied.tasks]
    extras = [n for task in applied.tasks for n in task.extras]
    return np.array(tasks, INTS).reshape(-1, 4), np.array(extras, INTS)


def piece_of(index: PieceIndex, tasks: npt.NDArray[np.int32], extras: npt.NDArray[np.int32]) -> Piece:
    """The inverse.

    Raises:
        ValueError: the numbers do not fit together.
    """
    applied = pb.AppliedSet(num_applies=index.num_applies)
    position = 0
    for epoch, task, watermark, num_extras in tasks.reshape(-1, 4).tolist():
        of_task = extras[position : position + num_extras].tolist()
        applied.tasks.add(epoch=epoch, task=task, watermark=watermark, extras=of_task)
        position += num_extras
    if position != len(extras):
        raise ValueError("its applied set is not whole")
    return Piece(index.buckets, index.version, applied)


def _piece(values: Mapping[str, Any]) -> PieceIndex:
    buckets = tuple((int(start), int(end)) for start, end in values["buckets"])
    tasks, extras = _blocks(values["tasks"]), _blocks(values["extras"])
    return PieceIndex(buckets, values["version"], values["num_applies"], tasks, extras)


def _blocks(values: Sequence[Sequence[int]]) -> Blocks:
    return tuple(Block(*block) for block in values)
