"""Every reader of files reads from storage what it reads from a directory, through refusals and broken bodies."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from elasticdl.data import reader as reader_module
from elasticdl.data.example import parse_examples
from elasticdl.data.factory import create_reader
from elasticdl.data.reader import Reader
from elasticdl.data.recordio import Compressor, RecordIOWriter
from elasticdl.protocol import Shard
from elasticdl.storage.fsspec_storage import storage_of
from elasticdl_client.errors import DataError, StorageError
from tests.data import typed_sources as typed
from tests.storage.faulty_proxy import Fault, FaultyProxy


def recordio(directory: Path) -> None:
    for compressor in Compressor:
        with RecordIOWriter(str(directory / f"data-{compressor}"), compressor, chunk_size_bytes=500) as writer:
            writer.write_all([b"%d" % i * (i % 9) for i in range(300)])


def csv_files(directory: Path) -> None:
    rows = "".join(f'{i},"said ""{i}"",\n\nleft",{i / 7}\n' for i in range(600))
    (directory / "rows.csv").write_text("﻿a,b,c\n" + rows)


def text_files(directory: Path) -> None:
    (directory / "lines.txt").write_bytes(b"".join(b"line %d\n" % i for i in range(1000)))


def tfrecord(directory: Path) -> None:
    typed.write_tfrecord(directory / "a.tfrecord", [b"x" * (i % 50) for i in range(400)])


def parquet(directory: Path) -> None:
    typed.write_parquet(directory / "a.parquet", typed.rows(310))


def arrow(directory: Path) -> None:
    typed.write_arrow(directory / "a.arrow", typed.rows(310))


def arrow_stream(directory: Path) -> None:
    typed.write_arrow_stream(directory / "a.arrow", typed.rows(310))


def jsonl(directory: Path) -> None:
    typed.write_jsonl(directory / "a.jsonl", typed.rows(600))


def webdataset(directory: Path) -> None:
    typed.write_tar(directory / "a.tar", {f"{i:04}": {"cls": b"%d" % i, "txt": b"text" * i} for i in range(300)})


def npz(directory: Path) -> None:
    typed.write_npz(directory / "a.npz", typed.rows(310))
    np.savez(directory / "b.npz", f=np.ones(9), n=np.arange(9), t=np.array(["x"] * 9))


def compressed_npz(directory: Path) -> None:
    typed.write_npz(directory / "a.npz", typed.rows(310), compressed=True)


def fortran_npz(directory: Path) -> None:
    np.savez(directory / "a.npz", x=np.asfortranarray(np.arange(600.0).reshape(300, 2)))


KINDS = [
    recordio,
    csv_files,
    text_files,
    tfrecord,
    parquet,
    arrow,
    arrow_stream,
    jsonl,
    webdataset,
    npz,
    compressed_npz,
    fortran_npz,
]


def uploaded(directory: Path) -> str:
    """The URL of a directory's copy."""
    url = f"s3://bucket/{directory.parent.name}/data"
    for path in directory.iterdir():
        if path.is_file():
            storage_of(url).publish(f"{url}/{path.name}", path)
    return url


def copied(write: Callable[[Path], None], tmp_path: Path) -> tuple[str, Path]:
    directory = tmp_path / "data"
    directory.mkdir()
    write(directory)
    return uploaded(directory), directory


def slices(reader: Reader) -> list[list[bytes]]:
    """All records, in pieces that begin in the middle of chunks."""
    return [
        list(reader.read(Shard(shard.name, start, min(start + 130, shard.end))))
        for shard in reader.shards()
        for start in range(0, shard.end, 130)
    ]


@pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__)
def test_a_reader_gives_the_same_records_as_of_a_directory(
    write: Callable[[Path], None], proxy: FaultyProxy, tmp_path: Path
) -> None:
    url, directory = copied(write, tmp_path)
    faults = proxy.once_each(Fault.UNAVAILABLE, Fault.CUT_OFF, Fault.TOO_SHORT)
    local, remote = create_reader(str(directory)), create_reader(url)
    assert [(shard.name.replace(url, str(directory)), shard.end) for shard in remote.shards()] == [
        (shard.name, shard.end) for shard in local.shards()
    ]
    assert remote.metadata() == local.metadata()
    assert slices(remote) == slices(local)
    assert faults == []


def test_an_index_is_found_by_the_next_machine_and_by_the_next_process_until_the_file_is_another(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, directory = copied(csv_files, tmp_path)

    def requests() -> list[str]:
        proxy.requests.clear()
        assert create_reader(url).shards()
        return [f"{one.method} {one.path.rpartition('/')[2]}" for one in proxy.requests if one.method != "HEAD"]

    (index,) = {line for line in requests() if line.startswith("PUT")}
    of_data = "GET rows.csv"
    assert of_data not in requests()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    assert index.replace("PUT", "GET") in (again := requests())
    assert of_data not in again
    (directory / "rows.csv").write_text("a,b,c\n1,2,3\n")
    uploaded(directory)
    assert of_data in requests()
    assert create_reader(url).shards()[0].end == 1


def test_a_first_task_costs_three_questions_and_one_range(proxy: FaultyProxy, tmp_path: Path) -> None:
    """Of what is there, what is opened, and what was opened: in a process that has not seen the file before."""
    url, _ = copied(tfrecord, tmp_path)
    (shard,) = create_reader(url + "/a.tfrecord").shards()  # the index is kept
    proxy.requests.clear()
    assert len(create_reader(url + "/a.tfrecord").read(Shard(shard.name, 3, 30))) == 27
    assert [(one.method, bool(one.range)) for one in proxy.requests] == [("HEAD", False)] * 3 + [("GET", True)]


@pytest.mark.parametrize("write", [text_files, tfrecord, recordio], ids=lambda write: write.__name__)
def test_a_file_that_is_replaced_while_it_is_read_is_refused_without_a_request_for_each_task(
    write: Callable[[Path], None], proxy: FaultyProxy, tmp_path: Path
) -> None:
    url, directory = copied(write, tmp_path)
    reader = create_reader(url)
    shard = reader.shards()[0]
    reader.read(Shard(shard.name, 0, 3))
    proxy.requests.clear()
    for start in range(3, 60, 3):
        reader.read(Shard(shard.name, start, start + 3))
    assert {request.method for request in proxy.requests} <= {"GET"}
    path = directory / shard.name.rpartition("/")[2]
    path.write_bytes(path.read_bytes()[:-1] + b"x")  # of the same size
    uploaded(directory)
    with pytest.raises(DataError, match="changed while the job reads it"):
        reader.read(Shard(shard.name, shard.end - 3, shard.end))


@pytest.mark.parametrize("write", [text_files, tfrecord, recordio, parquet], ids=lambda write: write.__name__)
def test_a_file_that_is_replaced_after_it_was_counted_is_refused_by_every_other_process(
    write: Callable[[Path], None], proxy: FaultyProxy, tmp_path: Path
) -> None:
    url, directory = copied(write, tmp_path)
    shard = create_reader(url).shards()[0]
    first = Shard(shard.name, 0, 3, shard.identity)
    uploaded(directory)  # once more, the same
    assert len(create_reader(url).read(first)) == 3
    path = directory / shard.name.rpartition("/")[2]
    path.write_bytes(path.read_bytes()[:-1] + b"x")  # of the same size
    uploaded(directory)
    with pytest.raises(DataError, match=r"has changed since the job began: it has .* bytes as before"):
        create_reader(url).read(first)


def test_to_know_which_files_were_counted_costs_a_question_a_file_and_nothing_when_they_are_read(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    url, _ = copied(tfrecord, tmp_path)
    (shard,) = create_reader(url).shards()  # the index is kept
    proxy.requests.clear()
    assert create_reader(url).shards()[0].identity == shard.identity
    of_file = [one.method for one in proxy.requests if one.path.endswith("/a.tfrecord")]
    assert of_file == ["HEAD"] * 2  # the first is of the one that is opened
    proxy.requests.clear()
    assert len(create_reader(url + "/a.tfrecord").read(Shard(shard.name, 3, 30, shard.identity))) == 27
    assert [(one.method, bool(one.range)) for one in proxy.requests] == [("HEAD", False)] * 3 + [("GET", True)]


def test_a_file_of_a_web_server_is_compared_with_each_answer(proxy: FaultyProxy, tmp_path: Path) -> None:
    s3 = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{proxy.target}")
    key = f"{tmp_path.name}/a.txt"
    text = b"".join(b"line %d\n" % i for i in range(1000))
    s3.put_object(Bucket="bucket", Key=key, Body=text, ACL="public-read")
    reader = create_reader(f"http://127.0.0.1:{proxy.port}/bucket/{key}")
    (shard,) = reader.shards()
    reader.read(Shard(shard.name, 0, 3))
    proxy.requests.clear()
    for start in range(3, 60, 3):
        reader.read(Shard(shard.name, start, start + 3))
    assert {request.method for request in proxy.requests} == {"GET"}
    s3.put_object(Bucket="bucket", Key=key, Body=text.replace(b"line", b"word"), ACL="public-read")
    with pytest.raises(DataError, match="changed while the job reads it"):
        reader.read(Shard(shard.name, 3, 6))


def test_a_part_that_is_opened_again_is_the_one_that_was_read_before(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_KEPT_OPEN", 1)
    url, directory = copied(recordio, tmp_path)
    reader = create_reader(url)
    first, second, *_ = reader.shards()
    reader.read(Shard(first.name, 0, 3))
    reader.read(Shard(second.name, 0, 3))
    path = directory / first.name.rpartition("/")[2]
    with RecordIOWriter(str(path), chunk_size_bytes=500) as writer:
        writer.write_all([b"other"] * 300)
    uploaded(directory)
    with pytest.raises(DataError, match="changed while the job reads it"):
        reader.read(Shard(first.name, 0, 3))


def test_patterns_files_and_hidden_names_are_those_of_directories(proxy: FaultyProxy, tmp_path: Path) -> None:
    url = f"s3://bucket/{tmp_path.name}"
    storage = storage_of(url)
    for name in (
        "a/x-1.txt",
        "a/x-2.txt",
        "b/x-1.txt",
        "a/_notes.txt",
        "a/.hidden",
        "a/y.txt",
        "a/SHA256SUMS",
        "_b/x-1.txt",
    ):
        storage.publish(f"{url}/{name}", b"line\n")

    def names(source: str) -> list[str]:
        return [shard.name.removeprefix(f"{url}/") for shard in create_reader(source).shards()]

    assert names(f"{url}/*/x-*.txt") == ["a/x-1.txt", "a/x-2.txt", "b/x-1.txt"]
    assert names(f"{url}/_*/x-*.txt") == names(f"{url}/[_]b/*") == ["_b/x-1.txt"]
    assert names(f"{url}/a") == names(f"{url}/a/") == ["a/x-1.txt", "a/x-2.txt", "a/y.txt"]
    assert names(f"{url}/b/x-1.txt,{url}/a/y.txt") == ["a/y.txt", "b/x-1.txt"]
    with pytest.raises(DataError, match=rf"only directories[\s\S]*Name one of them: {url}/a, {url}/b"):
        create_reader(url)
    with pytest.raises(DataError, match="No file matches"):
        create_reader(f"{url}/*/z*")
    with pytest.raises(DataError, match="does not exist"):
        create_reader(f"{url}/none")
    with pytest.raises(DataError, match=r"\*\* in it"):
        create_reader(f"{url}/**/x-1.txt")


def test_names_of_directories_are_columns(proxy: FaultyProxy, tmp_path: Path) -> None:
    url = f"s3://bucket/{tmp_path.name}"
    storage = storage_of(url)
    for name in ("dt=1/shop=x", "dt=2/shop=y"):
        file = io.BytesIO()
        pq.write_table(pa.table({"price": [0.5]}), file)
        storage.publish(f"{url}/{name}/part-0.parquet", file.getvalue())
    reader = create_reader(url)
    assert reader.metadata().column_names == ("price", "dt", "shop")
    records = [record for shard in reader.shards() for record in reader.read(shard)]
    assert parse_examples(records, {"dt": ()})["dt"].tolist() == [1, 2]
    assert create_reader(f"{url}/dt=*/shop=*/*").metadata().column_names == ("price", "dt", "shop")


def test_what_needs_a_mounted_directory_is_refused_by_name(proxy: FaultyProxy, tmp_path: Path) -> None:
    url = f"s3://bucket/{tmp_path.name}"
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    storage_of(url).publish(f"{url}/images/cat/a.png", tmp_path / "a.png")
    for source in (f"{url}/images", f"{url}/images/cat"):
        with pytest.raises(DataError, match="holds images"):
            create_reader(source)
    with pytest.raises(DataError, match="HuggingFace reads mounted directories alone"):
        create_reader(url, {"reader_type": "HuggingFace"})
    with pytest.raises(StorageError, match="names no bucket"):
        create_reader("s3://")


def test_a_damaged_file_is_named_by_its_url_and_byte(proxy: FaultyProxy, tmp_path: Path) -> None:
    url, directory = copied(webdataset, tmp_path)
    with tarfile.open(directory / "a.tar") as archive:
        last = archive.getmembers()[-1].offset_data
    storage_of(url).publish(f"{url}/a.tar", (directory / "a.tar").read_bytes()[: last + 1])
    with pytest.raises(DataError, match=rf"{url}/a\.tar, byte \d+"):
        create_reader(url).shards()
