"""The contract of the port `Reader`, run over every reader there is."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import typed_sources as typed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticdl.data.custom import CustomTask, adapt_reader
from elasticdl.data.example import encode_example
from elasticdl.data.factory import create_reader
from elasticdl.data.reader import Metadata, Reader
from elasticdl.data.recordio import Compressor, RecordIOWriter
from elasticdl.protocol import Shard
from elasticdl_client.errors import DataError


@dataclass(frozen=True)
class Source:
    """A data source that a reader under test can open.

    Attributes:
        open: a fresh reader over the same data.
        records: of each shard.
        damage: makes one file unreadable and says a text that the error must have; nothing where any bytes are right.
    """

    open: Callable[[], Reader]
    records: dict[str, list[bytes]]
    damage: Callable[[], str] = lambda: ""


def recordio_directory(directory: Path) -> Source:
    records: dict[str, list[bytes]] = {}
    for number, compressor in enumerate([Compressor.NONE, Compressor.SNAPPY, Compressor.GZIP]):
        path = directory / f"data-{number:05d}"
        records[str(path)] = [f"{number}/{i}".encode() * (i % 7) for i in range(300 + number)]
        with RecordIOWriter(str(path), compressor, chunk_size_bytes=500) as writer:
            writer.write_all(records[str(path)])
    return Source(lambda: create_reader(str(directory)), records, lambda: cut_off(directory / "data-00001"))


def recordio_file_of_large_chunks(directory: Path) -> Source:
    path = directory / "data"
    records = [i.to_bytes(4, "little") * 1000 for i in range(700)]
    with RecordIOWriter(str(path), chunk_size_bytes=2 << 20) as writer:
        writer.write_all(records)
    return Source(lambda: create_reader(str(path)), {str(path): records}, lambda: cut_off(path))


def csv_files(directory: Path) -> Source:
    records: dict[str, list[bytes]] = {}
    for number in range(2):
        rows = [
            [str(i), f'said "{i}",\r\nthen\n\nleft' if i % 3 else "", f"é{i}" * (i % 5)] for i in range(600 + number)
        ]
        lines = [as_csv(row) for row in rows]
        path = directory / f"part-{number}.csv"
        path.write_bytes(b"\r\n".join([as_csv(["a b", 'quoted "b",', "c"]), *lines]))
        records[str(path)] = lines
    return Source(lambda: create_reader(str(directory)), records, lambda: open_a_quote(directory / "part-1.csv"))


def text_file(directory: Path) -> Source:
    lines = [b'plain "line' + b"x" * (i % 9) if i % 4 else b"" for i in range(700)]
    path = directory / "lines.txt"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return Source(lambda: create_reader(str(path)), {str(path): lines})


def tfrecord_files(directory: Path) -> Source:
    found = {
        str(directory / f"part-{number}.tfrecord"): [b"%d/%d" % (number, i) * (i % 9) for i in range(300 + number)]
        for number in range(2)
    }
    for path, payloads in found.items():
        typed.write_tfrecord(Path(path), payloads)
    return Source(lambda: create_reader(str(directory)), found, lambda: cut_off(directory / "part-1.tfrecord"))


def parquet_files(directory: Path) -> Source:
    return typed_files(directory, ".parquet", lambda path, made: typed.write_parquet(path, made))


def arrow_files(directory: Path) -> Source:
    return typed_files(directory, ".feather", lambda path, made: typed.write_arrow(path, made))


def arrow_streams(directory: Path) -> Source:
    return typed_files(directory, ".arrow", lambda path, made: typed.write_arrow_stream(path, made))


def jsonl_files(directory: Path) -> Source:
    return typed_files(directory, ".jsonl", lambda path, made: typed.write_jsonl(path, made))


def webdataset_files(directory: Path) -> Source:
    found: dict[str, list[bytes]] = {}
    for number in range(2):
        samples = {f"train/{number}-{i:04}": {"cls": b"%d" % (i % 7), "JPG": b"pixels" * (i % 9)} for i in range(300)}
        path = directory / f"part-{number}.tar"
        typed.write_tar(path, samples)
        made = [{"cls": int(files["cls"]), "jpg": files["JPG"]} for files in samples.values()]
        found[str(path)] = [encode_example(row) for row in made]

    def cut() -> str:
        with tarfile.open(directory / "part-1.tar") as archive:
            last = archive.getmembers()[-1]
        os.truncate(directory / "part-1.tar", last.offset_data + 1)
        return str(directory / "part-1.tar")

    return Source(lambda: create_reader(str(directory)), found, cut)


def numpy_files(directory: Path) -> Source:
    return typed_files(directory, ".npz", lambda path, made: typed.write_npz(path, made))


def compressed_numpy_files(directory: Path) -> Source:
    return typed_files(directory, ".npz", lambda path, made: typed.write_npz(path, made, compressed=True))


def typed_files(directory: Path, ending: str, write: Callable[[Path, list[dict[str, object]]], None]) -> Source:
    found: dict[str, list[bytes]] = {}
    for number in range(2):
        path, made = directory / f"part-{number}{ending}", typed.rows(310 + number, 1000 * number)
        write(path, made)
        found[str(path)] = typed.records(made)
    return Source(lambda: create_reader(str(directory)), found, lambda: cut_off(directory / f"part-1{ending}"))


def image_folder(directory: Path) -> Source:
    written = typed.write_images(directory, {"cat": 40, "dog": 25, "eel": 12})
    (directory / "notes.txt").write_text("no image")
    order = sorted(written, key=lambda path: hashlib.blake2b(path.encode(), digest_size=8).digest())
    labels = {"cat": 0, "dog": 1, "eel": 2}
    made = [encode_example({"image": written[path], "label": labels[path.partition("/")[0]]}) for path in order]

    def empty_one() -> str:
        (directory / order[0]).write_bytes(b"")
        return str(directory / order[0])

    return Source(lambda: create_reader(str(directory)), {str(directory): made}, empty_one)


def saved_dataset(directory: Path) -> Source:
    made = typed.rows(300)
    datasets.Dataset.from_list(made).save_to_disk(str(directory))

    def cut() -> str:
        cut_off(directory / "data-00000-of-00001.arrow")
        os.truncate(directory / "data-00000-of-00001.arrow", 100)
        return str(directory)

    return Source(lambda: create_reader(str(directory)), {str(directory): typed.records(made)}, cut)


def sqlite_table(directory: Path) -> Source:
    made = typed.rows(700)
    typed.write_sqlite(directory / "rows.db", made)
    url = f"sqlite:///{directory}/rows.db?table=t"
    return Source(lambda: create_reader(url, columns=["f", "n", "t"]), {url: typed.records(made)})


def slices_of_a_file(directory: Path) -> Source:
    made = typed.records(typed.rows(310))
    typed.write_parquet(directory / "rows.parquet", typed.rows(310))
    name = str(directory / "rows.parquet")
    found = {f"{name}#{start:03}": made[start : start + 120] for start in (0, 120, 240)}
    return Source(lambda: create_reader(name, records_per_shard=120), found, lambda: cut_off(Path(name)))


def custom_reader(directory: Path) -> Source:
    records = {f"table-{number}": [f"{number}:{i}".encode() for i in range(100 + number)] for number in range(3)}

    class TableReader:
        def shards(self) -> list[Shard]:
            return [Shard(name, 0, len(rows)) for name, rows in reversed(records.items())]

        def read(self, shard: Shard) -> list[bytes]:
            return records[shard.name][shard.start : shard.end]

        def metadata(self) -> Metadata:
            return Metadata(("only",))

    return Source(lambda: adapt_reader(lambda data_origin: TableReader(), "tables"), records)


def custom_reader_of_the_originals_form(directory: Path) -> Source:
    rows = [f"row {i}" for i in range(1000)]

    class OriginalReader:
        metadata = SimpleNamespace(column_names=["only"], column_dtypes=None)

        def __init__(self, records_per_task: int) -> None:
            self.records_per_task = records_per_task

        def create_shards(self) -> list[tuple[str, int, int]]:
            step = self.records_per_task
            return [("rows", start, min(step, 1000 - start)) for start in range(0, 1000, step)]

        def read_records(self, task: CustomTask) -> Iterator[str]:
            assert task.shard.start == task.start
            yield from rows[task.start : task.end]

    def custom_data_reader(data_origin: str, records_per_task: int = 0, **kwargs: object) -> OriginalReader:
        return OriginalReader(records_per_task)

    return Source(
        lambda: adapt_reader(custom_data_reader, "table", 64, {"partition": "p"}),
        {"rows": [row.encode() for row in rows]},
    )


def as_csv(row: list[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="").writerow(row)
    return text.getvalue().encode()


def cut_off(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-1])
    return str(path)


def open_a_quote(path: Path) -> str:
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b'\r\n1,"never closed\n')
    return f"{path}, byte {size + 2}"


DAMAGEABLE = [
    recordio_directory,
    recordio_file_of_large_chunks,
    csv_files,
    tfrecord_files,
    parquet_files,
    arrow_files,
    arrow_streams,
    jsonl_files,
    webdataset_files,
    numpy_files,
    compressed_numpy_files,
    image_folder,
    saved_dataset,
    slices_of_a_file,
]
SOURCES = [
    *DAMAGEABLE,
    text_file,
    sqlite_table,
    custom_reader,
    custom_reader_of_the_originals_form,
]


def scan(open_reader: Callable[[], Reader]) -> None:
    reader = open_reader()
    for shard in reader.shards():
        reader.read(shard)


@pytest.fixture(scope="module", params=SOURCES, ids=lambda source: source.__name__)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    made: Source = request.param(tmp_path_factory.mktemp("source"))
    return made


def test_every_shard_is_counted_from_zero_and_sorted_by_name(source: Source) -> None:
    shards = source.open().shards()
    assert shards == [Shard(name, 0, len(records)) for name, records in sorted(source.records.items())]


def test_the_same_shards_every_time_and_from_every_reader(source: Source) -> None:
    reader = source.open()
    assert reader.shards() == reader.shards() == source.open().shards()


def test_a_whole_shard_is_what_was_written(source: Source) -> None:
    reader = source.open()
    for shard in reader.shards():
        assert list(reader.read(shard)) == source.records[shard.name]


def test_a_reader_that_never_listed_its_shards_reads_the_same(source: Source) -> None:
    name, records = next(iter(source.records.items()))
    assert list(source.open().read(Shard(name, 5, 50))) == records[5:50]


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_partition_into_ranges_equals_the_full_scan(source: Source, data: st.DataObject) -> None:
    reader = source.open()
    name = data.draw(st.sampled_from(sorted(source.records)))
    num_records = len(source.records[name])
    cuts = sorted(data.draw(st.sets(st.integers(0, num_records), max_size=8)) | {0, num_records})
    ranges = list(itertools.pairwise(cuts))
    pieces = {start: reader.read(Shard(name, start, end)) for start, end in data.draw(st.permutations(ranges))}
    assert [len(pieces[start]) for start, _ in ranges] == [end - start for start, end in ranges]
    assert [record for start, _ in ranges for record in pieces[start]] == source.records[name]


def test_an_empty_range_has_no_records(source: Source) -> None:
    name = next(iter(source.records))
    assert list(source.open().read(Shard(name, 3, 3))) == []


def test_a_range_beyond_the_end_is_refused_by_name(source: Source) -> None:
    name, records = next(iter(source.records.items()))
    with pytest.raises(DataError, match="not in the data source"):
        source.open().read(Shard(name, 0, len(records) + 1))


def test_a_shard_of_another_source_is_refused_by_name(source: Source) -> None:
    with pytest.raises(DataError, match="elsewhere"):
        source.open().read(Shard("elsewhere", 0, 1))


def test_metadata_carries_a_seed_and_the_columns(source: Source) -> None:
    metadata = source.open().metadata()
    assert metadata.seed == 0
    known = ((), ("only",), ("a b", 'quoted "b",', "c"), ("f", "n", "t"), ("image", "label"), ("cls", "jpg"))
    assert metadata.column_names in known


def test_the_index_is_built_once_and_found_by_the_next_reader(source: Source) -> None:
    first, second = source.open(), source.open()
    assert first.shards() == second.shards()
    name, records = next(iter(source.records.items()))
    assert list(second.read(Shard(name, len(records) - 2, len(records)))) == records[-2:]


@pytest.mark.parametrize("make", DAMAGEABLE)
def test_damaged_input_is_named(make: Callable[[Path], Source], tmp_path: Path) -> None:
    source = make(tmp_path)
    named = source.damage()
    with pytest.raises(DataError) as caught:
        scan(source.open)
    assert named in caught.value.what
    assert "byte" in caught.value.what
    assert caught.value.hint
