"""Indexes are built once and found again, by every process; a wrong one is never used."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import typed_sources as typed

from elasticdl.data.arrow import ArrowFile
from elasticdl.data.factory import create_reader
from elasticdl.protocol import Shard

PAYLOADS = [b"record %d" % i for i in range(50)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    typed.write_tfrecord(tmp_path / "a.tfrecord", PAYLOADS)
    return tmp_path / "a.tfrecord"


def indexes(directory: Path) -> list[Path]:
    return sorted((directory / ".elasticdl").iterdir())


def test_a_second_reader_takes_the_index_of_the_first(path: Path) -> None:
    assert len(create_reader(str(path)).shards()[0]) == 50
    (index,) = indexes(path.parent)
    status = path.stat()
    damaged = bytearray(path.read_bytes())
    damaged[8] ^= 1  # of a length's checksum, which building an index would find wrong
    path.write_bytes(damaged)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    reader = create_reader(str(path))
    assert len(reader.shards()[0]) == 50
    assert list(reader.read(Shard(str(path), 20, 22))) == PAYLOADS[20:22]
    assert indexes(path.parent) == [index]


def test_a_file_that_has_changed_gets_a_new_index(path: Path) -> None:
    create_reader(str(path)).shards()
    typed.write_tfrecord(path, PAYLOADS * 2)
    assert len(create_reader(str(path)).shards()[0]) == 100


def test_an_arrow_file_is_opened_again_without_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.feather"
    typed.write_arrow(path, typed.rows(250))
    (shard,) = create_reader(str(path)).shards()
    with monkeypatch.context() as patched:
        patched.delattr(ArrowFile, "_batch")
        reader = create_reader(str(path))
        assert reader.shards() == [shard]
    assert len(reader.read(shard)) == len(shard) == 250


def test_an_index_that_was_cut_off_is_built_again(path: Path) -> None:
    create_reader(str(path)).shards()
    (index,) = indexes(path.parent)
    index.write_bytes(index.read_bytes()[:40])
    assert len(create_reader(str(path)).shards()[0]) == 50
    assert index.stat().st_size > 40


def test_data_whose_directory_cannot_be_written_are_read_all_the_same(path: Path) -> None:
    (path.parent / ".elasticdl").write_text("a file where the directory would be")
    reader = create_reader(str(path))
    assert list(reader.read(reader.shards()[0])) == PAYLOADS


def test_the_index_of_text_depends_on_how_its_rows_are_distinguished(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b'a,b\n1,"x\ny"\n2,z\n')
    path = str(tmp_path / "rows.csv")
    assert len(create_reader(path).shards()[0]) == 2
    assert len(create_reader(path, {"header": False}).shards()[0]) == 3
    assert len(create_reader(path, {"reader_type": "Text"}).shards()[0]) == 4
    assert len(create_reader(path).shards()[0]) == 2


def test_the_list_of_images_is_made_anew_when_a_folder_below_a_class_gets_or_loses_one(tmp_path: Path) -> None:
    typed.write_images(tmp_path, {"cat": 3, "dog": 2})
    below = tmp_path / "cat" / "of 2026" / "july"
    below.mkdir(parents=True)

    def count() -> int:
        return len(create_reader(str(tmp_path)).shards()[0])

    assert (count(), count()) == (5, 5)
    image = (next((tmp_path / "cat").glob("*.*"))).read_bytes()
    (below / "one.png").write_bytes(image)
    assert (count(), count()) == (6, 6)
    assert len(indexes(tmp_path)) == 1
    shutil.rmtree(below)
    assert count() == 5
