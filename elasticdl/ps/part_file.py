"""One PS's part of a checkpoint as a file, written and read in blocks; docs/checkpoint.md describes the format.

A part appears completely or not at all, on a file system and in storage.  Neither the writer nor the reader ever holds
more of a table than a block.  The master writes the manifest that makes the parts a checkpoint.

A part is consecutive blocks, then the index as JSON, then a tail with the position and the checksum of the index.  The
index contains the checksum of every block, so its own checksum covers the whole file; it is the one in the manifest.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from elasticdl.frameworks.framework import Floats, Table
from elasticdl.kernels._native import crc32c
from elasticdl.ps.applied import AppliedSet, MinibatchName
from elasticdl.ps.partition import Buckets, PartSnapshot, Piece, TableChunk, joined_buckets
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.storage.paths import path_of, real_path, writing
from elasticdl.storage.versions import is_complete, reason, unreadable
from elasticdl.task_numbers import TaskKey
from elasticdl_client.errors import CheckpointError, StorageError
from elasticdl_client.storage_kinds import AnyPath

Array = npt.NDArray[Any]
_Typed = tuple[Array, np.dtype[Any]]

BLOCK_BYTES = 8 << 20
_SYNC_BYTES = 256 << 20  # sync in portions, so that the last sync is short
_MAX_INDEX_BYTES = 1 << 30
HINT = "take another checkpoint, or train again from the beginning"


@dataclass(frozen=True, slots=True)
class PartFile:
    """A part on disk, as named in the manifest.

    Attributes:
        crc32: Checksum of the index, which contains the checksums of everything else.
    """

    file: str
    size_bytes: int
    crc32: int


def part_directory(named: str, checkpoint_dir: str) -> AnyPath:
    """Return the directory of an unfinished checkpoint: ``<checkpoint_dir>/version-<N>``, without a manifest.

    Args:
        named: The path from a caller; symbolic links and ``..`` are resolved.
        checkpoint_dir: The directory of this job; empty: it has none.

    Raises:
        CheckpointError: it is another directory, which must not be written to.
    """
    if not checkpoint_dir:
        raise CheckpointError(f"directory is {named!r}, and this job has no --checkpoint_dir")
    try:
        directory = real_path(path_of(named))
    except ValueError as error:
        raise CheckpointError(f"directory is {named!r}: {error}") from error
    is_version = re.fullmatch(r"version-\d+", directory.name, re.ASCII) is not None
    if not is_version or directory.parent != real_path(path_of(checkpoint_dir)):
        raise CheckpointError(f"directory is {named!r}, no version-<N> in --checkpoint_dir={checkpoint_dir}")
    if is_complete(directory):
        raise CheckpointError(f"directory is {named!r}, a checkpoint that is complete")
    return directory


def write_part(directory: AnyPath, ps_id: int, num_ps: int, incarnation: int, snapshot: PartSnapshot) -> PartFile:
    """Write a part into an existing directory; the snapshot stays open.

    Raises:
        CheckpointError: it cannot be written; no file of this PS is left.
    """
    name = f"variables-{ps_id}-of-{num_ps}.ckpt"
    try:
        with writing(directory / name, f"{incarnation}.tmp") as file:
            written = _Writer(file.fileno()).write(ps_id, num_ps, incarnation, snapshot)
    except (OSError, StorageError) as error:
        volume = "free or enlarge the volume of --checkpoint_dir and see that the job may write to it"
        hint = error.hint if isinstance(error, StorageError) else volume
        raise CheckpointError(f"the checkpoint {directory / name} cannot be written: {reason(error)}", hint) from error
    return PartFile(name, *written)


class _Writer:
    """Writes one part to an open file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._offset = 0
        self._unsynced = 0

    def write(self, ps_id: int, num_ps: int, incarnation: int, part: PartSnapshot) -> tuple[int, int]:
        """Write a part; return the size of the file, and the checksum of its index."""
        self._put([memoryview(MAGIC)])
        index = PartIndex(
            ps_id,
            num_ps,
            incarnation,
            part.optimizer,
            part.seed,
            part.total_trainable,
            part.total_non_trainable,
            tuple(self._piece(piece) for piece in part.pieces),
            self._numbers(part.trainable, FLOATS),
            {slot: self._numbers(values, FLOATS) for slot, values in part.trainable_slots.items()},
            self._numbers(part.non_trainable, FLOATS),
            tuple(self._table(part, number) for number in range(len(part.tables))),
        )
        encoded = index.encode()
        checksum = zlib.crc32(encoded)
        self._put([memoryview(encoded), memoryview(TAIL.pack(len(encoded), checksum, FORMAT, MAGIC))])
        return self._offset, checksum

    def _piece(self, piece: Piece) -> PieceIndex:
        tasks, extras = applied_arrays(piece.applied)
        return PieceIndex(
            piece.buckets,
            piece.version,
            piece.applied.num_applies,
            self._numbers(tasks.reshape(-1), INTS),
            self._numbers(extras, INTS),
            tuple((task.epoch, task.task, n) for task in piece.applied.tasks for n in task.skipped),
        )

    def _numbers(self, numbers: Array, dtype: np.dtype[Any]) -> Blocks:
        step = BLOCK_BYTES // dtype.itemsize
        return tuple(
            self._block(len(numbers[start : start + step]), [(numbers[start : start + step], dtype)])
            for start in range(0, len(numbers), step)
        )

    def _table(self, part: PartSnapshot, number: int) -> TableIndex:
        table = part.tables[number]
        blocks: list[Block] = []
        slots: tuple[str, ...] | None = None
        for chunk in part.chunks[table.name]() if table.name in part.chunks else ():
            slots = tuple(chunk.slots) if slots is None else slots
            step = max(1, BLOCK_BYTES // row_bytes(table.dim, len(slots)))
            for start in range(0, len(chunk.ids), step):
                rows = slice(start, start + step)
                floats = [chunk.rows, *(chunk.slots[slot] for slot in slots)]
                arrays: list[_Typed] = [(chunk.ids[rows], IDS)]
                arrays += [(array[rows], FLOATS) for array in floats]
                blocks.append(self._block(len(chunk.ids[rows]), arrays))
        return TableIndex(table, slots or (), tuple(blocks))

    def _block(self, num_items: int, arrays: Sequence[_Typed]) -> Block:
        offset, checksum = self._offset, 0
        parts = [_bytes(np.ascontiguousarray(array, dtype)) for array, dtype in arrays]
        for part in parts:
            checksum = crc32c(part, checksum)
        self._put(parts)
        return Block(offset, num_items, checksum)

    def _put(self, parts: list[memoryview]) -> None:
        """Write all parts with as few calls as possible: after each, the thread must get the GIL again."""
        while parts:
            num_written = os.writev(self._descriptor, parts)
            self._offset += num_written
            self._unsynced += num_written
            parts = _rest(parts, num_written)
        if self._unsynced >= _SYNC_BYTES:
            os.fdatasync(self._descriptor)
            self._unsynced = 0


class PartReader:
    """An open part.  Its index is verified by the constructor, each block when it is read.

    Every method raises CheckpointError, which names the file, if something is damaged, and StorageUnreachable while the
    volume does not answer.
    """

    def __init__(self, path: AnyPath, expected: PartFile | None = None) -> None:
        """
        Args:
            path: The file.
            expected: Size and checksum from the manifest; None: verify only the file's own checksums.

        Raises:
            CheckpointError: the file is missing, truncated, damaged, or of another version.
        """
        self.path = path
        self._is_lost = False
        with self._naming_the_file():
            self._file = path.open("rb")
        try:
            with self._naming_the_file():
                with contextlib.suppress(io.UnsupportedOperation):  # a file in remote storage
                    os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                self.index = self._read_index(expected)
        except BaseException:
            self.close()
            raise

    def pieces(self) -> list[Piece]:
        with self._naming_the_file():
            return [
                piece_of(piece, self._all(piece.tasks, INTS), self._all(piece.extras, INTS))
                for piece in self.index.pieces
            ]

    def dense(self, blocks: Blocks, start: int, out: Floats) -> None:
        """Read the numbers start … start + len(out) - 1 of blocks into `out`."""
        with self._naming_the_file():
            self._copy(blocks, start, out, FLOATS)

    def chunks(self, table: TableIndex) -> Iterator[TableChunk]:
        """Yield all rows of a table, block by block."""
        for block in table.blocks:
            ids = np.empty(block.num_items, IDS)
            floats = [np.empty((block.num_items, table.table.dim), FLOATS) for _ in range(1 + len(table.slots))]
            with self._naming_the_file():
                self._read(block, [ids, *floats])
            yield TableChunk(ids, floats[0], dict(zip(table.slots, floats[1:], strict=True)))

    def verify(self) -> None:
        """Read and verify everything.

        Raises:
            CheckpointError: something is damaged.
        """
        with self._naming_the_file():
            for block, size_bytes in self.index.blocks():
                self._read(block, [np.empty(size_bytes, np.uint8)])

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._is_lost = True
            raise unreadable(f"the checkpoint part {self.path}", error, HINT) from error
        except (ValueError, KeyError, TypeError, AttributeError, struct.error, MemoryError) as error:
            raise CheckpointError(f"the checkpoint part {self.path} is damaged: {error}", HINT) from error

    def _read_index(self, expected: PartFile | None) -> PartIndex:
        size_bytes = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        magic = self._file.read(len(MAGIC))
        if magic == OLD_MAGIC:
            raise CheckpointError(f"{self.path} has format 1; this version reads {FORMAT}", HINT)
        if expected is not None and size_bytes != expected.size_bytes:
            raise ValueError(f"it has {size_bytes} bytes, the manifest says {expected.size_bytes}")
        if magic != MAGIC:
            raise ValueError("it does not begin like one")
        end = size_bytes - TAIL.size
        if end < len(MAGIC):
            raise ValueError("it is too short")
        self._file.seek(end)
        index_size, checksum, number, magic = TAIL.unpack(self._file.read(TAIL.size))
        if magic != MAGIC or index_size > min(end - len(MAGIC), _MAX_INDEX_BYTES):
            raise ValueError("it does not end like one")
        encoded = np.empty(index_size, np.uint8)
        self._fill([encoded], end - index_size)
        if zlib.crc32(encoded.data) != checksum:
            raise ValueError("the checksum of its index does not match")
        if number != FORMAT:
            raise ValueError(f"it says that it has format {number}, and begins like {FORMAT}")
        if expected is not None and checksum != expected.crc32:
            raise ValueError("its checksum is not the one in the manifest")
        index = PartIndex.decode(encoded.tobytes())
        _check_gapless(index, len(MAGIC), end - index_size)
        return index

    def _all(self, blocks: Blocks, dtype: np.dtype[Any]) -> Array:
        numbers = np.empty(sum(block.num_items for block in blocks), dtype)
        self._copy(blocks, 0, numbers, dtype)
        return numbers

    def _copy(self, blocks: Blocks, start: int, out: Array, dtype: np.dtype[Any]) -> None:
        first = 0
        for block in blocks:
            low, high = max(first, start), min(first + block.num_items, start + len(out))
            if low < high:
                numbers = np.empty(block.num_items, dtype)
                self._read(block, [numbers])
                out[low - start : high - start] = numbers[low - first : high - first]
            first += block.num_items
        if first < start + len(out):
            raise ValueError("it holds fewer numbers than its buckets have")

    def _read(self, block: Block, arrays: Sequence[Array]) -> None:
        self._fill(arrays, block.offset)
        checksum = 0
        for array in arrays:
            checksum = crc32c(_bytes(array), checksum)
        if checksum != block.checksum:
            raise ValueError(f"the checksum of the block at {block.offset} does not match")

    def _fill(self, arrays: Sequence[Array], offset: int) -> None:
        if self._is_lost:  # a handle remains stale after its volume has returned
            self._file.close()
            self._file = self.path.open("rb")
            self._is_lost = False
        self._file.seek(offset)
        for array in arrays:
            if self._file.readinto(_bytes(array)) < array.nbytes:
                raise ValueError("it ends too early")


def _check_gapless(index: PartIndex, start: int, end: int) -> None:
    """Raise unless every byte between the magic and the index belongs to one block."""
    for block, size_bytes in index.blocks():
        if block.offset != start or block.num_items < 0:
            raise ValueError(f"its blocks do not follow each other at {start}")
        start += size_bytes
    if start != end:
        raise ValueError(f"nothing describes its bytes from {start}")


def _rest(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return several buffers without the first bytes; drop empty buffers."""
    rest = []
    for part in parts:
        skipped = min(num_bytes, part.nbytes)
        num_bytes -= skipped
        if skipped < part.nbytes:
            rest.append(part[skipped:])
    return rest


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


FORMAT = 2
MAGIC = b"ELDLPS02"
OLD_MAGIC = b"ELDLPS01"
TAIL = struct.Struct("<QII8s")  # size and crc32 of the index, format, magic

INTS, FLOATS, IDS = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<i8")


class Block(NamedTuple):
    """Consecutive bytes with a checksum.

    Attributes:
        offset: Position in the file, in bytes.
        num_items: Number of numbers, or of rows.
        checksum: crc32c.
    """

    offset: int
    num_items: int
    checksum: int


Blocks = tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class TableIndex:
    """A table's blocks; each contains the ids [n], then the rows [n, dim], then each slot [n, dim]."""

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
    """A piece whose applied set is in blocks: four int32 for each AppliedTask, then the extras of all.

    Attributes:
        skipped: Epoch, task and minibatch of each skipped minibatch.
    """

    buckets: Buckets
    version: int
    num_applies: int
    tasks: Blocks
    extras: Blocks
    skipped: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class PartIndex:
    """The index of a part."""

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
        """All buckets in the part; adjacent ranges are joined."""
        return joined_buckets(span for piece in self.pieces for span in piece.buckets)

    def blocks(self) -> list[tuple[Block, int]]:
        """Return every block with its size in bytes, in the order of the file."""
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
        """Parse the result of `encode`.

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
    """Return the bytes of a row: its id, its values, its slots."""
    return IDS.itemsize + FLOATS.itemsize * dim * (1 + num_slots)


def applied_arrays(applied: pb.AppliedSet) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return an applied set as [tasks, 4] (epoch, task, watermark, number of extras), and the extras of all tasks."""
    parts = [np.array([], INTS).reshape(0, 4)]
    for run in applied.runs:
        rows = np.zeros((run.num_tasks, 4), INTS)
        rows[:, 0], rows[:, 2] = run.epoch, run.watermark
        rows[:, 1] = np.arange(run.first_task, run.first_task + run.num_tasks)
        parts.append(rows)
    tasks = [(task.epoch, task.task, task.watermark, len(task.extras)) for task in applied.tasks]
    extras = [n for task in applied.tasks for n in task.extras]
    return np.concatenate([*parts, np.array(tasks, INTS).reshape(-1, 4)]), np.array(extras, INTS)


def piece_of(index: PieceIndex, tasks: npt.NDArray[np.int32], extras: npt.NDArray[np.int32]) -> Piece:
    """Return the piece with an applied set from `applied_arrays`.

    Raises:
        ValueError: the numbers are inconsistent.
    """
    applied, position = AppliedSet(), 0
    skipped: dict[TaskKey, set[int]] = {}
    for epoch, task, n in index.skipped:
        skipped.setdefault((epoch, task), set()).add(n)
    for epoch, task, watermark, num_extras in tasks.reshape(-1, 4).tolist():
        applied.fill(epoch, task, 1 if watermark else 0, watermark)
        for n in extras[position : position + num_extras].tolist():
            applied.add(MinibatchName(epoch, task, n))
        position += num_extras
    if position != len(extras):
        raise ValueError("its applied set is not whole")
    applied.skipped = skipped
    applied.num_applies = index.num_applies
    return Piece(index.buckets, index.version, applied.to_message())


def _piece(values: Mapping[str, Any]) -> PieceIndex:
    buckets = tuple((int(start), int(end)) for start, end in values["buckets"])
    tasks, extras = _blocks(values["tasks"]), _blocks(values["extras"])
    skipped = tuple((int(epoch), int(task), int(n)) for epoch, task, n in values.get("skipped", ()))
    return PieceIndex(buckets, values["version"], values["num_applies"], tasks, extras, skipped)


def _blocks(values: Sequence[Sequence[int]]) -> Blocks:
    return tuple(Block(*block) for block in values)
