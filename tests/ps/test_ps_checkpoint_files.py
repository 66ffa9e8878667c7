"""Part files: streamed both ways, exact in every value, and any damage of any byte is noticed."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.frameworks.framework import Table
from elasticdl.ps.part_file import BLOCK_BYTES, TAIL, PartFile, PartReader, write_part
from elasticdl.ps.partition import ALL_BUCKETS, PartSnapshot, TableChunk
from elasticdl.ps.server.restoring import open_checkpoint
from elasticdl_client.errors import CheckpointError
from tests.ps.parts import applied_set, assert_is, flip, part, write_checkpoint


@dataclass(frozen=True)
class Written:
    """A checkpoint of one part."""

    directory: Path
    file: PartFile

    @property
    def path(self) -> Path:
        return self.directory / self.file.file


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    checkpoint_dir = tmp_path_factory.mktemp("checkpoints")
    directory = write_checkpoint(checkpoint_dir, 3, [part(ALL_BUCKETS)])
    path = directory / "variables-0-of-1.ckpt"
    with PartReader(path) as reader:
        checksum = TAIL.unpack(path.read_bytes()[-TAIL.size :])[1]
        assert reader.index.num_ps == 1
    return Written(directory, PartFile(path.name, path.stat().st_size, checksum))


def read_all(path: Path, expected: PartFile | None) -> None:
    with PartReader(path, expected) as reader:
        reader.verify()


def restore_all(directory: Path) -> None:
    snapshot = open_checkpoint(directory, ALL_BUCKETS)
    try:
        for chunks in snapshot.chunks.values():
            assert all(len(chunk.ids) for chunk in chunks())
    finally:
        snapshot.close()


def test_what_is_written_comes_back(written: Written) -> None:
    snapshot = open_checkpoint(written.directory, ALL_BUCKETS)
    assert_is(snapshot, ALL_BUCKETS, part(ALL_BUCKETS).pieces)
    assert_is(snapshot, ALL_BUCKETS, part(ALL_BUCKETS).pieces)  # chunks begin anew with every call
    snapshot.close()
    read_all(written.path, written.file)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_damaged_byte_is_noticed(written: Written, data: st.DataObject) -> None:
    path = written.directory / "damaged.ckpt"
    whole = bytearray(written.path.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(whole))
    for expected in (None, PartFile(path.name, written.file.size_bytes, written.file.crc32)):
        with pytest.raises(CheckpointError, match=r"damaged\.ckpt"):
            read_all(path, expected)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_truncated_part_is_noticed(written: Written, data: st.DataObject) -> None:
    path = written.directory / "truncated.ckpt"
    path.write_bytes(written.path.read_bytes()[: data.draw(st.integers(0, written.file.size_bytes - 1))])
    for expected in (None, PartFile(path.name, written.file.size_bytes, written.file.crc32)):
        with pytest.raises(CheckpointError, match=r"truncated\.ckpt is damaged"):
            read_all(path, expected)


@pytest.mark.parametrize("region", ["magic", "applied", "trainable", "slot", "rows", "index", "tail"])
def test_damage_in_each_region_stops_a_restore(written: Written, tmp_path: Path, region: str) -> None:
    directory = tmp_path / "version-3"
    shutil.copytree(written.directory, directory)
    path = directory / written.file.file
    with PartReader(path) as reader:
        index = reader.index
    position = {
        "magic": 3,
        "applied": index.pieces[0].tasks[0].offset,
        "trainable": index.trainable[0].offset + 4000,
        "slot": index.trainable_slots["velocity"][0].offset,
        "rows": index.tables[1].blocks[-1].offset + 60,
        "index": -TAIL.size - 40,
        "tail": -TAIL.size + 9,
    }[region]
    flip(path, position)
    with pytest.raises(CheckpointError, match=r"variables-0-of-1\.ckpt is damaged"):
        restore_all(directory)


def test_a_part_that_was_replaced_by_another_whole_one_is_noticed(written: Written, tmp_path: Path) -> None:
    other = replace(part(ALL_BUCKETS), seed=8)
    file = write_part(tmp_path, 0, 1, 10, other)
    assert file.size_bytes == written.file.size_bytes
    with pytest.raises(CheckpointError, match="its checksum is not the one in the manifest"):
        PartReader(tmp_path / file.file, written.file)


def test_a_part_of_the_first_format_is_refused_by_number(tmp_path: Path) -> None:
    (tmp_path / "old.ckpt").write_bytes(b"ELDLPS01" + bytes(100))
    with pytest.raises(CheckpointError, match=r"old\.ckpt has format 1; this version reads 2"):
        PartReader(tmp_path / "old.ckpt")


def large_table(num_chunks: int, rows: int, dim: int) -> PartSnapshot:
    """A part with one table that never exists as a whole."""
    table = Table("deep", dim, "{}")

    def chunks() -> Iterator[TableChunk]:
        for number in range(num_chunks):
            ids = np.arange(number * rows, (number + 1) * rows, dtype=np.int64)
            yield TableChunk(ids, np.full((rows, dim), number, np.float32), {})

    return replace(part(ALL_BUCKETS), tables=(table,), chunks={"deep": chunks})


def test_no_more_than_some_blocks_are_in_memory_at_a_time(tmp_path: Path) -> None:
    snapshot = large_table(num_chunks=100, rows=16_000, dim=16)  # 115 MB
    tracemalloc.start()
    try:
        file = write_part(tmp_path, 0, 1, 10, snapshot)
        with PartReader(tmp_path / file.file, file) as reader:
            num_rows = sum(len(chunk.ids) for chunk in reader.chunks(reader.index.tables[0]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_rows == 1_600_000
    assert file.size_bytes > 100e6
    assert peak < 3 * BLOCK_BYTES


def test_a_large_chunk_and_a_large_vector_are_cut_into_blocks(tmp_path: Path) -> None:
    snapshot = large_table(num_chunks=1, rows=600_000, dim=8)
    values = np.arange(5_000_000, dtype=np.float32)
    snapshot = replace(snapshot, trainable=values, total_trainable=len(values))
    file = write_part(tmp_path, 0, 1, 10, snapshot)
    with PartReader(tmp_path / file.file, file) as reader:
        assert len(reader.index.trainable) == 3
        assert len(reader.index.tables[0].blocks) == 3
        some = np.empty(3_000_000, np.float32)
        reader.dense(reader.index.trainable, 1_500_000, some)
        np.testing.assert_array_equal(some, values[1_500_000:4_500_000])
        ids = np.concatenate([chunk.ids for chunk in reader.chunks(reader.index.tables[0])])
        np.testing.assert_array_equal(ids, np.arange(600_000))


@pytest.mark.full
def test_a_part_beyond_four_gibibytes_comes_back(tmp_path: Path) -> None:
    snapshot = large_table(num_chunks=600, rows=64_000, dim=30)
    file = write_part(tmp_path, 0, 1, 10, snapshot)
    assert file.size_bytes > 1 << 32
    with PartReader(tmp_path / file.file, file) as reader:
        assert reader.index.tables[0].num_rows == 600 * 64_000
        blocks = reader.index.tables[0].blocks
        assert blocks[-1].offset > 1 << 32
        (last,) = reader.chunks(replace(reader.index.tables[0], blocks=blocks[-1:]))
        assert last.rows[-1, 0] == 599
    (tmp_path / file.file).unlink()


def test_an_applied_set_of_many_tasks_comes_back(tmp_path: Path) -> None:
    applied = applied_set(*((epoch, task, 16, [20, 22]) for epoch in range(3) for task in range(1000)))
    applied.tasks[7].skipped.extend([2, 20])
    snapshot = part(ALL_BUCKETS)
    snapshot = replace(snapshot, pieces=(replace(snapshot.pieces[0], applied=applied),))
    file = write_part(tmp_path, 0, 1, 10, snapshot)
    with PartReader(tmp_path / file.file, file) as reader:
        assert reader.pieces() == list(snapshot.pieces)
