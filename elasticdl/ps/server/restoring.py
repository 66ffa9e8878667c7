"""The initial state of a PS: its buckets' share of a checkpoint, which any number of PS may have written.

A checkpoint is a directory with a manifest.  Reads from a volume that does not answer are retried for half an hour.  If
the newest checkpoint is damaged, the next older one is taken, and that is reported; parts of one model restored from
different versions are still exact, because each piece of the state has its own names.  For another job's checkpoint the
names have no meaning: it is taken as it is, or not at all.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from elasticdl.frameworks.framework import Floats, Table
from elasticdl.ps.part_file import HINT, Blocks, PartFile, PartReader, TableIndex
from elasticdl.ps.partition import (
    NUM_BUCKETS,
    Buckets,
    PartSnapshot,
    Piece,
    TableChunk,
    buckets,
    joined_buckets,
    num_floats,
    slices_within,
)
from elasticdl.storage.versions import PATIENCE_S, NoneIsWhole, complete, unreadable, when_reachable
from elasticdl_client.checkpoint_manifest import MANIFEST, SERVERS_FORMAT, NewerFormat, read_manifest
from elasticdl_client.errors import CheckpointError, StorageUnreachable
from elasticdl_client.storage_kinds import AnyPath

_SECTOR_PATIENCE_S = 180.0  # longer than a mount without its server keeps a manifest in its cache, mostly a minute


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """The checkpoint that was taken, and the fault of each that was skipped."""

    directory: AnyPath
    damaged: tuple[str, ...]


def restore(
    wanted: AnyPath,
    own: Buckets,
    take: Callable[[PartSnapshot], None],
    patience_s: float = PATIENCE_S,
    sector_patience_s: float = _SECTOR_PATIENCE_S,
) -> RestoredCheckpoint:
    """Restore the values of some buckets from a checkpoint of this job; if it is damaged, from the next older one.

    Args:
        wanted: The checkpoint that the master names, ``<checkpoint_dir>/version-<N>``.
        own: The buckets of this PS.
        take: Receives the values.  An error may come with any chunk of rows; then it must keep nothing.
        patience_s: How long volumes that do not answer are retried; then their checkpoints count as damaged.
        sector_patience_s: The same for EIO of a part beside a readable manifest, if there is another checkpoint.

    Raises:
        NoneIsWhole: names the fault of each.
        NewerFormat: a later version of ElasticDL wrote the newest undamaged checkpoint.
    """
    damaged: list[str] = []
    deadline = time.monotonic() + patience_s
    try:
        for directory in _candidates(wanted, deadline):
            try:
                when_reachable(_tries(directory, wanted, own, take, sector_patience_s), deadline - time.monotonic())
            except NewerFormat:
                raise
            except (CheckpointError, StorageUnreachable) as error:
                damaged.append(f"{directory.name}: {error.what}")
                continue
            return RestoredCheckpoint(directory, tuple(damaged))
    except NewerFormat:
        raise
    except (CheckpointError, StorageUnreachable) as error:  # while listing the other checkpoints
        damaged.append(error.what)
    raise NoneIsWhole(wanted.parent, damaged)


def restore_other(directory: AnyPath, own: Buckets, take: Callable[[PartSnapshot], None]) -> RestoredCheckpoint:
    """Restore the values of some buckets from another job's checkpoint, after verifying all of it.

    Raises:
        CheckpointError: it is damaged; names the file.
        StorageUnreachable: its volume has not answered for half an hour.
    """
    when_reachable(lambda: _give(open_checkpoint(directory, own, verified=True), take))
    return RestoredCheckpoint(directory, ())


def open_checkpoint(directory: AnyPath, own: Buckets, verified: bool = False) -> PartSnapshot:
    """Open the share of some buckets in a checkpoint; rows are read and verified as they are taken.

    Raises:
        CheckpointError: it is damaged, as far as it has been read.
        StorageUnreachable: its volume does not answer.
    """
    with ExitStack() as stack:
        readers = []
        for expected, held, incarnation in _parts(directory):
            if _common(own, held):
                reader = stack.enter_context(PartReader(directory / expected.file, expected))
                if (reader.index.buckets, reader.index.incarnation) != (held, incarnation):
                    raise CheckpointError(f"{reader.path} is not the part that its manifest names", HINT)
                if verified:
                    reader.verify()
                readers.append(reader)
        snapshot = _joined(directory, readers, own)
        return replace(snapshot, close=stack.pop_all().close)


def _tries(
    directory: AnyPath,
    wanted: AnyPath,
    own: Buckets,
    take: Callable[[PartSnapshot], None],
    sector_patience_s: float,
) -> Callable[[], None]:
    """Return a function that tries to restore a checkpoint, and after a while treats EIO of its parts only as damage.

    An unreadable sector gives the same error as a volume without its server.  If there is no other checkpoint to take,
    the error is retried like that of a volume.
    """
    since: float | None = None

    def restore_once() -> None:
        nonlocal since
        try:
            _give(open_checkpoint(directory, own), take)
        except StorageUnreachable as error:
            if not _is_bad_sector(directory, wanted, error):
                since = None
                raise
            since = time.monotonic() if since is None else since
            if time.monotonic() - since >= sector_patience_s:
                raise CheckpointError(error.what, error.hint) from error
            raise

    return restore_once


def _is_bad_sector(directory: AnyPath, wanted: AnyPath, error: StorageUnreachable) -> bool:
    """Return whether a part has EIO while the manifest beside it can be read, and there is another checkpoint."""
    if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EIO:
        return False
    try:
        if isinstance(directory, Path):
            _forget(directory / MANIFEST)
        _parts(directory)
        return [wanted, *_others(wanted)][-1] != directory
    except (OSError, CheckpointError, StorageUnreachable):
        return False


def _forget(path: Path) -> None:
    """Drop a file from the page cache, so that the next read comes from its volume."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _give(snapshot: PartSnapshot, take: Callable[[PartSnapshot], None]) -> None:
    try:
        take(snapshot)
    except BaseException:
        snapshot.close()
        raise


def _candidates(wanted: AnyPath, deadline: float) -> Iterator[AnyPath]:
    """Yield the wanted checkpoint, then the others beside it, the newest first; only those with a manifest.

    Raises:
        CheckpointError, StorageUnreachable: the others cannot be listed.
    """
    yield wanted
    yield from when_reachable(lambda: _others(wanted), deadline - time.monotonic())


def _others(wanted: AnyPath) -> list[AnyPath]:
    try:
        return [path for path in reversed(complete(wanted.parent)) if path != wanted]
    except OSError as error:
        raise unreadable(f"the directory of checkpoints {wanted.parent}", error, HINT) from error


def _parts(directory: AnyPath) -> list[tuple[PartFile, Buckets, int]]:
    """Return the parts that a manifest names, with their buckets and writers; every bucket occurs once.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of another version.
    """
    path = directory / MANIFEST
    try:
        manifest = read_manifest(path)
        if manifest["format"] != SERVERS_FORMAT:
            raise CheckpointError(f"{path} has format {manifest['format']}; this version reads {SERVERS_FORMAT}", HINT)
        parts = [
            (
                PartFile(part["file"], part["size_bytes"], part["index_crc32"]),
                joined_buckets((start, end) for start, end in part["buckets"]),
                part["incarnation"],
            )
            for part in manifest["parts"]
        ]
        held = sorted(span for _, spans, _ in parts for span in spans)
        if [start for start, _ in held] != [0, *(end for _, end in held[:-1])] or held[-1][1] != NUM_BUCKETS:
            raise ValueError("its parts do not hold every bucket once")
    except OSError as error:
        raise unreadable(str(path), error, HINT) from error
    except KeyError as error:
        raise CheckpointError(f"{path} is damaged: it has no {error}", HINT) from error
    except (ValueError, TypeError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", HINT) from error
    return parts


def _joined(directory: AnyPath, readers: Sequence[PartReader], own: Buckets) -> PartSnapshot:
    first = readers[0].index
    models = {
        (i.optimizer, i.seed, i.total_trainable, i.total_non_trainable, _described(i.tables), tuple(i.trainable_slots))
        for i in (reader.index for reader in readers)
    }
    if len(models) > 1:
        raise CheckpointError(f"the parts of {directory} are not of one model", HINT)
    tables = tuple(table.table for table in first.tables)
    return PartSnapshot(
        optimizer=first.optimizer,
        seed=first.seed,
        pieces=_merged(_clipped(readers, own)),
        total_trainable=first.total_trainable,
        total_non_trainable=first.total_non_trainable,
        trainable=_dense(readers, own, first.total_trainable, lambda reader: reader.index.trainable),
        trainable_slots={
            slot: _dense(readers, own, first.total_trainable, lambda r, slot=slot: r.index.trainable_slots[slot])  # type: ignore[misc]
            for slot in first.trainable_slots
        },
        non_trainable=_dense(readers, own, first.total_non_trainable, lambda reader: reader.index.non_trainable),
        tables=tables,
        chunks={
            table.name: lambda number=number: _chunks(readers, own, number)  # type: ignore[misc]
            for number, table in enumerate(tables)
        },
        num_rows={table.name: _expected_rows(readers, own, number) for number, table in enumerate(tables)},
    )


def _described(tables: Iterable[TableIndex]) -> tuple[Table, ...]:
    return tuple(table.table for table in tables)


def _clipped(readers: Sequence[PartReader], own: Buckets) -> Iterator[Piece]:
    for reader in readers:
        for piece in reader.pieces():
            if common := _common(piece.buckets, own):
                yield replace(piece, buckets=joined_buckets(common))


def _merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Merge pieces with the same history."""
    merged: list[Piece] = []
    for piece in pieces:
        for number, other in enumerate(merged):
            if (other.version, other.applied) == (piece.version, piece.applied):
                merged[number] = replace(other, buckets=joined_buckets((*other.buckets, *piece.buckets)))
                break
        else:
            merged.append(piece)
    return tuple(merged)


def _dense(
    readers: Sequence[PartReader], own: Buckets, total: int, blocks_of: Callable[[PartReader], Blocks]
) -> Floats:
    """Return the numbers of this PS's buckets, from the parts of their former owners."""
    out = np.empty(num_floats(own, total), np.float32)
    for reader in readers:
        theirs = reader.index.buckets
        for span in _common(theirs, own):
            (source,), (target,) = slices_within((span,), theirs, total), slices_within((span,), own, total)
            reader.dense(blocks_of(reader), source.start, out[target])
    return out


def _chunks(readers: Sequence[PartReader], own: Buckets, number: int) -> Iterator[TableChunk]:
    owned = np.zeros(NUM_BUCKETS, np.bool_)
    for start, end in own:
        owned[start:end] = True
    for reader in readers:
        is_all_ours = _size(_common(reader.index.buckets, own)) == _size(reader.index.buckets)
        for chunk in reader.chunks(reader.index.tables[number]):
            if is_all_ours:
                yield chunk
                continue
            keep = np.flatnonzero(owned[buckets(chunk.ids)])
            yield TableChunk(
                chunk.ids[keep], chunk.rows[keep], {slot: values[keep] for slot, values in chunk.slots.items()}
            )


def _expected_rows(readers: Sequence[PartReader], own: Buckets, number: int) -> int:
    """Return the approximate number of rows: ids are spread evenly over the buckets."""
    expected = 0
    for reader in readers:
        held = reader.index.buckets
        share = _size(_common(held, own)) / _size(held)
        expected += round(reader.index.tables[number].num_rows * share)
    return expected


def _common(one: Buckets, other: Buckets) -> Buckets:
    """Return the intersection, ascending; each range lies within one range of both."""
    pairs = ((max(start, low), min(end, high)) for start, end in one for low, high in other)
    return tuple(sorted((start, end) for start, end in pairs if start < end))


def _size(spans: Buckets) -> int:
    return sum(end - start for start, end in spans)
