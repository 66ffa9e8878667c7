"""A model held by any number of PS, as snapshots: for the tests of checkpoint files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from elasticdl.frameworks.framework import Floats, Ids, Table
from elasticdl.master import checkpoints
from elasticdl.master.checkpoints import Manifest, PsPart
from elasticdl.ps.part_file import PartFile, write_part
from elasticdl.ps.partition import Buckets, PartSnapshot, Piece, TableChunk, buckets, dense_slices, even_buckets
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.storage import versions
from elasticdl_client.storage_kinds import AnyPath

TABLES = (Table("wide", 1, "{}"), Table("deep", 8, '{"class_name": "Zeros"}', 1 << 40, "{}"), Table("empty", 3, "{}"))
SLOTS = {"wide": (), "deep": ("momentum", "velocity"), "empty": ("momentum",)}
TOTAL_TRAINABLE, TOTAL_NON_TRAINABLE = 5003, 37
NUM_ROWS = 700
_CHUNK_ROWS = 64


def applied_set(*tasks: tuple[int, int, int, Sequence[int]]) -> pb.AppliedSet:
    """(epoch, task, watermark, extras) each."""
    messages = [pb.AppliedTask(epoch=e, task=t, watermark=w, extras=extras) for e, t, w, extras in tasks]
    return pb.AppliedSet(tasks=messages, num_applies=sum(t.watermark + len(t.extras) for t in messages))


def ids_of(table: Table) -> Ids:
    """All ids that have rows: any int64, the extremes too."""
    if table.name == "empty":
        return np.empty(0, np.int64)
    ids = np.random.default_rng(table.dim).integers(-(1 << 63), (1 << 63) - 1, NUM_ROWS, np.int64)
    return np.unique(np.concatenate([ids, np.array([0, -1, -(1 << 63), (1 << 63) - 1], np.int64)]))


def floats_of(table: Table, ids: Ids, slot: str = "") -> Floats:
    """The rows of ids, or a slot beside them: a function of both."""
    shift = float(1 + list(SLOTS[table.name]).index(slot)) if slot else 0.0
    first = (ids % 1009).astype(np.float32)[:, None] / np.float32(7)
    return np.asarray(first + np.arange(table.dim, dtype=np.float32) + np.float32(shift), np.float32)


def dense_of(kind: str, total: int) -> Floats:
    """A whole flat vector of the model."""
    return np.random.default_rng(len(kind)).standard_normal(total).astype(np.float32)


def part(own: Buckets, pieces: Sequence[Piece] = ()) -> PartSnapshot:
    """The state of the owner of some buckets; by default all of it of version 3 with three names."""

    def dense(kind: str, total: int) -> Floats:
        return np.concatenate([dense_of(kind, total)[part] for part in dense_slices(own, total)])

    def chunks(table: Table) -> Iterator[TableChunk]:
        ids = owned(ids_of(table), own)
        for start in range(0, len(ids), _CHUNK_ROWS):
            some = ids[start : start + _CHUNK_ROWS]
            yield TableChunk(
                some, floats_of(table, some), {slot: floats_of(table, some, slot) for slot in SLOTS[table.name]}
            )

    return PartSnapshot(
        optimizer='{"class_name": "Adam"}',
        seed=7,
        pieces=tuple(pieces) or (Piece(own, 3, applied_set((0, 0, 2, [5]))),),
        total_trainable=TOTAL_TRAINABLE,
        total_non_trainable=TOTAL_NON_TRAINABLE,
        trainable=dense("weights", TOTAL_TRAINABLE),
        trainable_slots={slot: dense(slot, TOTAL_TRAINABLE) for slot in ("momentum", "velocity")},
        non_trainable=dense("other", TOTAL_NON_TRAINABLE),
        tables=TABLES,
        chunks={table.name: lambda table=table: chunks(table) for table in TABLES},  # type: ignore[misc]
        num_rows={table.name: len(owned(ids_of(table), own)) for table in TABLES},
    )


def owned(ids: Ids, own: Buckets) -> Ids:
    its = buckets(ids)
    return ids[np.any([(start <= its) & (its < end) for start, end in own], axis=0)]


def assert_is(snapshot: PartSnapshot, own: Buckets, pieces: Sequence[Piece]) -> None:
    """It is exactly what `own` holds of the model, with these pieces."""
    expected = part(own)
    assert sorted(snapshot.pieces, key=_first) == sorted(pieces, key=_first)
    for name in ("optimizer", "seed", "total_trainable", "total_non_trainable", "tables"):
        assert getattr(snapshot, name) == getattr(expected, name)
    np.testing.assert_array_equal(snapshot.trainable, expected.trainable)
    np.testing.assert_array_equal(snapshot.non_trainable, expected.non_trainable)
    assert set(snapshot.trainable_slots) == set(expected.trainable_slots)
    for slot, values in snapshot.trainable_slots.items():
        np.testing.assert_array_equal(values, expected.trainable_slots[slot])
    for table in TABLES:
        chunks = list(snapshot.chunks[table.name]())
        ids = np.concatenate([np.empty(0, np.int64), *(chunk.ids for chunk in chunks)])
        assert sorted(ids.tolist()) == sorted(owned(ids_of(table), own).tolist())
        for chunk in chunks:
            np.testing.assert_array_equal(chunk.rows, floats_of(table, chunk.ids))
            assert tuple(chunk.slots) == SLOTS[table.name]
            for slot, values in chunk.slots.items():
                np.testing.assert_array_equal(values, floats_of(table, chunk.ids, slot))


def write_checkpoint(checkpoint_dir: AnyPath, version: int, parts: Sequence[PartSnapshot]) -> AnyPath:
    """A committed one, as the master and the PS write it."""
    directory = versions.begin(checkpoint_dir, version)
    files = [write_part(directory, k, len(parts), 10 + k, part) for k, part in enumerate(parts)]
    commit(directory, version, files, [_held(part) for part in parts])
    return directory


def commit(directory: AnyPath, version: int, files: Sequence[PartFile], held: Sequence[Buckets] = ()) -> None:
    """The manifest of parts that were written by PS 0, 1, … of incarnations 10, 11, …"""
    held = held or [even_buckets(k, len(files)) for k in range(len(files))]
    parts = tuple(
        PsPart(k, file.file, file.size_bytes, file.crc32, 10 + k, spans)
        for k, (file, spans) in enumerate(zip(files, held, strict=True))
    )
    checkpoints.commit(directory, Manifest("digits", "f", version, 7, len(parts), parts))


def even_parts(num_ps: int, version: int = 3) -> list[PartSnapshot]:
    """The model divided evenly, each with names of its own."""
    parts = []
    for k in range(num_ps):
        own = even_buckets(k, num_ps)
        parts.append(
            part(own, [Piece(own, version + k, applied_set((0, 0, version, [version + 2 + k]), (1, k, 1, [])))])
        )
    return parts


def flip(path: Path, position: int) -> None:
    """Damages one byte; a negative position counts from the end."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def _held(snapshot: PartSnapshot) -> Buckets:
    return tuple(sorted(span for piece in snapshot.pieces for span in piece.buckets))


def _first(piece: Piece) -> Buckets:
    return piece.buckets
