"""Tar files of samples: columns, missing ones, and errors, by file and byte."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import typed_sources as typed
from PIL import Image

from elasticdl.data.example import parse_examples
from elasticdl.data.factory import create_reader
from elasticdl.data.reader import Reader
from elasticdl_client.errors import DataError


def records(reader: Reader) -> list[bytes]:
    return [record for shard in reader.shards() for record in reader.read(shard)]


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


def test_columns_are_the_endings_of_all_files_and_keys_where_they_are_named(tmp_path: Path) -> None:
    typed.write_tar(tmp_path / "0.tar", {"a/7": {"cls": b" 3\n", "seg.PNG": png(1)}, "a/8": {"txt": b"words"}})
    typed.write_tar(tmp_path / "1.tar", {"b.c/9": {"id": b"-5"}})
    reader = create_reader(str(tmp_path), {"image_size": [4, 4]}, label_column="cls")
    metadata = reader.metadata()
    assert metadata.column_dtypes == (("cls", "int64"), ("id", "int64"), ("seg.png", "image"), ("txt", "string"))
    assert metadata.column_shapes == (("seg.png", (4, 4, 3)),)
    first, second, third = records(reader)
    assert parse_examples([first], {"cls": (), "seg.png": (), "txt": ()})["cls"].tolist() == [3]
    assert parse_examples([first], {"seg.png": ()})["seg.png"].tolist() == [png(1)]
    assert parse_examples([second], {"txt": ()})["txt"].tolist() == [b"words"]
    assert parse_examples([third], {"id": ()})["id"].tolist() == [-5]
    named = create_reader(str(tmp_path), columns=["__key__", "txt"])
    assert parse_examples(records(named), {"__key__": ()})["__key__"].tolist() == [b"a/7", b"a/8", b"b.c/9"]


def test_directories_and_files_without_an_ending_are_no_samples(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("folder", "README", "folder/.hidden", "folder/1.txt"):
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if name == "folder" else tarfile.REGTYPE
            archive.addfile(member)
    reader = create_reader(str(tmp_path))
    assert [len(shard) for shard in reader.shards()] == [1]
    assert reader.metadata().column_names == ("txt",)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_are_whole(tmp_path: Path, form: int) -> None:
    name = "é" * 150
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as archive:
        archive.addfile(tarfile.TarInfo(f"{name}.txt"))
    found = parse_examples(records(create_reader(str(tmp_path), columns=["__key__"])), {"__key__": ()})
    assert found["__key__"].tolist() == [name.encode()]


def write_split_sample(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for name in ("1.txt", "2.txt", "1.cls"):
            archive.addfile(tarfile.TarInfo(name))


def write_twice(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("1.txt"))


def write_compressed(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("1.txt"))


def write_without_end(path: Path) -> None:
    typed.write_tar(path, {"1": {"txt": b"x"}})
    path.write_bytes(path.read_bytes()[:1024])


def write_bad_header(path: Path) -> None:
    typed.write_tar(path, {"1": {"txt": b"x"}, "2": {"txt": b"y"}})
    data = bytearray(path.read_bytes())
    data[1024 + 50] ^= 1  # in the second header, which its checksum tells
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (write_split_sample, "byte 1024: the files of the sample 1 do not follow one another"),
        (write_twice, "byte 512: 1.txt is there twice"),
        (write_compressed, "byte 0: "),
        (write_without_end, "byte 1024: there is no end of the archive"),
        (write_bad_header, "byte 1024: there is no end of the archive"),
    ],
)
def test_what_is_no_file_of_samples_is_refused_with_its_place(tmp_path: Path, write: object, what: str) -> None:
    assert callable(write)
    write(tmp_path / "a.tar")
    with pytest.raises(DataError) as caught:
        create_reader(str(tmp_path)).shards()
    assert f"Tar file {tmp_path / 'a.tar'}, {what}" in caught.value.what
    assert caught.value.hint


@pytest.mark.parametrize("text", [b"cat", b"", b"1.5", b"9223372036854775808"])
def test_a_class_that_is_no_whole_number_is_refused_by_name(tmp_path: Path, text: bytes) -> None:
    typed.write_tar(tmp_path / "a.tar", {"1": {"cls": b"0"}, "2": {"cls": text}})
    with pytest.raises(DataError, match=r"a\.tar, byte 1536: 2\.cls holds"):
        records(create_reader(str(tmp_path)))
