"""Checksums of data: those of each format, and `SHA256SUMS` beside the files."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
import typed_sources as typed

from elasticdl.data.datasets import Split
from elasticdl.data.datasets.catalogue import write_split
from elasticdl.data.factory import create_reader
from elasticdl.data.reader import Reader
from elasticdl.data.sources import write_manifest
from elasticdl.protocol import Shard
from elasticdl_client.data_sources import MANIFEST
from elasticdl_client.errors import DataError


def text_files(directory: Path) -> Path:
    directory.mkdir()
    for name in ("a.txt", "b.txt"):
        (directory / name).write_text(f"{name} 1\n{name} 2\n")
    write_manifest(str(directory), [str(path) for path in directory.iterdir()])
    return directory


def everything(reader: Reader) -> list[bytes]:
    return [record for shard in reader.shards() for record in reader.read(shard)]


def test_sha256sum_agrees_with_a_written_manifest_and_the_reader_with_one_of_sha256sum(tmp_path: Path) -> None:
    directory = text_files(tmp_path / "data")
    subprocess.run(["sha256sum", "--check", "--strict", MANIFEST], cwd=directory, check=True)
    (directory / MANIFEST).write_bytes(
        subprocess.check_output(["sha256sum", "--binary", "a.txt", "b.txt"], cwd=directory)
    )
    assert everything(create_reader(str(directory))) == [b"a.txt 1", b"a.txt 2", b"b.txt 1", b"b.txt 2"]


def test_a_changed_file_is_refused_before_its_first_record_and_the_others_are_read(tmp_path: Path) -> None:
    directory = text_files(tmp_path / "data")
    (directory / "b.txt").write_text("b.txt 1\nb.txt 3\n")
    reader = create_reader(str(directory))
    assert reader.read(Shard(str(directory / "a.txt"), 1, 2)) == [b"a.txt 2"]
    with pytest.raises(DataError, match=r"b\.txt: its SHA-256 is .*SHA256SUMS says"):
        reader.read(Shard(str(directory / "b.txt"), 0, 1))


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = text_files(tmp_path / "data") / "a.txt"
    reader = create_reader(str(path))
    reader.read(Shard(str(path), 0, 1))
    path.write_text("a.txt 2\na.txt 1\n")
    os.utime(path, ns=(0, 0))  # of another time, however coarse the clock
    with pytest.raises(DataError, match="its SHA-256 is"):
        reader.read(Shard(str(path), 0, 1))


def test_a_file_that_is_not_listed_and_one_that_is_missing_are_named(tmp_path: Path) -> None:
    directory = text_files(tmp_path / "data")
    (directory / "c.txt").write_text("new\n")
    with pytest.raises(DataError, match=r"c\.txt is not in .*SHA256SUMS"):
        everything(create_reader(str(directory)))
    (directory / "c.txt").unlink()
    (directory / "b.txt").unlink()
    with pytest.raises(DataError, match=r"SHA256SUMS lists b\.txt, which is not there"):
        create_reader(str(directory))


def test_a_damaged_manifest_is_refused_with_its_line(tmp_path: Path) -> None:
    directory = text_files(tmp_path / "data")
    with open(directory / MANIFEST, "a") as file:
        file.write("0123  c.txt\n")
    with pytest.raises(DataError, match=r"SHA256SUMS, line 3: '0123  c\.txt' is not a checksum"):
        everything(create_reader(str(directory)))


def test_written_data_sets_have_checksums(tmp_path: Path) -> None:
    split = Split("train", 10, iter([[b"%d" % n for n in range(10)]]))
    paths = write_split(split, str(tmp_path), 4)
    subprocess.run(["sha256sum", "--check", "--strict", MANIFEST], cwd=tmp_path / "train", check=True)
    assert len(everything(create_reader(str(tmp_path / "train")))) == 10
    os.truncate(paths[1], 0)  # which RecordIO takes for a file without records
    with pytest.raises(DataError, match="SHA-256"):
        create_reader(str(tmp_path / "train")).shards()


def damage_number(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_changed_number_of_a_mapped_array_is_found_before_the_first_record(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    np.savez(path, x=np.arange(1000.0), unused=np.arange(1000))
    with zipfile.ZipFile(path) as archive:
        unused = archive.getinfo("unused.npy").header_offset
    damage_number(path, unused - 9)
    with pytest.raises(DataError, match=r"byte 0: x\.npy cannot be read: Bad CRC-32"):
        create_reader(str(path), columns=["x"]).read(Shard(str(path), 0, 1))
    assert create_reader(str(path), columns=["unused"]).read(Shard(str(path), 0, 1))


def test_a_changed_number_of_a_decompressed_copy_is_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    np.savez_compressed(path, x=np.arange(1000.0))
    shard = Shard(str(path), 0, 1)
    create_reader(str(path)).read(shard)
    (copy,) = (tmp_path / ".elasticdl").glob("*.npy")
    damage_number(copy, 4000)
    with pytest.raises(DataError, match="decompressed copy") as caught:
        create_reader(str(path)).read(shard)
    assert str(copy) in caught.value.what


def test_a_changed_number_of_a_parquet_page_with_a_checksum_is_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    typed.write_parquet(path, typed.rows(50))
    damage_number(path, 300)
    with pytest.raises(DataError, match="CRC checksum verification failed"):
        everything(create_reader(str(path)))
