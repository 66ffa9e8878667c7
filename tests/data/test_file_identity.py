"""Files that are replaced by others of the same length after they were counted, and those that only look like it."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typed_sources as typed

from elasticdl.data.factory import create_reader
from elasticdl.data.identity import OncePerFile, identity_of_file
from elasticdl.data.reader import Metadata, PartsReader
from elasticdl.data.recordio import RecordIOWriter
from elasticdl.protocol import Shard
from elasticdl_client.errors import DataError

Numbers = Sequence[int]
CHANGED = "has changed since the job began: it has .* as before, but others"


def recordio(directory: Path, numbers: Numbers) -> None:
    with RecordIOWriter(str(directory / "data-0")) as writer:
        writer.write_all([b"%d" % n for n in numbers])


def csv_file(directory: Path, numbers: Numbers) -> None:
    (directory / "a.csv").write_text("".join(f"{n}\n" for n in ("x", *numbers)))


def text(directory: Path, numbers: Numbers) -> None:
    (directory / "a.txt").write_text("".join(f"{n}\n" for n in numbers))


def json_lines(directory: Path, numbers: Numbers) -> None:
    typed.write_jsonl(directory / "a.jsonl", [{"n": n} for n in numbers])


def parquet(directory: Path, numbers: Numbers) -> None:
    pq.write_table(pa.table({"n": list(numbers)}), directory / "a.parquet", compression="none")


def arrow(directory: Path, numbers: Numbers) -> None:
    typed.write_arrow(directory / "a.arrow", [{"n": n} for n in numbers], compression="uncompressed")


def tfrecord(directory: Path, numbers: Numbers) -> None:
    typed.write_tfrecord(directory / "a.tfrecord", [b"%d" % n for n in numbers])


def npz(directory: Path, numbers: Numbers) -> None:
    typed.write_npz(directory / "a.npz", [{"n": n} for n in numbers])


def webdataset(directory: Path, numbers: Numbers) -> None:
    typed.write_tar(directory / "a.tar", {f"{i:04}": {"cls": b"%d" % n} for i, n in enumerate(numbers)})


KINDS = [recordio, csv_file, text, json_lines, parquet, arrow, tfrecord, npz, webdataset]
Write = Callable[[Path, Numbers], None]


def written(write: Write, directory: Path, first: int = 100) -> Path:
    directory.mkdir()
    write(directory, range(first, first + 200))
    return next(path for path in directory.iterdir() if path.is_file())


def replaced(write: Write, path: Path) -> None:
    """Another file of the same length is at the path."""
    other = written(write, path.parent.with_name("other"), 300)
    assert other.stat().st_size == path.stat().st_size
    os.replace(other, path)


@pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__)
def test_another_file_of_the_same_length_is_refused_by_the_worker_that_opens_it_and_by_the_one_that_has_it_open(
    write: Write, tmp_path: Path
) -> None:
    path = written(write, tmp_path / "data")
    (shard,) = create_reader(str(path)).shards()
    of_a_worker = create_reader(str(path))
    first = Shard(shard.name, 0, 100, shard.identity)
    assert len(of_a_worker.read(first)) == 100
    replaced(write, path)
    for reader in (of_a_worker, create_reader(str(path))):
        with pytest.raises(DataError, match=CHANGED) as raised:
            reader.read(first)
        assert str(path) in raised.value.what


@pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__)
def test_a_copy_with_the_same_content_and_a_file_that_is_touched_are_read(write: Write, tmp_path: Path) -> None:
    path = written(write, tmp_path / "data")
    reader = create_reader(str(path), records_per_shard=70)
    shards = reader.shards()
    before = [list(reader.read(shard)) for shard in shards]
    shutil.copyfile(path, tmp_path / "copy")
    os.replace(tmp_path / "copy", path)
    os.utime(path, ns=(0, 0))
    for again in (reader, create_reader(str(path), records_per_shard=70)):
        assert [list(again.read(shard)) for shard in shards] == before


@pytest.mark.parametrize("write", [recordio, csv_file, json_lines], ids=lambda write: write.__name__)
def test_what_is_written_over_a_file_with_its_time_kept_is_noticed(write: Write, tmp_path: Path) -> None:
    """As `rsync --inplace --times` and `cp --preserve` leave it, where the times of two data sets are equal."""
    path = written(write, tmp_path / "data")
    status = path.stat()
    reader = create_reader(str(path))
    (shard,) = reader.shards()
    reader.read(shard)
    other = written(write, tmp_path / "other", 300).read_bytes()
    while path.stat().st_ctime_ns == status.st_ctime_ns:  # some kernels take the time of the last tick
        path.write_bytes(other)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match=CHANGED):
        reader.read(shard)


def test_a_file_that_is_replaced_between_its_check_and_its_read_is_noticed_after_it(tmp_path: Path) -> None:
    path = written(text, tmp_path / "data")

    class ReplacedWhileRead:
        def __len__(self) -> int:
            return 200

        def read(self, start: int, end: int) -> list[bytes]:
            replaced(text, path)
            return [b""] * (end - start)

    reader = PartsReader(str(path), [str(path)], lambda name: ReplacedWhileRead(), Metadata)
    (shard,) = reader.shards()
    with pytest.raises(DataError, match=CHANGED):
        reader.read(shard)


@pytest.mark.parametrize("write", [recordio, csv_file, json_lines], ids=lambda write: write.__name__)
def test_counting_takes_no_pass_over_files_with_checksums(write: Write, tmp_path: Path) -> None:
    """Each restart of the master counts."""
    path = written(write, tmp_path / "data")
    (path.parent / "SHA256SUMS").write_text(f"{'0' * 64}  {path.name}\n")
    (shard,) = create_reader(str(path)).shards()
    assert shard.identity == identity_of_file(str(path))
    with pytest.raises(DataError, match="SHA256SUMS"):
        create_reader(str(path)).read(shard)


def test_a_file_that_is_replaced_while_it_is_counted_is_refused(tmp_path: Path) -> None:
    """A process that has it open would read records of the old file as those of the new one."""
    path = written(text, tmp_path / "data")
    first = path.stat().st_mtime_ns

    class ReplacedWhileCounted:
        def __len__(self) -> int:
            replaced(text, path)
            os.utime(path, ns=(first + 1, first + 1))
            return 200

        def read(self, start: int, end: int) -> list[bytes]:
            return [b""] * (end - start)

    reader = PartsReader(str(path), [str(path)], lambda name: ReplacedWhileCounted(), Metadata)
    with pytest.raises(DataError, match="changed while its records were counted"):
        reader.shards()


def test_states_of_a_file_that_is_written_again_and_again_are_not_kept(tmp_path: Path) -> None:
    """On some file systems in user space a file has another inode or time each time."""
    path = written(text, tmp_path / "data")
    tracemalloc.start()
    try:
        check = OncePerFile(None)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1000):
            os.utime(path, ns=(number, number))
            check(str(path))
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()


def test_a_file_of_another_length_is_refused_with_both_lengths(tmp_path: Path) -> None:
    path = written(recordio, tmp_path / "data")
    (shard,) = create_reader(str(path)).shards()
    before = path.stat().st_size
    recordio(path.parent, range(100, 320))
    with pytest.raises(DataError, match=f"it had {before} bytes, and has {path.stat().st_size}"):
        create_reader(str(path)).read(shard)


def test_images_that_are_renamed_are_noticed_and_a_copy_of_the_folder_is_the_same(tmp_path: Path) -> None:
    root = tmp_path / "images"
    typed.write_images(root, {"a": 3, "b": 2})
    (shard,) = create_reader(str(root)).shards()
    shutil.copytree(root, tmp_path / "copy", ignore=shutil.ignore_patterns(".elasticdl"))
    root.rename(tmp_path / "old")
    (tmp_path / "copy").rename(root)
    assert len(create_reader(str(root)).read(shard)) == 5
    (root / "a/000.png").rename(root / "a/009.png")
    with pytest.raises(DataError, match=r"it has 5 files as before, but others"):
        create_reader(str(root)).read(shard)


def test_a_hugging_face_data_set_that_is_written_again_is_noticed(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "set"
    datasets.Dataset.from_dict({"n": list(range(100))}).save_to_disk(path)
    (shard,) = create_reader(str(path)).shards()
    assert len(create_reader(str(path)).read(shard)) == 100
    shutil.rmtree(path)
    datasets.Dataset.from_dict({"n": list(range(100))}).save_to_disk(path)
    assert len(create_reader(str(path)).read(shard)) == 100
    shutil.rmtree(path)
    datasets.Dataset.from_dict({"n": list(range(100, 200))}).save_to_disk(path)
    with pytest.raises(DataError, match=CHANGED):
        create_reader(str(path)).read(shard)


def test_a_table_has_no_identity_and_is_read_by_the_next_process(tmp_path: Path) -> None:
    typed.write_sqlite(tmp_path / "rows.db", typed.rows(20))
    url = f"sqlite:///{tmp_path / 'rows.db'}?table=t"
    (shard,) = create_reader(url).shards()
    assert not shard.identity
    assert len(create_reader(url).read(shard)) == 20


def test_of_a_large_file_both_ends_and_blocks_between_count(tmp_path: Path) -> None:
    path = tmp_path / "large"
    content = np.random.default_rng(1).bytes(1 << 20)
    found = set()
    for offset in (None, 0, 8191, len(content) // 7, len(content) - 1):
        changed = bytearray(content)
        if offset is not None:
            changed[offset] ^= 1
        path.write_bytes(changed)
        found.add(identity_of_file(str(path)))
    assert len(found) == 5
    for size in ((64 << 10) - 1, 64 << 10):  # of a small one every byte
        path.write_bytes(content[:size])
        before = identity_of_file(str(path))
        path.write_bytes(content[: size // 3] + b"?" + content[size // 3 + 1 : size])
        assert identity_of_file(str(path)) != before
